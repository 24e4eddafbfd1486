"""Run the tests against each fault until one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tests.mutants.faults import Fault
from tests.mutants.forked import Run, ended, run_alone
from tests.mutants.modules import all_tests, stages

FIRST_S = 1_800.0
"""How long the tests may take without a fault; with one they have five times what they took, and two minutes."""


@dataclass(frozen=True)
class Found:
    """What came of a fault: how it was found, or that it was not."""

    fault: Fault
    how: str  # killed, timeout, survived
    by: str = ""  # the test that failed
    seconds: float = 0.0


class BaselineError(Exception):
    """The tests fail without any fault."""


def baseline(tree: Path) -> Mapping[str, float]:
    """Run all tests without a fault; return what each file took; BaselineError if one fails."""
    result = run_alone(tree, all_tests(tree), FIRST_S)
    if result.status != "passed":
        raise BaselineError(f"without a fault the tests have {result.status}\n{result.log}")
    return result.took


@dataclass
class _Hunt:
    """The run of a fault's current stage, and its later stages."""

    fault: Fault
    right: str  # the module's source without it
    run: Run
    later: list[list[str]]
    seconds: float = 0.0


def hunt(
    trees: Sequence[Path], faults: Iterable[Fault], took: Mapping[str, float], note: Callable[[Found], None]
) -> list[Found]:
    """Run the tests against each fault, in as many forks as there are trees; return what came of each."""
    waiting, free = iter(faults), [*trees]
    hunts: list[_Hunt] = []
    results: list[Found] = []

    def start(tree: Path, stage: list[str]) -> Run:
        return Run.start(tree, stage, 5 * sum(took.get(file, 0.0) for file in stage) + 120)

    while True:
        for fault in islice(waiting, len(free)):
            tree = free.pop()
            right = (tree / fault.module).read_text()
            (tree / fault.module).write_text(fault.source)
            first, *later = stages(tree, fault.module)
            hunts.append(_Hunt(fault, right, start(tree, first), later))
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
            results.append(Found(one.fault, how, next(iter(result.failed), result.status), one.seconds))
            note(results[-1])
