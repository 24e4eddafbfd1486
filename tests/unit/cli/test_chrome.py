"""A Chrome trace has each request and load as slices that nest, in rows where none overlaps another."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer

from kvobs.cli import chrome
from kvobs.cli.chrome import FIRST_LANE, load_events, zero_of
from kvobs.clock import WALL_OFFSET
from kvobs.export.load_traces import Found, load_traces
from kvobs.schema.spans import Record
from tests.support.slow_loads import BEGIN_NS, FAILED, SLOW, span

PIDS = {("e", None): 10, ("e", 0): 20, ("e", 1): 21}


def events_of(records: Iterable[Record], pids: dict[tuple[str, int | None], int] = PIDS) -> list[dict[str, Any]]:
    traces = load_traces(Found("e", None, record) for record in records)
    return list(load_events(traces, pids, zero_of([], traces)))


def test_a_load_is_on_the_schedulers_track_and_ranks_on_theirs() -> None:
    events = events_of(SLOW)
    slices = [(e["pid"], e["tid"] - FIRST_LANE, e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert [(pid, lane, name) for pid, lane, name, _, _ in slices] == [
        (10, 0, "request cmpl-8f56e1363ce8d56a-0-1f2e3d4c"), (10, 0, "queue and lookup"), (10, 0, "load remote"),
        (10, 0, "resume"), (20, 0, "rank 0"), (21, 0, "rank 1"),
    ]  # fmt: skip
    assert slices[0][3] == 0
    assert slices[2][3:] == pytest.approx((14_680, 872_580))
    assert events[0]["args"]["name"] == "requests and loads 1"
    (load,) = [e for e in events if e["name"] == "load remote"]
    assert load["args"]["connector"] == "remote"
    assert load["args"]["is"].startswith("160 of 215 tokens")


def test_ranks_of_other_hosts_are_rows_of_the_schedulers_track() -> None:
    events = events_of(SLOW, {("e", None): 10})
    assert {(e["pid"], e["tid"] - FIRST_LANE) for e in events if e["name"] in ("rank 0", "rank 1")} == {
        (10, 1),
        (10, 2),
    }


def test_slices_of_a_row_nest() -> None:
    many = [span("kv.load", 100 + i, 7 * (i % 13), 20 + i, connector="cpu", outcome="ok", mode="async", waited=0.2,
                 request__id=f"r{i}") for i in range(40)]  # fmt: skip
    rows = defaultdict(list)
    for event in events_of([*SLOW, *FAILED, *many]):
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) > 10
    for slices in rows.values():
        for one, (begin, end) in enumerate(slices):
            for other_begin, other_end in slices[:one]:
                apart = begin >= other_end - 1e-3 or end <= other_begin + 1e-3
                inside = other_begin - 1e-3 <= begin and end <= other_end + 1e-3
                around = begin - 1e-3 <= other_begin and other_end <= end + 1e-3
                assert apart or inside or around


def test_the_first_time_is_zero() -> None:
    traces = load_traces(Found("e", None, record) for record in SLOW)
    assert zero_of([], []) == 0
    assert zero_of([5], []) == 5
    assert zero_of([], traces) == pytest.approx(BEGIN_NS - WALL_OFFSET, abs=1)
    assert zero_of([2**62], traces) == zero_of([], traces)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_new_file_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    chrome.write([{"a": 1}, {"b": 2}], 0, path)
    text = path.read_bytes()
    found = json.loads(gzip.decompress(text) if name.endswith("gz") else text)
    assert (found["traceEvents"], found["otherData"]) == ([{"a": 1}, {"b": 2}], {"begin_unix_ns": WALL_OFFSET})
    assert "2 events; open it at https://ui.perfetto.dev" in capsys.readouterr().err
    for other, says in (
        (path, "exists: name another file"),
        (tmp_path / "no" / name, "can't be written: No such file"),
    ):
        with pytest.raises(typer.Exit):
            chrome.write([], 0, other)
        assert says in capsys.readouterr().err
