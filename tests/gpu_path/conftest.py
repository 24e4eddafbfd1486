"""What the tests of this path share: their mark, the model, and the answers that all cells must give."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.engine.conftest import model
from tests.gpu_path.cells import Cell, Found
from tests.gpu_path.scenarios import SCENARIOS

__all__ = ["model"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu_path" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu_path)


@pytest.fixture(scope="session")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what an engine answers without any connector, on the V1 runner with synchronous scheduling.

    The first of pytest's workers runs it.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "base"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            found = Found(**json.loads((folder / "result.json").read_text()))
        else:
            folder.mkdir()
            found = Cell(is_v2=False, is_async=False, scenarios=(*SCENARIOS,)).run(model, folder)
    assert found.ended == ""
    return found
