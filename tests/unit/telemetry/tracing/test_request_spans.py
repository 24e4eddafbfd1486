"""The spans of a request: which are written, why, and what they say; a load and its ranks as one."""

from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.schema.spans import Reason, Record
from kvobs.state.transfers import Gain, Load, Save, Times
from kvobs.telemetry.tracing.journal import GROUP_AT_MOST
from kvobs.telemetry.tracing.request_spans import Opened, RequestSpans, Trace
from kvobs.telemetry.tracing.trace_context import TraceContext
from tests.support.contexts import SAMPLED, TRACING, UNSAMPLED, journal, lookup
from tests.support.numbers import spans

MS = 1_000_000
LABELS = {"kv_transfer.request.id": "r-0123abcd", "gen_ai.request.id": "r"}


def trace_of(parent: TraceContext | None = SAMPLED, *, is_sampled: bool = True, **more: Any) -> Trace:
    return Trace(
        request_id=more.pop("request_id", "r-0123abcd"),
        trace_id=parent.trace_id if parent else "e" * 32,
        is_sampled=is_sampled,
        reason=Reason.PARENT if parent else Reason.LEVEL,
        parent_id=parent.span_id if parent else "",
        link=more.pop("link", None),
        lookup_id="1" * 16,
        remote=more.pop("remote", {}),
        **more,
    )


def said(written: Record) -> dict[str, Any]:
    """Return a span's attributes without their prefix and those that say whose it is."""
    assert written.attributes.items() >= LABELS.items()
    return {key.removeprefix("kv_transfer."): v for key, v in written.attributes.items() if key not in LABELS}


class Writer:
    def __init__(self) -> None:
        self.journal = journal()
        self.spans = RequestSpans(["disk", "cpu"], self.journal, TRACING)

    def groups(self) -> list[list[Record]]:
        groups = spans(self.journal._page)
        for one in [one for group in groups for one in group]:
            assert one.start_ns <= one.end_ns
        return groups

    def looked_up(self, trace: Trace, outcome: str = "miss", *args: Any, **more: Any) -> list[Record]:
        self.spans.looked_up(trace, outcome, *args, **more)
        return [one for (one,) in self.groups()]

    def loaded(self, trace: Trace, load: Load, gain: Gain | None = None) -> list[Record]:
        self.spans.loaded(Opened(trace, "2" * 16, trace.above), load, gain)
        return next(iter(self.groups()), [])

    def saved(self, trace: Trace, save: Save, ended_ns: int, index: int = 1) -> list[Record]:
        self.spans.saved(Opened(trace, "3" * 16, trace.above), index, save, ended_ns)
        return next(iter(self.groups()), [])


def test_a_lookup_says_what_was_offered_and_how_it_ended() -> None:
    trace = trace_of(lookups=2, began_ns=100, ended_ns=300, prompt_tokens=100)
    (found,) = Writer().looked_up(trace, "hit", lookup((0, 16), (1, 48), local=32), owner=1, tokens=48)
    assert (found.title, found.span_id, found.parent_id) == ("kv.lookup", "1" * 16, SAMPLED.span_id)
    assert (found.start_ns, found.end_ns, found.observed_ns, found.reason) == (100, 300, 0, Reason.PARENT)
    assert said(found) == {
        "offered_tokens.disk": 16, "offered_tokens.cpu": 48, "lookups": 2, "local_tokens": 32, "outcome": "hit",
        "connector": "cpu", "tokens": 48, "prompt_tokens": 100, "hit_rate": 0.8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "prompt_tokens", "local", "expected"),
    [
        ("miss", 100, 0, 0.0),
        ("miss", 64, 48, 0.75),
        ("hit", 64, 80, 1),
        ("aborted", 64, 0, None),
        ("miss", 0, 0, None),
        ("not_read", 64, 0, None),
    ],
)
def test_the_hit_rate_is_of_the_prompt(outcome: str, prompt_tokens: int, local: int, expected: float | None) -> None:
    """With a preempted request's own tokens there is more than the prompt; of an ended one nothing is known."""
    (found,) = Writer().looked_up(trace_of(lookups=1, prompt_tokens=prompt_tokens), outcome, lookup(local=local))
    assert found.attributes.get("kv_transfer.hit_rate") == expected
    assert found.attributes["kv_transfer.local_tokens"] == local
    assert not {"kv_transfer.connector", "kv_transfer.tokens"} & set(found.attributes), "it has no owner"


