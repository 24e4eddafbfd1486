"""Which tests execute which lines of kvobs, and how long each of them takes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import coverage
import pytest

from tests.mutants.faults import Fault
from tests.mutants.modules import own_tests

MOST_S = 40.0
"""Of the other modules' tests that execute a line the quickest are run, for so much time of the processor."""


@dataclass
class CoverageMap:
    """What a run of all tests without a fault has shown."""

    tests: list[str] = field(default_factory=list)  # pytest's ids
    took: list[float] = field(default_factory=list)  # by position, seconds of the processor
    by_line: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # module -> line -> positions; -1: imports

    @classmethod
    def of(cls, found: dict[str, Any]) -> CoverageMap:
        """Return the map that ``Watch.found`` has written."""
        by_line = {
            module: {int(line): tests for line, tests in lines.items()} for module, lines in found["by_line"].items()
        }
        return cls(found["tests"], found["took"], by_line)

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


class Watch:
    """A plugin of pytest that makes the map."""

    def __init__(self, tree: Path, modules: Sequence[str]) -> None:
        self._tree = tree
        self._modules = modules
        self._map = CoverageMap()
        self._coverage = coverage.Coverage(include=[str(tree / module) for module in modules], data_file=None)
        self._coverage.start()  # before the modules are imported

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what a test executes, and its time."""
        self._coverage.switch_context(str(len(self._map.tests)))
        begin = process_time()
        try:
            return (yield)
        finally:
            self._map.tests.append(item.nodeid)
            self._map.took.append(process_time() - begin)
            self._coverage.switch_context("")

    def found(self) -> dict[str, Any]:
        """Return the map, for JSON."""
        self._coverage.stop()
        data = self._coverage.get_data()
        for module in self._modules:
            lines = data.contexts_by_lineno(str(self._tree / module))
            self._map.by_line[module] = {
                line: [int(context) if context else -1 for context in contexts] for line, contexts in lines.items()
            }
        return {"tests": self._map.tests, "took": self._map.took, "by_line": self._map.by_line}
