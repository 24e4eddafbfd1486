"""Run vLLM's own tests of connectors with vLLM's classes and with kvobs's, and compare.

::

    python -m tests.upstream PATH/TO/vllm/tests [FILE ...]

Twice with kvobs's classes in the place of vLLM's and without, and twice with a router, kvobs's or vLLM's, around each
connector of a scheduler. A test that passes with vLLM's classes must pass with kvobs's, or be in the table of those
that are expected not to. What can't run on this machine at all fails with both, and is counted only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from kvobs.demo.model import make_model
from tests.upstream.expected import AROUND, EXPECTED_AROUND, EXPECTED_IN_PLACE, IN_PLACE

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MODELS = ("facebook/opt-125m", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B")
"""The models that the tests name. A tiny one stands in for each: vLLM takes a folder of that name for the model."""
TEST_TIMEOUT_S = 120
RUN_TIMEOUT_S = 3600

Outcomes = dict[str, str]  # test -> passed, failed, error or skipped
_OUTCOMES = {"error": "error", "failure": "failed", "skipped": "skipped"}  # tag in pytest's report -> outcome


class Way(NamedTuple):
    """How kvobs comes into vLLM's tests."""

    plugin: str  # the file beside this one
    files: tuple[str, ...]
    vllms: dict[str, str]  # environment of the plugin
    ours: dict[str, str]
    expected: dict[str, str]


WAYS = (
    Way("in_place", IN_PLACE, {}, {"KVOBS_IN_PLACE": "1", "KVOBS_ENABLE": "1"}, EXPECTED_IN_PLACE),
    Way("around", AROUND, {"KVOBS_AROUND": "stock"}, {"KVOBS_AROUND": "kvobs"}, EXPECTED_AROUND),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="the folder `tests` of the source of the installed vLLM")
    parser.add_argument("files", nargs="*", help="test files below it; without any, those of the tables")
    arguments = parser.parse_args()
    tests = arguments.tests.resolve()
    if not (tests / IN_PLACE[0]).exists():
        sys.exit(f"{tests / IN_PLACE[0]} is not there: give the folder `tests` of vLLM's source")
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="kvobs-upstream-") as scratch:
        for model in MODELS:
            make_model(Path(scratch) / model)
        for way in WAYS:
            files = [tests / f for f in way.files if (tests / f).exists() and f in (arguments.files or way.files)]
            if files:
                vllms = run(way.plugin, tests, files, Path(scratch), way.vllms)
                ours = run(way.plugin, tests, files, Path(scratch), way.ours)
                has_failed |= judge(vllms, ours, way.expected)
    sys.exit(has_failed)


def run(plugin: str, tests: Path, files: list[Path], scratch: Path, switches: dict[str, str]) -> Outcomes:
    """Run the files in one pytest process; return what became of each test."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    paths = [str(tests.parent), str(HERE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tests), "--continue-on-collection-errors", "-W", "ignore", "--tb", "short"]
    command += ["--timeout", str(TEST_TIMEOUT_S), "--junitxml", str(report)]
    command += ["-o", "junit_family=xunit1", *map(str, files)]  # the one that names the file
    print(f"\n=== {plugin} {switches or ''}", flush=True)
    subprocess.run(
        command,
        cwd=scratch,
        env={**os.environ, **switches, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"},
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if not report.exists():
        sys.exit("pytest ended without a report: see above. The tests need tblib, msgpack and ray besides")
    return outcomes(report)


def outcomes(report: Path) -> Outcomes:
    """Read pytest's report: ``v1/.../test_file.py::Class::test[parameters]`` -> outcome."""
    found: Outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        file, kinds = case.get("file", ""), {child.tag for child in case}
        classes = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).split(".")
        outcome = next((what for tag, what in _OUTCOMES.items() if tag in kinds), "passed")
        found["::".join(filter(None, [file, *classes, case.get("name", "")]))] = outcome
    return found


def judge(vllms: Outcomes, ours: Outcomes, expected: dict[str, str]) -> bool:
    """Say how the two runs differ; return whether anything is not as expected."""
    both = [test for test, outcome in vllms.items() if outcome == "passed"]
    differ = [test for test in both if ours.get(test) != "passed"]
    surprises = [test for test in differ if _name(test) not in expected]
    needless = [test for test in both if _name(test) in expected and test not in differ]
    gained = [test for test, outcome in ours.items() if outcome == "passed" and vllms.get(test) in ("failed", "error")]
    print(f"\n{len(vllms)} tests; {len(both)} pass with vLLM's classes, {len(both) - len(differ)} of them with kvobs's")
    for test in differ:
        why = expected.get(_name(test), f"NOT EXPECTED, see above: {ours.get(test, 'gone')}")
        print(f"  differs: {test}\n    {why}")
    for test in needless:
        print(f"  passes, though the table says that it does not: {test}")
    for test in gained:
        print(f"  passes with kvobs's classes only: {test}")
    print(f"{len(vllms) - len(both)} can't run here or are skipped, with vLLM's classes too:")
    for test in vllms.keys() - both:
        print(f"  {vllms[test]}: {test}")
    return bool(surprises or needless or not both)


def _name(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0]


if __name__ == "__main__":
    main()
