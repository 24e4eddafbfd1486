"""`kvobs summary` as a person runs it: ways to ask, what it prints, its exit status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.cli.summary import command
from tests.support.exporting import HIT
from tests.support.page_files import page_folder
from tests.support.top_engines import web
from tests.support.written import Pages


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(command, "SETTLE_S", 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with page_folder() as made:
        yield made
    assert {number: signal.getsignal(number) for number in before} == before


def run(*arguments: object, columns: int = 100) -> tuple[int, str, str]:
    """Run the command; return its exit code, and what it printed to stdout and to stderr."""
    result = CliRunner().invoke(app, ["summary", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Invalid value: give one of -- COMMAND, --for, --since-start, BEFORE AFTER"),
        (["--since-start", "--for", "1s"], "found --for and --since-start; give one of"),
        (["--for", "x"], "found 'x'; use a number with s, m, h or d"),
        (["--"], "found no command after --"),
        (["a", "b", "c"], "found 3 files; give two, or AFTER alone"),
        (["a", "b", "--engine", "x"], "has no effect on saved texts"),
        (["--since-start", "--engine", "a b"], "'a b' is not a server address"),
        (["--since-start", "--from", "now"], "need each other"),
        (["--prometheus", "x"], "need each other"),
        (["--prometheus", "x", "--from", "now"], "is not before --to"),
        (["--prometheus", "x", "--from", "y"], "found 'y'; use ISO 8601"),
        (["--prometheus", "a b", "--from", "now-1h"], "'a b' is not a server address"),
        (["--since-start", "--json", "--markdown"], "give one of --json and --markdown"),
        (["--since-start", "-o", "/etc/passwd"], "/etc/passwd exists: name another file"),
        (["--since-start", "-o", "/none/x"], "/none/x can't be written: its folder is not there, or not yours"),
    ],
)
def test_what_can_not_be_asked_is_named(arguments: list[str], says: str) -> None:
    code, _, errors = run(*arguments)
    assert (code, says in " ".join(errors.replace("\u2502", "").split())) == (2, True), errors


@pytest.mark.parametrize("arguments", [["--since-start"], ["--for", "1s"]])
def test_without_an_engine_the_reasons_are_named(arguments: list[str], folder: Path) -> None:
    code, _, errors = run(*arguments)
    assert code == 1
    assert f"found no running engine in {folder}: run this as the engine's user" in errors


def hits(n: int, status: int) -> list[str]:
    """Return a command that lets the engine of the last page here count so many hits, and its exit status."""
    code = f"""
