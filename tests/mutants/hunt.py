"""Run the tests against each fault until one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.coverage_map import CoverageMap
from tests.mutants.faults import Fault
from tests.mutants.forked import Run, ended, run_alone
from tests.mutants.modules import all_tests

FIRST_S = 1_800.0
"""How long all tests may take without a fault."""


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
    return CoverageMap.of(dict(result.watched))


@dataclass
class _Hunt:
    """The run of a fault's current stage, and its later stages."""

    fault: Fault
    right: str  # the module's source without it
    run: Run
    later: list[list[str]]
    seconds: float = 0.0


def hunt(
    trees: Sequence[Path], faults: Iterable[Fault], covered: CoverageMap, note: Callable[[Found], None]
) -> list[Found]:
    """Run the tests against each fault, in as many forks as there are trees; return what came of each."""
    waiting, free = iter(faults), [*trees]
    hunts: list[_Hunt] = []
    results: list[Found] = []

    def start(tree: Path, stage: list[str]) -> Run:
        return Run.start(tree, stage, covered.limit_s(stage))

    def end(found: Found) -> None:
        results.append(found)
        note(found)

    while True:
        while free and (fault := next(waiting, None)) is not None:
            if not (stages := covered.stages(fault)):
                end(Found(fault, "survived", "executed by no test"))
                continue
            tree = free.pop()
            right = (tree / fault.module).read_text()
            (tree / fault.module).write_text(fault.source)
            hunts.append(_Hunt(fault, right, start(tree, stages[0]), stages[1:]))
        if not hunts:
            return results
        over = ended([one.run for one in hunts])
        for one in [one for one in hunts if one.run in over]:
            tree, result = one.run.tree, one.run.end()
            one.seconds += result.seconds
            if result.status == "passed" and one.later:
                one.run = start(tree, one.later.pop(0))
                continue
            hunts.remove(one)
            (tree / one.fault.module).write_text(one.right)
            free.append(tree)
            how = {"passed": "survived", "timeout": "timeout"}.get(result.status, "killed")
            end(Found(one.fault, how, next(iter(result.failed), result.status), one.seconds))
