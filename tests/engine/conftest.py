"""The folder of a module's server, and the port of exporters that start without being asked to."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.exported import PORT
from tests.engine.serving import eventually, listens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the one server of a module's tests."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture
def _default_port() -> Iterator[None]:
    """Keep tests whose exporters start by themselves apart: all have one port, and outlive their engines."""
    with (Path(tempfile.gettempdir()) / "kvobs-default-port.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        assert eventually(lambda: not listens(PORT), 30)
