"""The model of all tests on real servers."""

from pathlib import Path

import pytest

from kvobs.demo.model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")