from kvobs.page import files
from kvobs.page.layout import Layout, WORD, HEAD, first
import mmap, os, struct, sys
path = files.Path(sys.argv[1])
with path.open("r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
length = HEAD.unpack_from(memory)[2]
words = memoryview(memory)[first(memory[HEAD.size : HEAD.size + length]):].cast("q")
words[int(sys.argv[2])] += {n}
print("a benchmark")
raise SystemExit({status})
"""
    return [sys.executable, "-c", code]


def test_a_command_runs_and_what_its_engines_counted_is_shown(folder: Path) -> None:
    pages = Pages(None, port=1)
    pages.add(HIT, 100)
    (page,) = folder.iterdir()
    at = pages.writers[0].layout.counts + HIT
    code, output, _ = run("--", *hits(7, 3), page, at)
    assert code == 3, output
    lines = output.splitlines()
    assert lines[0].startswith("tiny at port 1   ")
    assert lines[1].split() == ["one", "two"]
    assert ["hits", "7", "0"] in [line.split() for line in lines]
    code, output, _ = run("--since-start", "--json")
    assert (code, json.loads(output)["servers"][0]["connectors"][0]["hits"]) == (0, 107)


def test_the_options_behind_the_dashes_are_the_commands() -> None:
    pages = Pages(None)
    code, output, _ = run("--markdown", "--", sys.executable, "-c", "import sys; sys.exit(len(sys.argv))", "--", "-o")
    assert code == 3
    assert output.startswith("**tiny   ")
    assert pages.writers


def test_without_an_engine_a_command_keeps_status_and_reason() -> None:
    code, _, errors = run("--", sys.executable, "-c", "raise SystemExit(5)")
    assert code == 5
    assert "warning: no engine runs here yet: engines that the command starts are counted" in errors
    assert "found no running engine" in errors
    assert run("--", sys.executable, "-c", "")[0] == 1
    code, _, errors = run("--", "no-such-command-x")
    assert (code, "no-such-command-x can't be run: No such file or directory" in errors) == (127, True)


def test_a_silent_address_is_named_before_the_command_runs(tmp_path: Path) -> None:
    code, _, errors = run("--engine", "localhost:1", "--", sys.executable, "-c", f"open('{tmp_path}/ran', 'w')")
    assert (code, "localhost:1: no answer" in errors) == (1, True)
    assert not (tmp_path / "ran").exists()


def test_an_address_gone_after_the_command_keeps_its_status() -> None:
    answers = [(200, 'kvobs_loads_total{connector="a"} 1\n')]
    with web(lambda _: answers.pop() if answers else (500, "")) as address:
        code, _, errors = run("--engine", address, "--", sys.executable, "-c", "raise SystemExit(4)")
    assert code == 4
    assert f"{address}: answered 500" in errors


def test_for_some_time() -> None:
    pages = Pages(None)
    pages.add(HIT, 5)
    code, output, errors = run("--for", "0.1s")
    assert (code, "counting for 100 ms; Ctrl-C stops earlier" in errors) == (0, True)
    assert ["lookups", "0", "0"] in [line.split() for line in output.splitlines()]


def test_a_run_is_kept_and_compared_with_the_next_one(tmp_path: Path) -> None:
    pages, saved = Pages(None), tmp_path / "a.json"
    pages.add(HIT, 5)
    assert run("--since-start", "--json", "-o", saved) == (0, "", "")
    pages.add(HIT, 5)
    code, output, _ = run("--since-start", "--compare", saved)
    assert (code, ["hits", "5", "10", "+5", "(+100", "%)"] in [line.split() for line in output.splitlines()]) == (
        0,
        True,
    )
    code, output, _ = run("--since-start", "--compare", saved, "--json")
    (compared,) = json.loads(output)["compared"]
    hits = {"connector": "one", "measure": "hits", "before": 5, "now": 10, "difference": 5, "share": 1.0}
    assert hits in compared["differences"]
    code, output, _ = run(saved, "--compare", saved)
    assert (code, "+" in output) == (0, False)
    (tmp_path / "b.json").write_text("{}")
    code, _, errors = run("--compare", tmp_path / "b.json", "--", sys.executable, "-c", "print('ran')")
    assert (code, "b.json is no summary as `kvobs summary --json` prints it" in errors.replace("\n", "")) == (1, True)


def test_a_summary_that_can_not_be_written_is_printed(tmp_path: Path) -> None:
    pages, target = Pages(None), tmp_path / "a.json"
    code, output, errors = run("--json", "-o", target, "--", "touch", target)
    assert (code, f"{target} can't be written: File exists" in errors.replace("\n", "")) == (1, True)
    assert len(json.loads(output)["servers"]) == len(pages.writers)


def test_texts_and_a_prometheus(tmp_path: Path) -> None:
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text('kvobs_loads_total{connector="cpu",outcome="ok"} 1\n')
    after.write_text('kvobs_loads_total{connector="cpu",outcome="ok"} 4\n')
    code, output, _ = run(before, after)
    assert (code, ["loads", "3"] in [line.split() for line in output.splitlines()]) == (0, True)
    with web(lambda _: (200, '{"status": "success", "data": {"result": []}}')) as address:
        code, _, errors = run("--prometheus", address, "--from", "now-1h", "--engine", "gpu-1:9464+8000")
    assert (code, "has no metrics of kvobs in this time" in errors) == (1, True)
    code, _, errors = run("--prometheus", "localhost:1", "--from", "now-1h")
    assert (code, "http://localhost:1: no answer" in errors) == (1, True)
    series = {"metric": {"__name__": "kvobs_loads_total", "connector": "cpu", "instance": "a", "outcome": "ok",
                         "model_name": "tiny"}, "value": [0, "3"]}  # fmt: skip
    answer = json.dumps({"status": "success", "data": {"result": [series]}})
    with web(lambda path: (200, answer)) as address:
        code, output, _ = run("--prometheus", address, "--from", "now-1h")
    assert (code, output.splitlines()[0], output.split()[3]) == (0, "tiny   60 min", "cpu")


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    name = "z\u00fcrich"
    (tmp_path / "a.txt").write_text(f'kvobs_loads_total{{connector="{name}",outcome="ok"}} 3\n', "utf-8")
    command = [sys.executable, "-c", "from kvobs.cli import app; app()", "summary", "a.txt", "--markdown", "-o", "b.md"]
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(command, cwd=tmp_path, env=ascii_only, check=True, timeout=60)
    assert name in (tmp_path / "b.md").read_text("utf-8")
