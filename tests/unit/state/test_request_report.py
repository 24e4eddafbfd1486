"""A request's report says what is known, in whatever order it came, and never too much."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.state.request_report import LOADS_AT_MOST, RequestReport
from kvobs.state.transfers import Gain, Load

NAMES = ("cpu", "disk", "remote")
MS = 1_000_000


def load(index: int = 0, **more: Any) -> Load:
    return Load(index, 64, more.pop("is_async", True), 1, opened_ns=10 * MS, **more)


def in_after(ms: int, loaded: Load) -> Load:
    """Let the load's only rank report so long after it was opened."""
    loaded.arrived[0] = 0, ms * MS, 0
    loaded.arrived_ns = loaded.opened_ns + ms * MS
    return loaded


def test_report_of_a_request_that_loads() -> None:
    report = RequestReport(200)
    for began, ended in ((1, 2), (3, 4), (5, 7)):
        report.looked_up(began * MS, ended * MS)
    report.allocated([(0, 0), (1, 64), (2, 128)], 16)
    mine = load(1)
    report.admitted(mine)
    report.load_ended(in_after(12, mine))
    report.looked_up(100 * MS, 200 * MS)
    report.allocated([], 0)  # the second call after an async load
    report.load_weighed(mine, Gain(80 * MS, 15 * MS, 3 * MS))
    report.promised([2])
    report.promised([2, 0])
    assert report.rendered(NAMES) == {
        "prompt_tokens": 200,
        "local_tokens": 16,
        "seen_tokens": 16,
        "offered_tokens": {"cpu": 0, "disk": 64, "remote": 128},
        "lookups": 3,
        "lookup_s": 0.006,
        "loads": [
            {"connector": "disk", "tokens": 64, "mode": "async", "outcome": "ok"}
            | {"duration_s": 0.012, "waited_s": 0.015, "saved_s": 0.08}
        ],
        "saves": ["remote", "cpu"],
    }


TIMES = ("duration_s", "waited_s", "saved_s", "lost_tokens", "prefills_seen")


def rendered(report: RequestReport) -> dict[str, Any]:
    (found,) = report.rendered(NAMES)["loads"]
    return {key: found.get(key) for key in ("outcome", *TIMES)}


def test_a_load_is_open_until_the_ranks_reports_were_read() -> None:
    report, mine = RequestReport(200), load(is_async=False)
    report.admitted(mine)
    nothing = dict.fromkeys(TIMES)
    assert rendered(report) == {"outcome": "open", **nothing}
    assert report.awaits is mine
    report.load_ended(in_after(12, mine))
    assert rendered(report) == {"outcome": "ok", **nothing, "duration_s": 0.012}
    assert report.awaits is None
    report.load_weighed(mine, Gain(None, 12 * MS, prefills=3))
    assert rendered(report) == {
        "outcome": "ok", **nothing, "duration_s": 0.012, "waited_s": 0.012, "prefills_seen": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("lost", "reported"), [(None, 64), (16, 16)])
def test_a_failed_load_has_lost_tokens(lost: int | None, reported: int) -> None:
    report, mine = RequestReport(200), load(failed_on={0}, lost_tokens=lost)
    report.admitted(mine)
    report.load_ended(in_after(5, mine))
    report.load_weighed(mine, Gain(0, 5 * MS))
    expected = {"duration_s": 0.005, "waited_s": 0.005, "saved_s": 0.0, "lost_tokens": reported, "prefills_seen": None}
    assert rendered(report) == {"outcome": "failed", **expected}


@pytest.mark.parametrize(("by_error", "outcome"), [(False, "aborted"), (True, "failed")])
def test_a_load_may_end_its_request_or_be_ended_with_it(by_error: bool, outcome: str) -> None:
    report, mine = RequestReport(200), load(aborted=True)
    report.admitted(mine)
    report.aborted(mine, by_error=by_error)
    assert rendered(report)["outcome"] == outcome
    assert rendered(report)["duration_s"] is None
    assert report.awaits is None, "nobody waits for its end"


def test_last_of_very_many_loads_are_kept() -> None:
    report = RequestReport(200)
    loads = [load(i % 3) for i in range(LOADS_AT_MOST + 5)]
    for mine in loads:
        report.admitted(mine)
    for mine in loads:
        report.load_ended(mine)
    found = report.rendered(NAMES)
    assert [one["connector"] for one in found["loads"]] == [NAMES[mine.connector_index] for mine in loads[5:]]
    assert found["more_loads"] == 5


connectors = st.integers(0, 2)
times = st.integers(0, 10**18)
loads = st.builds(
    Load,
    connectors,
    st.integers(1, 10**6),
    st.booleans(),
    st.integers(1, 3),
    times,
    arrived=st.dictionaries(st.integers(0, 2), st.none() | st.tuples(times, times, times), max_size=3),
    arrived_ns=times,
    failed_on=st.sets(st.integers(0, 2), max_size=2),
    lost_tokens=st.none() | st.integers(0, 10**6),
    aborted=st.booleans(),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("looked_up"), times, times),
        st.tuples(st.just("allocated"), st.lists(st.tuples(connectors, st.integers(0, 10**6)), max_size=3), times),
        st.tuples(st.sampled_from(["admitted", "load_ended", "aborted"]), st.integers(0, 3)),
        st.tuples(st.just("load_weighed"), st.integers(0, 3), st.builds(Gain, st.none() | times, times)),
        st.tuples(st.just("promised"), st.lists(connectors, max_size=3)),
    ),
    max_size=40,
)


@given(st.lists(loads, min_size=4, max_size=4), events)
def test_anything_in_any_order_is_rendered_and_bounded(known: list[Load], sequence: list[Any]) -> None:
    report = RequestReport(200)
    for event, *args in sequence:
        if event in ("admitted", "load_ended", "load_weighed", "aborted"):
            args[0] = known[args[0]]
        getattr(report, event)(*args, **({"by_error": known[0].is_async} if event == "aborted" else {}))
        found = report.rendered(NAMES)
        assert json.loads(json.dumps(found)) == found
        assert len(found["loads"]) <= LOADS_AT_MOST
        assert len(found["saves"]) == len(set(found["saves"])) <= len(NAMES)
        assert {one["outcome"] for one in found["loads"]} <= {"ok", "failed", "aborted", "open"}
        assert report.awaits is None or not report.awaits.is_async
    assert len(report.loads) + report.more_loads == sum(event == "admitted" for event, *_ in sequence)
