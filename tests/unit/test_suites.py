"""The suites of `make test-all`: which there are, what each needs, and what is reported of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import suites
from tests.suites import BY_NAME, SUITES, Done, Suite, UnknownSuiteError, When

ROOT = suites.ROOT
MAKEFILE, RULES = (ROOT / "Makefile").read_text(), (ROOT / "tests/suites.mk").read_text()
SEVEN = ["install", "demo", "test", "lint", "bench", "release", "test-all"]
MARKERS = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_seven_targets_exist_and_help_lists_them_and_the_suites() -> None:
    assert re.findall(r"^([a-z-]+):.* ## ", MAKEFILE, re.MULTILINE) == ["help", *SEVEN]
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE) == ["help", *SEVEN]
    assert re.findall(r"^  (?!make)(\S+)", shown, re.MULTILINE) == list(BY_NAME)


@pytest.mark.parametrize("need", sorted({need for suite in SUITES for need in suite.needs}))
def test_what_a_suite_needs_has_a_rule(need: str) -> None:
    rule = re.sub(r"^\.pythons/[\d.]+", ".pythons/%", need).replace(".hosts/prometheus3", "$(PROMETHEUS3)")
    assert re.search(rf"^{re.escape(rule)}:", RULES, re.MULTILINE)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_suite_runs_the_tests_of_each_marker(marker: str) -> None:
    """And CI does, except Ray's."""
    runs = [suite for suite in SUITES if re.search(rf'-m "[^"]*(?<!not )\b{marker}\b', " ".join(suite.commands))]
    assert any(suite.is_in_ci for suite in runs) is (marker != "ray")
    assert runs


def test_tests_with_promtool_are_marked() -> None:
    """`make test` must run without it."""
    needed = r"^from (tests\.support\.promtool|tests\.unit\.dashboards\.evaluation) import"
    texts = {path: path.read_text() for path in (ROOT / "tests/unit").rglob("test_*.py")}
    found = [path for path, text in texts.items() if re.search(needed, text, re.MULTILINE)]
    assert len(found) > 5
    assert not [path for path in found if "pytest.mark.tools" not in texts[path]]


def test_ci_runs_those_of_the_table_in_its_order() -> None:
    assert suites.chosen([]) == [suite for suite in SUITES if suite.is_in_ci]
    assert [suite.name for suite in suites.chosen(["slow", "lint"])] == ["lint", "slow"]


def test_an_unknown_suite_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownSuiteError, match="ONLY has no suite engine; there are: lint, site, "):
        suites.chosen(["engine"])
    assert suites.main(["engine"]) == 2
    assert "ONLY has no suite engine" in capsys.readouterr().err


def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *planned: Suite) -> None:
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "SUITES", planned)
    monkeypatch.setattr(suites, "BY_NAME", {suite.name: suite for suite in planned})


def test_a_failing_suite_stops_no_other_and_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, tmp_path,
         Suite("early", "", ("echo early >> out",), when=When.FIRST),
         Suite("waits", "", ("while ! grep -q last out; do sleep 0.05; done", "echo waited"), when=When.ALONGSIDE),
         Suite("bad", "", ("false", "echo never >> out")),
         Suite("last", "", ("echo last >> out",)))  # fmt: skip
    assert suites.main([]) == 1
    assert (tmp_path / "out").read_text().split() == ["early", "last"]
    printed = capfd.readouterr().out
    table = printed.partition("\nSuites\n")[2]
    assert re.findall(r"^  (\w+) +\d+ s  (.*)$", table, re.MULTILINE) == [
        ("early", "passed"), ("bad", "FAILED: false"), ("last", "passed"), ("waits", "passed"),
    ]  # fmt: skip
    assert "waited" in printed


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["boards"], 1)])
def test_a_suite_that_cannot_run_is_left_out_or_fails_if_named(
    arguments: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plan(monkeypatch, tmp_path, Suite("boards", "", ("touch ran",), lacks=lambda: "npm"), Suite("other", "", ("true",)))
    assert suites.main(arguments) == status
    assert not (tmp_path / "ran").exists()
    assert re.search(r"^  boards +left out: this machine has no npm$", capfd.readouterr().out, re.MULTILINE)


def test_what_cannot_be_fetched_stops_all_that_would_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("thing:\n\tfalse\n")
    plan(monkeypatch, tmp_path, Suite("one", "", ("touch ran",), ("thing",)))
    assert suites.main([]) == 1
    assert not (tmp_path / "ran").exists()


def test_tests_of_the_variable_take_the_place_of_the_suites() -> None:
    command = [sys.executable, "-c", "from tests.suites import *; print(BY_NAME['engines'].commands[0])"]
    for tests, last in (("", " tests\n"), ('-k "a or b"', ' -k "a or b"\n')):
        shown = subprocess.run(command, cwd=ROOT, env={"TESTS": tests}, capture_output=True, text=True, check=True)
        assert shown.stdout.endswith(last)


def test_the_report_has_each_suite_with_its_time() -> None:
    text = suites.report([Done("engines", 61.4, ""), Done("slow", 2.0, "pytest x")], [("boards", "npm")])
    assert text.splitlines()[-3:] == [
        "  engines            61 s  passed",
        "  slow                2 s  FAILED: pytest x",
        "  boards            left out: this machine has no npm",
    ]
