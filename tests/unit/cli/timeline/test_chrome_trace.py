"""The trace of an engine is one that Perfetto can show: whatever was recorded, and wherever it was cut off."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from kvobs.telemetry.timeline.flight import LAYER_HOOKS, NAMES, OUTCOMES, OWN, STEP, What, pack
from kvobs.telemetry.timeline.ring import OPEN

from kvobs.cli.timeline import chrome_trace, recordings
from kvobs.cli.timeline.recordings import Process
from kvobs.testing import Script
from tests.support.recording_rigs import served
from tests.support.recordings import recorded

Event = dict[str, Any]


def check(processes: list[Process]) -> list[Event]:
    """Return the events after looking at what every trace must hold."""
    events = list(chrome_trace.events(processes))
    assert json.loads(json.dumps(events)) == events
    times: dict[Any, list[float]] = defaultdict(list)
    spans: dict[Any, list[float]] = defaultdict(list)
    arrows: dict[Any, list[Event]] = defaultdict(list)
    slices: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    for event in events:
        if event["ph"] == "M":
            continue
        track = event["pid"], event["tid"]
        assert event["ph"] in "Xbesf"
        assert event["ts"] >= 0
        times[track].append(event["ts"])
        if event["ph"] == "X":
            assert track in named
            assert event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            spans[event["pid"], event["cat"], event["id2"]["local"]].append(event["ts"])
        else:
            arrows[event["id"]].append(event)
    assert all(starts == sorted(starts) for starts in (*times.values(), *spans.values()))
    assert all(len(ends) == 2 for ends in spans.values())
    for ends_of_arrow in arrows.values():
        start, finish = sorted(ends_of_arrow, key=lambda event: str(event["ph"]), reverse=True)
        assert (start["ph"], start["cat"], start["name"]) == ("s", finish["cat"], finish["name"])
        assert start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]
        for end in (start, finish):
            assert any(begin <= end["ts"] <= until for begin, until in slices[end["pid"], end["tid"]])
    return events


def of(events: list[Event], ph: str) -> list[Event]:
    return [event for event in events if event["ph"] == ph]


children, hooks = st.sampled_from([0, 1]), st.sampled_from(NAMES)
calls = st.builds(pack, st.just(What.CALL), children | st.just(OWN), hooks, st.integers(0, 1))
layers = st.builds(pack, st.just(What.LAYERS), children, st.sampled_from(LAYER_HOOKS), st.integers(0, 99))
transfers = st.builds(pack, st.sampled_from([*What][2:]), children | st.just(OWN), n=st.integers(0, len(OUTCOMES) - 1))
spent = st.just(OPEN) | st.integers(0, 10**6)
records = st.lists(
    st.tuples(st.integers(0, 10**9), spent, calls | layers | transfers, st.integers(0, 3)), max_size=30
)  # fmt: skip


@given(records, records, records)
def test_whatever_was_recorded_is_a_valid_trace(scheduler: Any, first: Any, second: Any) -> None:
    """Also of loads that end without having begun, and of steps that never end."""
    check([recorded(*scheduler), recorded(*first, rank=0), recorded(*second, rank=1)])


def test_a_real_recording_has_every_call_and_an_arrow_for_each_load_and_save_to_each_rank(
    tmp_path: Path, a: Script, b: Script
) -> None:
    served(tmp_path / "t", a, b)
    processes = recordings.load(tmp_path / "t")
    events = check(processes)
    names = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
    assert [name.partition(",")[0] for name in names] == ["scheduler", "rank 0", "rank 1"]
    tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name" and event["pid"] == 2}
    assert tracks == {"steps", "one", "two", *(f"{c}: {hook}" for c in ("one", "two") for hook in LAYER_HOOKS)}
    assert len(of(events, "X")) == sum(len(process.slices) for process in processes)
    starts = of(events, "s")
    assert sorted(event["cat"] for event in starts) == ["load"] * 6 + ["save"] * 2
    assert {event["pid"] for event in starts} == {1}
    assert sorted(event["pid"] for event in of(events, "f")) == [2] * 4 + [3] * 4
    loads = [event for event in of(events, "b") if event["cat"] == "load" and event["pid"] == 1]
    assert sorted(event["args"].get("tokens", 0) for event in loads) == [16, 16, 32]
    assert sorted(event["args"]["outcome"] for event in loads) == ["failed", "ok", "ok"]


def test_what_never_ended_goes_on_until_the_next_or_the_end() -> None:
    step = pack(What.CALL, OWN, STEP, 1)
    call = pack(What.CALL, 0, "start_load_kv")
    process = recorded((1000, OPEN, step, 0), (5000, 100, step, 0), (7000, OPEN, call, 0), (8000, 500, step, 0))
    slices = [(e["name"], e["ts"], e["dur"], e.get("args")) for e in of(check([process]), "X")]
    open_ = {"ended": False}
    assert slices == [
        ("step", 0, 4, open_), ("step", 4, 0.1, None), ("start_load_kv", 6, 1.5, open_), ("step", 7, 0.5, None)
    ]  # fmt: skip
    assert [one.name for one in process.open] == ["start_load_kv"]


def test_a_load_that_is_open_goes_on_until_the_end_and_one_whose_begin_is_lost_is_whole() -> None:
    begun, ended = pack(What.LOAD_BEGUN, 1, n=64), pack(What.LOAD_ENDED, 1, n=1)
    process = recorded((1000, 0, begun, 5), (2000, 3000, ended, 6), (9000, 0, pack(What.CALL, 0, "take_events"), 0))
    spans = [(e["ph"], e["ts"], e.get("args")) for e in check([process]) if e["ph"] in "be"]
    assert spans == [
        ("b", 0, {"request": f"{5:016x}", "outcome": "open", "tokens": 64}),
        ("b", 1, {"request": f"{6:016x}", "outcome": "failed"}), ("e", 4, None), ("e", 8, None),
    ]  # fmt: skip


def test_each_load_of_a_request_has_its_own_arrow() -> None:
    """A preempted request is loaded a second time under the same id."""
    build, step = pack(What.CALL, OWN, "build_connector_meta"), pack(What.CALL, OWN, STEP, 1)
    begun = pack(What.LOAD_BEGUN, 0)
    scheduler = recorded((100, 0, begun, 5), (200, 100, build, 0), (1100, 0, begun, 5), (1200, 100, build, 0))
    rank = recorded((400, 200, step, 0), (410, 0, begun, 5), (1400, 200, step, 0), (1410, 0, begun, 5), rank=0)
    events = check([scheduler, rank])
    pairs = zip(of(events, "s"), of(events, "f"), strict=True)
    assert [(s["id"] == f["id"], s["ts"], f["ts"]) for s, f in pairs] == [(True, 0.1, 0.3), (True, 1.1, 1.3)]
