"""Run the tests against each fault until one of them fails: those that execute its line, the quickest first."""

import py_compile
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tests.mutants.faults import Fault
from tests.mutants.forked import FORK, run_alone

ROOT = Path(__file__).parents[2]

NOT_IN_AN_ENGINE = {"cli", "demo", "testing", "deviations"}
"""Packages and modules that run neither in an engine nor in the exporter: no faults are made in them."""

ELSEWHERE = {"demo", "dashboards"}
"""Folders of unit tests that find nothing in these modules."""

FIRST_S = 7_200.0
"""How long all tests may take without a fault, on a busy machine."""

MOST_S = 40.0
"""Of the other modules' tests that execute a line the quickest are run, for so much time of the processor."""


@dataclass(frozen=True)
class CoverageMap:
    """Which tests execute which lines, from a run of all without a fault; as in ``forked.Result``."""

    tests: Sequence[str]
    took: Sequence[float]
    by_line: Mapping[str, Mapping[int, Sequence[int]]]

    def stages(self, fault: Fault) -> list[list[str]]:
        """Return the tests to run one after the other until a fault is found: its module's own, then others.

        Only those that execute the line; all, if it is executed by an import. If none does, those of its folder: they
        may start a process that executes it.
        """
        lines = self.by_line.get(fault.module, {})
        first, last = fault.lines
        hits = {at for line in range(first, last + 1) for at in lines.get(line, ())}
        folder = own_tests(fault.module).rpartition("/")[0]
        hits = hits or {at for at, test in enumerate(self.tests) if test.rpartition("/")[0] == folder}
        positions = sorted(range(len(self.tests)) if -1 in hits else hits, key=self.took.__getitem__)
        file = own_tests(fault.module)
        own = [at for at in positions if self.tests[at].partition("::")[0] == file]
        others: list[int] = []
        left = MOST_S
        for at in positions:
            left -= 0 if at in own else self.took[at]
            if at not in own and left > 0:
                others.append(at)
        return [[self.tests[at] for at in stage] for stage in (own, others) if stage]

    def limit_s(self, stage: Sequence[str]) -> float:
        """Return how long these tests may take with a fault: much longer than without, on a busy machine too."""
        took = dict(zip(self.tests, self.took, strict=True))
        return 120 + 20 * sum(took[test] for test in stage)


@dataclass(frozen=True)
class Found:
    """What came of a fault: how it was found, or that it was not."""

    fault: Fault
    how: str  # killed, timeout, survived
    by: str = ""  # the test that failed
    seconds: float = 0.0


class BaselineError(Exception):
    """The tests fail without any fault."""


def baseline(tree: Path, modules: Sequence[str]) -> CoverageMap:
    """Run all tests without a fault; return which of them execute what; BaselineError if one fails."""
    result = run_alone(tree, all_tests(tree), FIRST_S, modules)
    if result.status != "passed":
        raise BaselineError(f"without a fault the tests have {result.status}\n{result.log}")
    return CoverageMap(result.tests, result.took, result.by_line)


def hunt(
    trees: Sequence[Path], faults: Iterable[Fault], covered: CoverageMap, note: Callable[[Found], None]
) -> list[Found]:
    """Run the tests against each fault, in as many processes as there are trees; return what came of each."""
    free = FORK.SimpleQueue()
    for tree in trees:
        free.put(tree)
    results = []
    with ProcessPoolExecutor(len(trees), FORK, _hold, (free, covered)) as pool:
        for done in as_completed([pool.submit(_hunt, fault) for fault in faults]):
            results.append(done.result())
            note(results[-1])
    return results


_held: list[Any] = []
"""Of a process of the pool: its tree, and the map of all tests."""


def _hold(free: Any, covered: CoverageMap) -> None:
    _held[:] = free.get(), covered


def _hunt(fault: Fault) -> Found:
    """Put a fault into this process's tree for as long as its tests run."""
    tree, covered = _held
    how, by, seconds = "passed", "executed by no test", 0.0
    right = (tree / fault.module).read_text()
    (tree / fault.module).write_text(fault.source)
    for stage in covered.stages(fault):
        result = run_alone(tree, stage, covered.limit_s(stage))
        how, by, seconds = result.status, next(iter(result.failed), result.status), seconds + result.seconds
        if how != "passed":
            break
    (tree / fault.module).write_text(right)
    return Found(fault, {"passed": "survived", "timeout": "timeout"}.get(how, "killed"), by, seconds)


# --- the modules, their tests, and copies of the tree


def copy_tree(to: Path, root: Path = ROOT) -> None:
    """Copy the files of the working tree that git does not ignore, and compile the modules."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to / name)
    for module in (to / "kvobs").rglob("*.py"):
        # By its content: a changed module may have the size and, within a second, the time of the one before.
        py_compile.compile(str(module), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def all_modules(root: Path) -> list[str]:
    """Return the paths of all modules that run in an engine or in the exporter."""
    return _files(root, "kvobs", "*.py", NOT_IN_AN_ENGINE)


def all_tests(root: Path) -> list[str]:
    """Return all files of tests that are run."""
    return _files(root, "tests/unit", "test_*.py", ELSEWHERE)


def own_tests(module: str) -> str:
    """Return the file of a module's own tests, found from its name."""
    path = PurePosixPath(module)
    return str(PurePosixPath("tests/unit") / path.parent.relative_to("kvobs") / f"test_{path.name}")


def _files(root: Path, folder: str, pattern: str, without: set[str]) -> list[str]:
    paths = [path.relative_to(root) for path in sorted((root / folder).rglob(pattern))]
    return [path.as_posix() for path in paths if not without & set(path.with_suffix("").parts)]