def test_lookup_after_a_preemption_is_a_span_of_its_own() -> None:
    writer, trace = Writer(), trace_of(None, lookups=1)
    (first,) = writer.looked_up(trace)
    assert trace.lookups == 0
    trace.lookups = 3
    (second,) = writer.looked_up(trace)
    assert first.span_id != second.span_id == second.span_id
    assert (first.parent_id, second.parent_id) == ("", first.span_id), "one root only"
    assert second.attributes["kv_transfer.lookups"] == 3
    unwritten = trace_of(None, is_sampled=False, lookups=1)
    assert (Writer().looked_up(unwritten), unwritten.above) == ([], ""), "nobody's parent"


@pytest.mark.parametrize(("is_sampled", "is_slow"), list(product([True, False], repeat=2)))
def test_a_lookup_is_seen_with_its_trace_or_because_it_was_slow(is_sampled: bool, is_slow: bool) -> None:
    trace = trace_of(is_sampled=is_sampled, lookups=1, is_slow=is_slow)
    found = Writer().looked_up(trace)
    expected = Reason.SLOW if is_slow else Reason.PARENT if is_sampled else None
    assert [one.reason for one in found] == ([expected] if expected else [])
    assert (trace.lookups, trace.is_slow) == (0, False)


@given(st.text(max_size=2_000))
def test_ids_of_any_length_are_cut(request_id: str) -> None:
    (found,) = Writer().looked_up(trace_of(lookups=1, request_id=request_id))
    assert found.attributes["kv_transfer.request.id"] == request_id[:256]
    assert len(str(found.attributes["gen_ai.request.id"])) <= 256


def part(began_ns: int, ended_ns: int, spent_ns: int | None = None) -> Times:
    """Return a rank's times: if not said how long it took, then from its begin, if that is known, to its end."""
    spent_ns = spent_ns if spent_ns is not None else ended_ns - began_ns if began_ns else 0
    return ended_ns, spent_ns, began_ns


def load_of(*, is_async: bool = True, ms: int = 5, ranks: int = 1, **more: Any) -> Load:
    """Return a load that began at 1 s and took ``ms`` on its last rank, 1 ms less on the one before, and so on."""
    began = 1_000 * MS
    took = {rank: (ms - (ranks - 1 - rank)) * MS for rank in range(ranks)}
    arrived: Any = {rank: part(began + MS, began + MS + ns, ns) for rank, ns in took.items()}
    return Load(1, 64, is_async, ranks, began, arrived=arrived, arrived_ns=began + ms * MS, size=640, **more)


@pytest.mark.parametrize(
    ("is_async", "outcome", "is_sampled", "ms"),
    list(product([True, False], ["ok", "failed", "aborted"], [True, False], [99, 101, 1001])),
)
def test_a_load_is_seen_if_traced_failed_or_slow(is_async: bool, outcome: str, is_sampled: bool, ms: int) -> None:
    """Above 1 s, or, where a step waits for it, above 100 ms."""
    is_slow = ms > (1_000 if is_async else 100)
    why = Reason.ERROR if outcome == "failed" else Reason.SLOW if is_slow else Reason.PARENT if is_sampled else None
    ended: dict[str, Any] = {"failed_on": {0} if outcome == "failed" else set(), "aborted": outcome == "aborted"}
    group = Writer().loaded(trace_of(is_sampled=is_sampled), load_of(is_async=is_async, ms=ms, **ended))
    assert [one.reason for one in group] == ([why] * 2 if why else [])
    if why:
        assert group[0].observed_ns == (ms * MS if outcome == "ok" else 0), "what kvobs_load_duration_seconds saw"


def test_a_load_says_what_it_brought_and_each_rank_its_part() -> None:
    remote = {"kv_transfer.remote.host": "prefill-3"}
    head, *ranks = Writer().loaded(trace_of(link=UNSAMPLED, remote=remote), load_of(ranks=3))
    assert (head.title, head.trace_id, head.span_id) == ("kv.load cpu", SAMPLED.trace_id, "2" * 16)
    assert (head.parent_id, head.links) == (SAMPLED.span_id, (UNSAMPLED.traceparent,))
    assert (head.start_ns, head.end_ns) == (1_000 * MS, 1_005 * MS)
    moved = {"connector": "cpu", "mode": "async", "outcome": "ok", "tokens": 64, "bytes": 640}
    assert said(head) == {**moved, "remote.host": "prefill-3", "slowest_rank": 2, "rank_skew": 0.002}
    assert [(one.name, one.trace_id, one.parent_id, one.start_ns, one.end_ns) for one in ranks] == [
        ("kv.load.rank", head.trace_id, head.span_id, 1_001 * MS, (1_004 + rank) * MS) for rank in range(3)
    ]
    assert said(ranks[2]) == {"connector": "cpu", "mode": "async", "rank": 2}
    assert len({one.span_id for one in (head, *ranks)}) == 4


