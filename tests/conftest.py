"""What all tests share: quiet vLLM, no hub, a clean slate for what kvobs says once, and real engines."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

# `make test &` in a script: a shell has such a command ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

# Tests on real engines that run side by side have their ranks on different cores.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    available = sorted(os.sched_getaffinity(0))
    first = int(worker.removeprefix("gw")) % len(available)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, available[first:] + available[:first]))

import pytest
from hypothesis import settings

from kvobs import faults, log
from kvobs.export import starter
from kvobs.page import files, layout
from tests.support.contained import contain

# With pytest-xdist this is read by a process that runs no test, too: it need not import vLLM for ten seconds.
if TYPE_CHECKING:
    from pathlib import Path

    from kvobs.testing import Script
    from kvobs.testing.server import Server
    from tests.engine.serving import ServedEngine

# They assert for several tests.
pytest.register_assert_rewrite("tests.engine.metered", "tests.engine.readings", "tests.support.rig")
settings.register_profile("kvobs", deadline=None)  # a busy machine is no failure
settings.load_profile("kvobs")


# Rigs live until Python collects them: their pages would fill the shared memory of a container.
layout.CALLS = 1024
# One that lives for 20 s would start a real exporter, at a port that other tests look at.
starter.AUTO_AFTER_S = float("inf")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model of real engines."""
    from kvobs.testing.model import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def served_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedEngine:
    """Return what runs a real engine inside a `with` block: `served_engine(config, *arguments, ranks=2)`."""
    from tests.engine.serving import serve

    def served(config: Any, *args: str, folder: Path | None = None, **more: Any) -> AbstractContextManager[Server]:
        return serve(model, folder or tmp_path_factory.mktemp("engine"), config, *args, **more)

    return served


@pytest.fixture(autouse=True)
def _pages_are_removed() -> Iterator[None]:
    """Remove the pages of a test's rigs, which live until Python collects them: each start reads all that there are."""
    yield
    for name in files.names():
        if name.endswith(f"-{os.getpid()}{files.SUFFIX}"):
            (files.folder() / name).unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def _threads_end() -> Iterator[None]:
    """Let the rigs of a module go: each has threads that look after its page, also while later tests run."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _clean_slate() -> None:
    """Let each test get every notice, and write its own scripts."""
    log.forget()
    faults.take()
    if scripted := sys.modules.get("kvobs.testing.scripted"):
        scripted.SCRIPTS.clear()
    logging.getLogger("vllm.kvobs").setLevel(logging.DEBUG)
    # An earlier test may have had vLLM set up its logging, which passes nothing on, or may have switched it off.
    logging.getLogger("vllm").propagate = True
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Side by side, the threads that share a copy wait for each other longer than the copy takes."""
    if worker:
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contain kvobs's own faults; under pytest they are raised on."""
    contain(monkeypatch)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def a() -> Script:
    from kvobs.testing import Script

    return Script("a")


@pytest.fixture
def b() -> Script:
    from kvobs.testing import Script

    return Script("b")


def pytest_collection_finish() -> None:
    """Let no later collection look at what has been imported."""
    gc.collect()
    gc.freeze()
