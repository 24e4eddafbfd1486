"""What the tests of this path share: their mark, and the answers that all cells must give."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.gpu_path.cells import Cell, Found
from tests.gpu_path.scenarios import SCENARIOS


class ByCell(LoadScopeScheduling):
    """Gives a worker of pytest one cell at a time, which has an engine for itself; the files of servers are whole.

    Of the two files of cells one has three times the engines of the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0] if "/servers/" in nodeid else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByCell(config, log)


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