def test_how_long_a_step_waited_is_said_of_synchronous_loads() -> None:
    _, *ranks = Writer().loaded(trace_of(), load_of(is_async=False, ranks=2))
    assert [one.attributes["kv_transfer.stall"] for one in ranks] == [0.004, 0.005]
    _, *ranks = Writer().loaded(trace_of(), load_of(ranks=2))
    assert [one for one in ranks if "kv_transfer.stall" in one.attributes] == []


@pytest.mark.parametrize(
    ("lost_tokens", "has_failed_whole", "recomputed"),
    [(None, False, 64), (16, False, 16), (0, False, 0), (16, True, 64)],
)
def test_a_failed_load_says_where_and_what_it_did_not_bring(
    lost_tokens: int | None, has_failed_whole: bool, recomputed: int
) -> None:
    load = load_of(ranks=3, failed_on={1}, lost_tokens=lost_tokens, must_report_failure=has_failed_whole)
    head, *ranks = Writer().loaded(trace_of(), load)
    assert head.attributes["error.type"] == "load_failed"
    assert head.attributes["kv_transfer.recomputed_tokens"] == recomputed
    assert [one.attributes["kv_transfer.rank"] for one in ranks if "error.type" in one.attributes] == [1]
    fine, *_ = Writer().loaded(trace_of(), load_of())
    assert not {"error.type", "kv_transfer.recomputed_tokens", "kv_transfer.slowest_rank"} & set(fine.attributes)


def test_slowest_of_very_many_ranks_are_one_group() -> None:
    group = Writer().loaded(trace_of(), load_of(ms=500, ranks=200))
    assert len(group) == GROUP_AT_MOST
    assert [one.attributes["kv_transfer.rank"] for one in group[1:]] == list(range(200 - GROUP_AT_MOST + 1, 200))


times = st.integers(0, 2**60)


@given(
    st.booleans(),
    times,
    st.dictionaries(st.integers(0, 9), st.tuples(st.just(0) | times, times, times), max_size=4),
    st.sampled_from([{}, {"failed_on": {0}}, {"aborted": True}]),
)
def test_under_any_clock_no_span_ends_before_it_starts(
    is_async: bool, opened_ns: int, ranks: dict[int, tuple[int, int, int]], outcome: dict[str, Any]
) -> None:
    arrived: Any = {rank: part(began, began + spent) for rank, (began, spent, _) in ranks.items()}
    arrived_ns = max((arrived_ns for _, _, arrived_ns in ranks.values()), default=0)
    load = Load(0, 16, is_async, 1, opened_ns=opened_ns, arrived=arrived, arrived_ns=arrived_ns, **outcome)
    _, *parts = Writer().loaded(trace_of(), load)
    assert {(one.attributes["kv_transfer.rank"], one.start_ns, one.end_ns) for one in parts} == {
        (rank, began or spent, began + spent) for rank, (began, spent, _) in ranks.items()
    }, "where its begin is unknown, its end"


@pytest.mark.parametrize(
    ("gain", "expected"),
    [(None, {}), (Gain(None, 2 * MS, MS), {"waited": 0.002}), (Gain(3 * MS, MS), {"waited": 0.001, "saved": 0.003})],
    ids=str,
)
def test_a_load_says_what_it_saved_and_how_long_it_was_awaited(gain: Gain | None, expected: dict[str, float]) -> None:
    whole, *_ = Writer().loaded(trace_of(), load_of(), gain)
    assert {key: value for key, value in said(whole).items() if key in ("waited", "saved")} == expected


def save_of(**more: Any) -> Save:
    return Save(True, True, 2, promised_ns=100, **more)


def test_a_save_is_held_from_the_promise_to_its_release() -> None:
    head, *ranks = Writer().saved(
        trace_of(), save_of(arrived={0: part(120, 150), 1: part(120, 350)}, arrived_ns=400), 400
    )
    assert (head.title, head.span_id, head.parent_id) == ("kv.save cpu", "3" * 16, SAMPLED.span_id)
    assert (head.start_ns, head.end_ns, head.observed_ns) == (100, 400, 300)
    assert said(head) == {"connector": "cpu", "outcome": "ok", "slowest_rank": 1, "rank_skew": 200 / 1e9}
    assert [
        (one.name, one.parent_id, one.start_ns, one.end_ns, one.attributes["kv_transfer.rank"]) for one in ranks
    ] == [("kv.save.rank", head.span_id, 120, 150, 0), ("kv.save.rank", head.span_id, 120, 350, 1)]
    assert Writer().saved(trace_of(is_sampled=False), save_of(), 10**12) == [], "with its trace only"


def test_a_save_done_early_has_no_length_and_no_ranks() -> None:
    (head,) = Writer().saved(trace_of(), save_of(arrived={0: part(20, 50)}, arrived_ns=50), 100)
    assert (head.start_ns, head.end_ns, head.observed_ns) == (100, 100, 0)
