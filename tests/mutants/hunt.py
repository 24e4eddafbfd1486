"""Run the tests against each fault until one of them fails: those that execute its line, the quickest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import Fault
from tests.mutants.forked import Run, ended, run_alone
from tests.mutants.tree import all_tests, own_tests

FIRST_S = 1_800.0
"""How long all tests may take without a fault."""

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
        return Run(tree, stage, covered.limit_s(stage))

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
        over = ended([each.run for each in hunts])
        for each in [each for each in hunts if each.run in over]:
            tree, result = each.run.tree, each.run.end()
            each.seconds += result.seconds
            if result.status == "passed" and each.later:
                each.run = start(tree, each.later.pop(0))
                continue
            hunts.remove(each)
            (tree / each.fault.module).write_text(each.right)
            free.append(tree)
            how = {"passed": "survived", "timeout": "timeout"}.get(result.status, "killed")
            end(Found(each.fault, how, next(iter(result.failed), result.status), each.seconds))
