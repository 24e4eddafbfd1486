"""`kvobs trace` as a person runs it: which loads, in which order, as text, JSON and a Chrome trace."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.cli.trace.command import chosen, heading
from kvobs.export.load_traces import Found, load_traces
from kvobs.schema.spans import Record
from tests.support.page_files import page_folder
from tests.support.slow_loads import BEGIN_NS, FAILED, SLOW, span
from tests.support.written import Pages


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with page_folder() as made:
        yield made


def run(*arguments: object, columns: int = 80) -> tuple[int, str]:
    """Run the command; return its exit code and all that it printed."""
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return result.exit_code, "\n".join(line.rstrip() for line in result.output.splitlines())


@pytest.fixture
def pages() -> Pages:
    made = Pages(None, 0, 1, port=8000)
    made.write(SLOW, FAILED)
    return made


def test_loads_are_shown_as_waterfalls_the_slowest_first(pages: Pages) -> None:
    code, output = run()
    assert code == 0
    first, second, last = output.split("\n\n")
    lines = first.splitlines()
    assert re.fullmatch(r"872\.58 ms  load of remote, ok  .*\d\d:\d\d:00\.014", lines[0])
    assert lines[1:3] == [
        "request cmpl-8f56e1363ce8d56a-0-1f2e3d4c", f"engine tiny, port 8000 ({pages.server[:8]}-0)"
    ]  # fmt: skip
    assert (
        "\n".join(lines[3:])
        == """\
└── request                 0.00  888.78 ms  █████████████
    ├── queue and lookup    0.00   14.68 ms  █              offered: remote 160
    │                                                       cpu 0
    ├── load remote        14.68  872.58 ms  █████████████  160 of 215 tokens,
    │                                                       655.4 kB, rank 1
    │                                                       last by 840.22 ms,
    │                                                       computing: 17.90 ms
    │   ├── rank 0         15.36   31.07 ms  █
    │   └── rank 1         15.97  871.29 ms  █████████████
    └── resume            887.26    1.52 ms              █"""
    )
    assert second.startswith("31.20 ms  load of cpu, failed  ")
    assert last == "2 slow or failed loads, slowest first; times since the request began, in ms"


@pytest.mark.parametrize("columns", [*range(30, 130, 7), 80, 120])
def test_at_no_width_a_duration_is_cut(columns: int, pages: Pages) -> None:
    _, output = run(columns=columns)
    for duration in ("888.78 ms", "872.58 ms", "31.07 ms", "871.29 ms", "1.52 ms", "31.20 ms", "29.00 ms"):
        assert re.search(rf"(^|\s){re.escape(duration)}(\s|$)", output, re.MULTILINE), output
    assert max(map(len, output.splitlines())) <= columns


def test_what_is_asked_for_is_chosen() -> None:
    slow, failed = load_traces(Found("e", None, record) for record in (*SLOW, *FAILED))
    both = [slow, failed]
    assert chosen(both, None, None, 0, newest=False) == [slow, failed]
    assert chosen(both, None, None, 0, newest=True) == [failed, slow]
    assert chosen(both, "0a1b2c", None, 0, newest=False) == [failed]
    assert chosen(both, slow.trace_id, None, 0, newest=False) == both
    assert chosen(both, None, "cpu", 0, newest=False) == [failed]
    assert chosen(both, None, None, failed.start_ns / 1e9, newest=False) == [failed]


def test_the_day_of_old_spans_is_shown_and_a_failure_is_red() -> None:
    (slow,) = load_traces(Found("e", None, record) for record in SLOW)
    soon = heading(slow, "e", BEGIN_NS / 1e9 + 5).plain
    assert re.fullmatch(r"872\.58 ms  load of remote, ok  \d\d:\d\d:00\.014\nrequest \S+\nengine e", soon)
    assert re.search(r"  \d{4}-\d\d-\d\d \d\d:", heading(slow, "e", BEGIN_NS / 1e9 + 10**6).plain)
    assert [str(part.style) for part in heading(replace(slow, outcome="failed"), "e", 0).spans] == ["bold red", "dim"]


def loads(n: int) -> list[list[Record]]:
    return [[span("kv.load", i + 1, i, i + 1, request__id=f"r{i}", connector="cpu", outcome="ok")] for i in range(n)]


def test_of_many_the_first_are_shown_and_the_others_counted() -> None:
    pages = Pages(None)
    pages.write(*loads(12))
    _, output = run()
    assert output.count("load of cpu, ok") == 10
    assert "12 slow or failed loads, slowest first (all with -n 12)" in output
    _, output = run("-n", 12, "--newest")
    assert output.count("load of cpu, ok") == 12
    assert "newest first; times" in output
    pages.write(*loads(3000))
    assert re.search(
        r"^[\d,]+ older spans of slow and failed loads and calls have been overwritten", run()[1], re.MULTILINE
    )


def test_what_is_not_there_is_named(folder: Path) -> None:
    assert run() == (1, run()[1])
    assert f"found no page of an engine's process in {folder}" in run()[1].replace("\n", "")
    pages = Pages(None)
    assert run() == (0, "No load was slow (option slow_load_ms) or failed.")
    pages.write(SLOW, FAILED)
    for arguments in (["--id", "x"], ["--connector", "x"]):
        code, output = run(*arguments)
        assert (code, output) == (1, "no slow or failed load matches; there are 1 of remote, 1 of cpu")
    assert run("--since", "1s") == (0, "No load of the last 1s was slow (option slow_load_ms) or failed.")
    code, output = run("--since", "x")
    assert (code, "found 'x'; use a number with s, m, h or d" in " ".join(output.replace("│", "").split())) == (2, True)


def test_of_several_engines_one_can_be_chosen(pages: Pages) -> None:
    other = Pages(None, 0, 1, port=8001)
    other.write(FAILED)
    assert "3 slow or failed loads" in run()[1]
    assert "2 slow or failed loads" in run(f"{pages.server[:8]}-0")[1]
    code, output = run(other.server[:8], "--json")
    assert (code, [load["engine"] for load in json.loads(output)]) == (0, [f"{other.server[:8]}-0"])
    code, output = run("elsewhere")
    assert (code, "found no engine and no pid 'elsewhere'; known: scheduler, pid" in output) == (1, True)


def test_as_json_all_are_printed(pages: Pages) -> None:
    code, output = run("--json", "--connector", "remote")
    (load,) = json.loads(output)
    assert (code, load["request"], load["seconds"]) == (0, "cmpl-8f56e1363ce8d56a-0-1f2e3d4c", 0.87258)
    assert [part["part"] for part in load["parts"]][-1] == "resume"


def test_a_chrome_trace_has_them_on_their_processes_tracks(pages: Pages, tmp_path: Path) -> None:
    code, output = run("--chrome", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (code, f"{len(events)} events; open it at" in output.replace("\n", "")) == (0, True)
    names = [event["args"]["name"].split(",")[0] for event in events if event["name"] == "process_name"]
    assert names == ["scheduler", "rank 0", "rank 1"]
    orders = [event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"]
    assert orders == [-1, 0, 1]
    slices = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in slices) == 0
    whole = next(event for event in slices if event["name"].startswith("request cmpl-8f56"))
    assert whole["dur"] == pytest.approx(888_780)
    assert run("--chrome", tmp_path / "t.json")[0] == 1
    assert time.time() > BEGIN_NS / 1e9 - 10**9
