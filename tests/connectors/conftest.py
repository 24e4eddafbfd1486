"""What the tests of real connectors share: their packages, one thread, and silence."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.connectors.packages import fetch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them all; warnings of the connectors themselves are not errors here."""
    for item in items:
        if "tests/connectors" in item.path.as_posix():
            item.add_marker(pytest.mark.connectors)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def _packages() -> None:
    """Make LMCache importable, and vLLM's MoRIIO, after everything that the environment has itself."""
    for folder in fetch(["lmcache", "moriio"]).values():
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


@pytest.fixture(autouse=True)
def _in_silence() -> Iterator[None]:
    """Use one thread for small copies, and log nothing: a life says thousands of lines."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)
