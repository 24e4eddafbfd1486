"""The model of all tests on real servers."""

from pathlib import Path

import pytest

from kvobs.demo.model import make_model

pytest.register_assert_rewrite("tests.engine.metered", "tests.engine.readings")  # they assert for several tests


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")
