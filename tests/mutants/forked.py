"""Run tests in forks of this process, which has imported what they need, but neither kvobs nor the tests.

vLLM's import takes ten seconds, a fork a few milliseconds.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.coverage_map import Watch

_OURS = ("kvobs", "tests", "dashboards", "docs", "conftest")
_OPTIONS = (
    "-x",
    "-q",
    "--no-header",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)  # of plugins: this process has imported them
_MARKS = "not engine and not contract and not connectors and not slow and not ray"
PER_TEST_S = 120


class _Failures:
    """A plugin of pytest: what fails, and hypothesis's settings: no shrinking, and the same examples each time."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # after the conftest has loaded its profile

        settings.register_profile(
            "mutants", settings.default, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found.append(report.nodeid)


@dataclass(frozen=True)
class Result:
    """How a run of tests ended."""

    status: str  # passed, failed, timeout, died
    failed: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()  # imported by it, of other projects
    watched: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""


@dataclass
class Run:
    """A run of tests in a fork, in a tree of its own."""

    pid: int
    pipe: int
    tree: Path
    deadline: float
    began: float = field(default_factory=time.monotonic)
    _said: bytes = b""

    @classmethod
    def start(cls, tree: Path, arguments: Sequence[str], limit_s: float, watched: Sequence[str] = ()) -> Run:
        """Fork a process that runs pytest with these arguments in this tree; note what executes these modules."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            os.close(write)
            return cls(pid, read, tree, time.monotonic() + limit_s)
        try:
            os.close(read)
            _in_fork(tree, arguments, watched, write)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)

    def read(self) -> bool:
        """Read what the fork says; return whether it has ended."""
        if piece := os.read(self.pipe, 1 << 16):
            self._said += piece
            return False
        return True

    def end(self) -> Result:
        """Return the result of a run that has ended, or whose time is over."""
        is_late = time.monotonic() >= self.deadline
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # with what its tests have started
        os.close(self.pipe)
        os.waitpid(self.pid, 0)
        spent = time.monotonic() - self.began
        with suppress(ValueError):
            said = json.loads(self._said)
            status = "passed" if said["code"] == 0 else "failed"
            return Result(status, tuple(said["failed"]), tuple(said["modules"]), said["watched"], spent, self._log())
        return Result("timeout" if is_late else "died", seconds=spent, log=self._log())

    def _log(self) -> str:
        return (self.tree / "mutants.log").read_text(errors="replace")[-6_000:]


def ended(runs: Sequence[Run]) -> list[Run]:
    """Wait until one of the runs ends, or its time is over; return those that did."""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            selector.register(run.pipe, selectors.EVENT_READ, run)
        while True:
            wait_s = max(0.0, min(run.deadline for run in runs) - time.monotonic())
            over = [key.data for key, _ in selector.select(wait_s) if key.data.read()]
            over += [run for run in runs if run not in over and time.monotonic() >= run.deadline]
            if over:
                return over


def run_alone(tree: Path, arguments: Sequence[str], limit_s: float, watched: Sequence[str] = ()) -> Result:
    """Run tests, and wait for their end."""
    run = Run.start(tree, arguments, limit_s, watched)
    ended([run])
    return run.end()


def warm(modules: Iterable[str]) -> None:
    """Import modules of other projects, so that forks have them; those that can't be are left to the tests."""
    for module in modules:
        with suppress(BaseException):
            importlib.import_module(module)


def _in_fork(tree: Path, arguments: Sequence[str], watched: Sequence[str], write: int) -> None:
    os.setsid()
    os.chdir(tree)
    log = os.open(tree / "mutants.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    for name in [*sys.modules]:
        if name.partition(".")[0] in _OURS:
            del sys.modules[name]
    sys.path.insert(0, str(tree))
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"], os.environ["PYTHONDONTWRITEBYTECODE"] = str(tree), "1"
    failures, watch = _Failures(), Watch(tree, watched) if watched else None
    plugins = [failures, *([watch] if watch is not None else [])]
    code = pytest.main([*_OPTIONS, f"--timeout={PER_TEST_S}", "-m", _MARKS, *arguments], plugins=plugins)
    found: dict[str, Any] = {"code": int(code), "failed": failures.found, "watched": watch.found() if watch else {}}
    found["modules"] = [name for name in sys.modules if name.partition(".")[0] not in _OURS]
    said = json.dumps(found).encode()
    while said:
        said = said[os.write(write, said) :]
    sys.stdout.flush()
    os._exit(0)
