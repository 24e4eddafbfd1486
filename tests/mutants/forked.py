"""Run tests in forks of this process, which has imported what they need, but neither kvobs nor the tests.

vLLM's import takes ten seconds, a fork a few milliseconds.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

FORK = multiprocessing.get_context("fork")
_OURS = ("kvobs", "tests", "dashboards", "docs", "conftest")
_OPTIONS = ["-x", "-q", "-rfE", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins: this process has imported them
_MARKS = "not engine and not contract and not connectors and not slow and not ray"
PER_TEST_S = 120


@dataclass(frozen=True)
class Result:
    """How a run of tests ended, and what it executed of the watched modules."""

    status: str  # passed, failed, timeout, died
    failed: Sequence[str] = ()
    modules: Sequence[str] = ()  # imported by it, of other projects
    tests: Sequence[str] = ()  # pytest's ids
    took: Sequence[float] = ()  # by position, seconds of the processor
    by_line: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # module -> line -> positions; -1: imports
    seconds: float = 0.0
    log: str = ""


def run_alone(tree: Path, arguments: Sequence[str], limit_s: float, watched: Sequence[str] = ()) -> Result:
    """Run pytest in a fork, and wait for its end.

    Args:
        tree: the copy of the project.
        arguments: pytest's.
        limit_s: how long it may take.
        watched: the modules whose lines are watched.
    """
    begin = time.monotonic()
    pipe, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_in_fork, args=(tree, arguments, watched, theirs))
    process.start()
    theirs.close()
    answer: dict[str, Any] = {"status": "died"}
    with pipe, suppress(EOFError):
        answer = pipe.recv() if pipe.poll(limit_s) else {"status": "timeout"}
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with what its tests have started
    process.join()
    log = (tree / "mutants.log").read_text(errors="replace")[-6_000:]
    return Result(**answer, seconds=time.monotonic() - begin, log=log)


def warm(modules: Iterable[str]) -> None:
    """Import modules of other projects, so that forks have them; those that can't be are left to the tests."""
    for module in modules:
        with suppress(BaseException):
            importlib.import_module(module)


class _Plugin:
    """Notes what fails, and which tests execute which lines of the watched modules, in what time."""

    def __init__(self, tree: Path, watched: Sequence[str]) -> None:
        self.failed: list[str] = []
        self.tests: list[str] = []
        self.took: list[float] = []
        self._paths = {module: str(tree / module) for module in watched}
        self._coverage = coverage.Coverage(include=[*self._paths.values()], data_file=None)
        if watched:
            self._coverage.start()  # before the modules are imported

    def pytest_configure(self) -> None:
        """Set hypothesis's profile, after the conftest has: no shrinking, and the same examples each time."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants", settings.default, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self._paths:
            return (yield)
        self._coverage.switch_context(str(len(self.tests)))
        begin = time.process_time()
        try:
            return (yield)
        finally:
            self.tests.append(item.nodeid)
            self.took.append(time.process_time() - begin)
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def by_line(self) -> dict[str, dict[int, list[int]]]:
        """Return the positions of the tests that execute each line."""
        if not self._paths:
            return {}
        self._coverage.stop()
        lines_of = self._coverage.get_data().contexts_by_lineno
        return {
            module: {line: [int(test) if test else -1 for test in tests] for line, tests in lines_of(path).items()}
            for module, path in self._paths.items()
        }


def _in_fork(tree: Path, arguments: Sequence[str], watched: Sequence[str], pipe: Connection) -> None:
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
    plugin = _Plugin(tree, watched)
    code = pytest.main([*_OPTIONS, f"--timeout={PER_TEST_S}", "-m", _MARKS, *arguments], plugins=[plugin])
    pipe.send(
        {
            "status": "failed" if code else "passed",
            "failed": plugin.failed,
            "modules": [name for name in sys.modules if name.partition(".")[0] not in _OURS],
            "tests": plugin.tests,
            "took": plugin.took,
            "by_line": plugin.by_line(),
        }
    )
    sys.stdout.flush()
    os._exit(0)
