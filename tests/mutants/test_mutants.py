"""The driver of the mutation tests: which faults it makes, which tests it runs, and what it says of them."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import parsed, report
from tests.mutants.equivalents import EQUIVALENTS, Equivalent
from tests.mutants.faults import Fault, draw, faults_of
from tests.mutants.hunt import MOST_S, ROOT, CoverageMap, Found, all_modules, all_tests, own_tests
from tests.mutants.joint_faults import JOINT_FAULTS

MODULE = "kvobs/state/limits.py"
SOURCE = '''"""Limits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvobs.log import log, once

Names = dict[str, int]
T = TypeVar("T")

if TYPE_CHECKING:
    LATER = 3


@dataclass(slots=True)
class Limit:
    """A limit."""

    most: int = 9

    @property
    def is_small(self) -> bool:
        """Return whether it is small."""
        return self.most < 5


def check(n: int) -> str:
    if n > 7:
        raise ValueError(n - 1)
    log.info("a %s", n)
    once("key", 20, "text")
    return "kept" if n else "a text"
'''
CHANGED = {"most: int = 9", "return self.most < 5", "if n > 7:", 'return "kept" if n else "a text"'}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a tree of one module, with a test that finds some of its faults."""
    for folder in ("kvobs/state", "tests/unit/state"):
        (tmp_path / folder).mkdir(parents=True)
    for package in ("kvobs", "kvobs/state"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "kvobs/log.py").write_text("log = once = None\n")
    (tmp_path / MODULE).write_text(SOURCE)
    (tmp_path / "tests/unit/state/test_limits.py").write_text(
        "from kvobs.state.limits import Limit\n\ndef test_small():\n    assert not Limit(5).is_small\n"
    )
    return tmp_path


def test_a_fault_knows_the_lines_of_its_statement(tree: Path) -> None:
    """A statement is executed if any of its lines is; the head of one with a body is no part of the body."""
    (tree / MODULE).write_text("def f(a):\n    if a(\n        1\n    ):\n        return (\n            2\n        )\n")
    assert {(fault.line, fault.lines) for fault in faults_of(tree, MODULE, 1)} >= {(3, (2, 3)), (6, (5, 7))}


def test_faults_are_in_what_a_test_can_check_whether_decorated_or_not(tree: Path) -> None:
    """Not in texts, annotations, log lines, errors' messages; none twice; each can be compiled."""
    faults = list(faults_of(tree, MODULE, 1))
    assert {fault.before for fault in faults} == CHANGED
    assert {fault.function for fault in faults} == {"Limit", "Limit.is_small", "check"}
    assert len({fault.source for fault in faults}) == len(faults)
    for fault in faults:
        ast.parse(fault.source)
        assert SOURCE.splitlines()[fault.line - 1].strip() == fault.before
        assert fault.after in map(str.strip, fault.source.splitlines())
    line = 1 + SOURCE.splitlines().index("        return self.most < 5")
    some = list(faults_of(tree, MODULE, 1, {line}))
    assert {fault.line for fault in some} == {line}
    assert {fault.after for fault in some} >= {"return self.most <= 5", "return self.most < 6"}


def test_what_no_test_should_repeat_is_left(tree: Path) -> None:
    (tree / MODULE).write_text(
        'def f(a, b):\n    if len(("x", "y")) > a:\n        return list(enumerate(zip(a, b, strict=True)))\n'
        '    c = False\n    return Thread(daemon=c, name="kvobs-c")\n'
    )
    made = {fault.after for fault in faults_of(tree, MODULE, 1)}
    assert {"c = True", "return list(enumerate(zip(a, strict=True)))"} <= made
    parts = ("X", "Y", "c = None", "zip(a, b, )", "strict=False", "strict=None", "name=None", "daemon=c, )")
    assert [after for after in made if any(part in after for part in parts)] == []


def test_modules_have_equally_many_faults_and_the_same_ones_whatever_else_is_drawn(tree: Path) -> None:
    (tree / "kvobs/state/short.py").write_text("n = 1\n")
    (tree / "kvobs/state/other.py").write_text(SOURCE)
    modules = (MODULE, "kvobs/state/short.py", "kvobs/state/other.py")
    drawn = draw(tree, modules, 9, 5)
    counts = [sum(fault.module == module for fault in drawn) for module in modules]
    assert counts in ([4, 2, 3], [3, 2, 4]), "the short one has two"
    assert [fault for fault in drawn if fault.module == MODULE] == draw(tree, [MODULE], counts[0], 5)
    assert draw(tree, [MODULE], 4, 6) != draw(tree, [MODULE], 4, 5)
    assert len(draw(tree, [MODULE], 10_000, 5)) == len(list(faults_of(tree, MODULE, 5)))


def fault(line: int, last: int) -> Fault:
    return Fault(MODULE, "f", line, (line, last), "", "", "")


def test_tests_that_execute_the_line_are_run_the_modules_own_first_then_the_quickest() -> None:
    own = "tests/unit/state/test_limits.py::"
    names = [f"{own}a", "b.py::b", f"{own}c", "b.py::d", "b.py::e"]
    lines = {3: [0, 2, 3], 4: [1], 5: [4], 6: [-1]}
    covered = CoverageMap(names, [0.2, 0.1, 0.1, 0.05, MOST_S], {MODULE: lines})
    assert covered.stages(fault(3, 4)) == [[f"{own}c", f"{own}a"], ["b.py::d", "b.py::b"]]
    assert covered.stages(fault(4, 4)) == [["b.py::b"]]
    assert covered.stages(fault(5, 5)) == [], "its test takes too long"
    assert covered.stages(fault(6, 6)) == [[f"{own}c", f"{own}a"], ["b.py::d", "b.py::b"]], "an import executes it"
    assert covered.stages(fault(7, 7)) == [[f"{own}c", f"{own}a"]], "they may start a process that does"
    assert covered.stages(replace(fault(7, 7), module="kvobs/other/thing.py")) == []
    assert covered.limit_s(["b.py::d", "b.py::b"]) == pytest.approx(123)


def test_faults_are_made_where_an_engine_or_the_exporter_runs() -> None:
    modules = all_modules(ROOT)
    assert {f"kvobs/{name}.py" for name in ("connector", "routing/worker", "export/totals")} <= {*modules}
    assert [module for module in modules if {"cli", "demo", "testing"} & {*Path(module).parts}] == []


def test_a_modules_tests_are_found_from_its_name() -> None:
    every, modules = all_tests(ROOT), all_modules(ROOT)
    assert sum(own_tests(module) in every for module in modules) > 0.7 * len(modules)
    assert [own for own in map(own_tests, modules) if (ROOT / own).exists() and own not in every] == []


def test_each_equivalent_is_a_possible_fault() -> None:
    """Else its text has changed since, and the entry is void."""
    possible = set()
    for module in {entry.module for entry in EQUIVALENTS}:
        begins = tuple(entry.before for entry in EQUIVALENTS if entry.module == module)
        lines = [line.strip() for line in (ROOT / module).read_text().splitlines()]
        on = {n for n, line in enumerate(lines, 1) if line and any(begin.startswith(line) for begin in begins)}
        possible |= {fault.key for fault in faults_of(ROOT, module, 0, on)}
    assert [entry for entry in EQUIVALENTS if entry.key not in possible] == []
    assert all(entry.reason for entry in EQUIVALENTS)


def test_each_fault_where_two_parts_meet_can_still_be_planted() -> None:
    """Else its file has changed since, and nothing would be planted."""
    sources = [(fault, (ROOT / fault.file).read_text()) for fault in JOINT_FAULTS]
    assert [fault.name for fault, source in sources if source.count(fault.before) != 1] == []
    for fault, source in sources:
        ast.parse(fault.planted_in(source))
        file, _, test = fault.tests.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), fault.name
    assert len({fault.name for fault in JOINT_FAULTS}) == len(JOINT_FAULTS)


RUN = """
import json, sys
from pathlib import Path
import hypothesis, pytest
from tests.mutants.faults import faults_of
from tests.mutants.forked import run_alone
from tests.mutants.hunt import baseline, hunt

tree, file = Path(sys.argv[1]), "tests/unit/state/test_limits.py"
module = "kvobs/state/limits.py"
covered = baseline(tree, [module])
some = [fault for fault in faults_of(tree, module, 1) if fault.after in sys.argv[2:]]
found = hunt([tree], some, covered, lambda one: None)
said = {"tests": covered.tests, "found": {one.fault.after: [one.how, one.by] for one in found}}
said["source"] = (tree / module).read_text()
for name, body in (("died", "import os; os._exit(3)"), ("timeout", "while True: pass"), ("failed", "0 / 0")):
    (tree / file).write_text(f"def test_it():\\n    {body}\\n")
    said[name] = run_alone(tree, [file], 3 if name == "timeout" else 60).status
print(json.dumps(said))
"""


def test_faults_that_a_test_finds_are_killed_and_the_tree_is_as_it_was(tree: Path) -> None:
    """In a process of its own: this one has threads, and has imported kvobs."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    changed = ("return self.most <= 5", "return self.most < 6", "most: int = None", "if n >= 7:")
    command = [sys.executable, "-c", RUN, str(tree), *changed]
    done = subprocess.run(command, cwd=tree, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    test = "tests/unit/state/test_limits.py::test_small"
    assert said["tests"] == [test]
    assert [said["found"][after] for after in changed] == [
        ["killed", test],
        ["killed", test],
        ["survived", "passed"],  # an import executes it
        ["survived", "passed"],  # nothing executes it
    ]
    assert said["source"] == SOURCE
    assert [said[name] for name in ("died", "timeout", "failed")] == ["died", "timeout", "failed"]


def test_the_report_counts_equivalents_apart_and_shows_what_survived() -> None:
    def found(after: str, how: str) -> Found:
        return Found(Fault("kvobs/a.py", "f", 7, (7, 7), "before", after, ""), how)

    lived = [found("one", "survived"), found("two", "survived"), found("three", "killed"), found("four", "timeout")]
    table = [Equivalent("kvobs/a.py", "f", "before", after, "it is the same") for after in ("two", "three")]
    shown, share = report(lived, table)
    assert share == 2 / 3
    assert f"{'all':<42}{4:>8}{2:>8}{1:>12}{1:>10}" in shown
    assert "survived: kvobs/a.py:7 f\n  - before\n  + one" in shown
    assert "equivalent: kvobs/a.py:7 f\n  - before\n  + two\n  it is the same" in shown
    assert shown.endswith("killed: 66.7% of those that a test can find, 50.0% of all")
    assert report([], ())[1] == 1


def test_modules_are_named_by_their_last_name() -> None:
    assert parsed(["--module", "ledger", "worker"]).module == ["kvobs/routing/worker.py", "kvobs/state/ledger.py"]
    assert parsed([]).module == all_modules(ROOT)
    with pytest.raises(SystemExit):
        parsed(["--module", "nothing"])
