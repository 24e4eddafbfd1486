"""A request joins its caller's trace or begins one; whatever clients send, nothing raises and nothing piles up."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from opentelemetry import trace as otel

from kvobs import faults, signals
from kvobs.context import TraceContext
from kvobs.noticed import Noticed
from kvobs.recorder import Recorder
from kvobs.request_spans import Trace
from kvobs.spans import Reason, Record
from kvobs.traces import Traces, Untraced
from kvobs.transfers import Save
from tests.contexts import (
    SAMPLED,
    TRACING,
    UNSAMPLED,
    BrokenSampler,
    Sampler,
    json_values,
    near_misses,
    request,
    written,
)

LOOKUP, ALLOC = "get_num_new_matched_tokens", "update_state_after_alloc"


class Scheduler:
    """The traces of a scheduler with two children."""

    def __init__(self, *, roots: bool = True, traces_all: bool = False, sampler: Any = None) -> None:
        self.recorder = Recorder(2)
        self.traces = Traces(
            ["disk", "cpu"], self.recorder, replace(TRACING, has_calls=traces_all), sampler or Sampler(roots)
        )

    def written(self) -> list[Record]:
        return written(self.recorder)

    def note(self, hook: str, subject: Any, *, is_slow: bool = False, error: str = "") -> None:
        assert self.recorder.tracer is not None
        self.recorder.tracer.note(Noticed(0, hook, 1, 1, is_slow, error, subject))

    def malformed(self) -> dict[str, int]:
        counts = self.recorder.take().counts
        found = {s: counts.get(signals.slot(signals.MALFORMED_CONTEXTS, s), 0) for s in ("headers", "params")}
        return {source: n for source, n in found.items() if n}


# --- whose trace it is

SENT: dict[str, Any] = {"none": None, "sampled": SAMPLED, "unsampled": UNSAMPLED, "bad": "bad"}
OTHER = {"sampled": SAMPLED._replace(trace_id="9" * 32), "unsampled": UNSAMPLED._replace(trace_id="8" * 32)}


@pytest.mark.parametrize(("own", "handed_on", "roots"), list(product(SENT, SENT, [True, False])))
def test_a_request_joins_the_clients_trace_else_the_prefill_engines_else_begins_one(
    own: str, handed_on: str, roots: bool
) -> None:
    """Where a context is broken nobody knows what the caller wanted: no trace is begun in its stead."""
    mine, link = SENT[own], OTHER.get(handed_on, SENT[handed_on])
    scheduler = Scheduler(roots=roots)
    sent = {"traceparent": getattr(mine, "traceparent", mine)}
    params = {"kvobs": {"traceparent": getattr(link, "traceparent", link)}, "remote_host": "h"}
    found = scheduler.traces.of(
        request("r", sent if mine else {}, params if link else {"remote_host": "h"} if roots else None)
    )
    parent = next((one for one in (mine, link) if isinstance(one, TraceContext)), None)
    if parent is not None:
        assert (found.trace_id, found.parent_id, found.reason) == (parent.trace_id, parent.span_id, Reason.PARENT)
        assert found.is_sampled is parent.is_sampled
    else:
        assert (found.parent_id, found.reason) == ("", Reason.LEVEL)
        assert found.is_sampled is (roots and "bad" not in (own, handed_on))
    assert found.link == (link if isinstance(link, TraceContext) else None)
    assert scheduler.malformed() == {
        source: 1 for source, value in (("headers", own), ("params", handed_on)) if value == "bad"
    }


def test_traces_that_begin_here_are_different_ones() -> None:
    traces = Scheduler().traces
    assert len({traces.of(request(str(i))).trace_id for i in range(20)}) == 20


def test_a_trace_lasts_as_long_as_its_request() -> None:
    scheduler = Scheduler()
    mine = request("r", {"traceparent": "bad"})
    first = scheduler.traces.of(mine)
    assert scheduler.traces.of(mine) is first
    assert scheduler.malformed() == {"headers": 1}, "counted once a request"
    scheduler.traces.forget("r")
    scheduler.traces.forget("r")
    assert len(scheduler.traces) == 0
    assert scheduler.traces.of(mine) is not first


# --- whatever clients send


def strings(value: Any) -> list[str]:
    """Return every string that is kept in there."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for item in value.items() for s in strings(item)]
    if isinstance(value, list | tuple):
        return [s for item in value for s in strings(item)]
    return []


def live(scheduler: Scheduler, mine: Any) -> TraceContext | None:
    """Let a request go through all that can happen to it; return what is handed on."""
    traces, request_id = scheduler.traces, mine.request_id
    seen = traces.activated(lambda subject: otel.get_current_span().get_span_context().is_valid)(mine)
    assert seen is True
    traces.looked_up(mine, 1, 2)
    for hook, error in ((LOOKUP, ""), (ALLOC, "OSError")):
        scheduler.note(hook, mine, is_slow=True, error=error)
    traces.settled(request_id, [(0, 16), (1, 0)], 32, 0, 16)
    opened = traces.open(request_id)
    assert opened is not None
    kept = traces.of(mine)
    fields = [getattr(kept, name) for name in Trace.__dataclass_fields__ if name not in ("request_id", "active")]
    assert max(map(len, strings(fields))) <= 32, "ids only"
    traces.looked_up(mine, 3, 4)
    context = traces.hand_on(request_id, {0: Save()})
    traces.forget(request_id)
    return context


headers_like = st.none() | json_values | st.fixed_dictionaries({"traceparent": json_values | near_misses})
params_like = json_values | st.fixed_dictionaries({"kvobs": json_values | headers_like})


@given(st.text(max_size=600), headers_like, params_like)
def test_whatever_a_client_sends_nothing_raises_and_nothing_of_it_is_kept(
    request_id: str, headers: Any, params: Any
) -> None:
    """Under pytest kvobs's own faults are raised on: there is none."""
    scheduler = Scheduler()
    context = live(scheduler, request(request_id, headers, params))
    assert context is not None
    assert len(context.traceparent) == 55
    assert len(scheduler.traces) == 0
    records = scheduler.written()
    assert {one.reason for one in records} <= set(Reason)
    assert [one.name for one in records if one.is_urgent] == ["kv.call", "kv.call", "kv.lookup"]
    for one in records:
        assert Record.read(msgspec.msgpack.decode(msgspec.msgpack.encode(one))) is not None
        assert len(one.attributes) <= 10
        assert max(map(len, strings(tuple(one)))) <= 256


def test_a_request_without_the_fields_is_one_without_a_caller() -> None:
    """Its headers came with a vLLM newer than 0.27."""
    mine = request()
    del mine.trace_headers
    assert Scheduler().traces.of(mine).parent_id == ""


# --- lookups


def test_lookups_are_one_span_from_the_first_to_the_last() -> None:
    scheduler, mine = Scheduler(), request()
    for began, ended in ((10, 11), (20, 21), (30, 35)):
        scheduler.traces.looked_up(mine, began, ended)
    scheduler.traces.settled("r", [(0, 16), (1, 0)], 32, 0, 16)
    (found,) = scheduler.written()
    assert (found.start_ns, found.end_ns, found.attributes["kv_transfer.lookups"]) == (10, 35, 3)
    assert found.attributes["kv_transfer.outcome"] == "hit"
    assert found.attributes["kv_transfer.offered_tokens.cpu"] == 0
    scheduler.traces.settled("r", [], 0, None, 0)
    assert scheduler.written() == [], "a second allocation follows no lookup"


def test_a_lookup_that_found_nothing_is_a_miss_and_one_that_led_nowhere_aborted() -> None:
    scheduler = Scheduler()
    for request_id in ("missed", "aborted"):
        scheduler.traces.looked_up(request(request_id), 1, 2)
    scheduler.traces.settled("missed", [(0, 0)], 0, None, 0)
    for request_id in ("missed", "aborted"):
        scheduler.traces.forget(request_id)
    found = {
        one.attributes["kv_transfer.request.id"]: one.attributes["kv_transfer.outcome"] for one in scheduler.written()
    }
    assert found == {"missed": "miss", "aborted": "aborted"}


def test_what_nobody_knows_changes_nothing() -> None:
    scheduler = Scheduler()
    scheduler.traces.settled("nobody", [(0, 16)], 0, 0, 16)
    scheduler.traces.forget("nobody")
    assert scheduler.traces.open("nobody") is None
    assert scheduler.traces.hand_on("nobody", {}) is None
    assert (len(scheduler.traces), scheduler.written()) == (0, [])


# --- calls about a request


@pytest.mark.parametrize("how", [{"is_slow": True}, {"error": "OSError"}], ids=str)
def test_whoever_sees_a_slow_or_failed_lookup_call_sees_the_lookup_it_is_below(how: dict[str, Any]) -> None:
    scheduler, mine = Scheduler(roots=False), request()
    scheduler.note(LOOKUP, mine, **how)
    scheduler.traces.looked_up(mine, 1, 2)
    scheduler.traces.settled("r", [], 0, None, 0)
    call, lookup = scheduler.written()
    assert (call.trace_id, call.parent_id) == (lookup.trace_id, lookup.span_id)
    assert lookup.reason == Reason.SLOW
    scheduler.traces.looked_up(mine, 3, 4)
    scheduler.traces.settled("r", [], 0, None, 0)
    assert scheduler.written() == [], "the next lookup was not slow"


@pytest.mark.parametrize("parent", [SAMPLED, None])
def test_other_calls_are_the_lookups_siblings_or_below_it_where_it_is_the_root(parent: TraceContext | None) -> None:
    scheduler = Scheduler(traces_all=True)
    mine = request("r-0123abcd", {"traceparent": parent.traceparent} if parent else None)
    scheduler.traces.looked_up(mine, 1, 2)
    scheduler.traces.settled("r-0123abcd", [], 0, None, 0)
    scheduler.note(ALLOC, mine)
    lookup, call = scheduler.written()
    assert (call.trace_id, call.parent_id) == (lookup.trace_id, parent.span_id if parent else lookup.span_id)
    assert call.attributes["kv_transfer.request.id"] == "r-0123abcd"
    assert call.attributes["gen_ai.request.id"] == "r"


def test_a_call_of_the_step_is_in_the_steps_trace() -> None:
    scheduler = Scheduler(traces_all=True)
    step = scheduler.traces.begin_step()
    assert step is not None
    scheduler.note("build_connector_meta", object())
    (call,) = scheduler.written()
    assert call.trace_id == step.trace_id
    assert Scheduler().traces.begin_step() is None


# --- handing on


def test_a_load_is_opened_below_the_caller_and_its_context_has_the_traces_flag() -> None:
    for parent in (SAMPLED, UNSAMPLED):
        traces = Scheduler().traces
        traces.of(request("r", {"traceparent": parent.traceparent}))
        opened = traces.open("r")
        assert opened is not None
        assert opened.parent_id == parent.span_id
        assert opened.context == TraceContext(parent.trace_id, opened.span_id, parent.is_sampled)
        assert opened.span_id not in (parent.span_id, traces.of(request("r")).lookup_id)


def test_a_decode_engine_links_to_the_save_it_waits_for_else_to_what_is_above() -> None:
    traces = Scheduler().traces
    traces.of(request("r", {"traceparent": SAMPLED.traceparent}))
    saves = {1: Save(), 0: Save()}
    context = traces.hand_on("r", saves)
    assert context is not None
    assert context.span_id == saves[1].trace.span_id != saves[0].trace.span_id
    assert (context.trace_id, context.is_sampled) == (SAMPLED.trace_id, True)
    assert traces.hand_on("r", {}) == SAMPLED
    assert Scheduler().traces.hand_on("r", saves) is None


def test_what_is_handed_on_is_a_context_also_where_the_trace_begins_here() -> None:
    scheduler = Scheduler()
    begun = scheduler.traces.of(request())
    assert scheduler.traces.hand_on("r", {}) == TraceContext(begun.trace_id, begun.lookup_id, True)


# --- activation


def test_the_requests_context_is_active_in_a_call_about_it() -> None:
    traces = Scheduler().traces
    seen: list[Any] = []

    def child(subject: Any) -> str:
        seen.append(otel.get_current_span().get_span_context())
        return "answer"

    call = traces.activated(child)
    for parent in (SAMPLED, UNSAMPLED):
        assert call(request(parent.trace_id, {"traceparent": parent.traceparent})) == "answer"
    assert [(f"{one.trace_id:032x}", f"{one.span_id:016x}", one.trace_flags.sampled) for one in seen] == [
        SAMPLED,
        UNSAMPLED,
    ]
    assert not otel.get_current_span().get_span_context().is_valid


def test_the_context_is_made_once_a_request() -> None:
    traces, mine = Scheduler().traces, request()
    assert traces._active(mine) is traces._active(mine)


# --- where nothing is traced, or kvobs fails


def test_untraced_answers_everything_with_nothing() -> None:
    hooks = {name for name, value in vars(Untraced).items() if inspect.isfunction(value)}
    untraced = Untraced()
    assert untraced.request_spans is None
    for name in hooks:
        mine, theirs = getattr(Untraced, name), getattr(Traces, name)
        assert mine is not theirs
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters)
        assert getattr(untraced, name)(*[None] * (len(inspect.signature(mine).parameters) - 1)) is None


@pytest.mark.usefixtures("in_production")
def test_a_fault_costs_the_trace_and_nothing_else() -> None:
    scheduler = Scheduler(traces_all=True, sampler=BrokenSampler())
    traces, mine = scheduler.traces, request()
    assert traces.activated(lambda subject: "answer")(mine) == "answer"
    assert traces.begin_step() is None
    traces.looked_up(mine, 1, 2)
    scheduler.note(LOOKUP, mine, is_slow=True)
    traces.settled("r", [], 0, None, 0)
    assert traces.open("r") is None
    assert traces.hand_on("r", {}) is None
    traces.forget("r")
    assert faults.take() == {"trace": 4}
    broken: Any = traces
    broken._request_spans = None
    broken._verdicts = Sampler(True)
    traces.looked_up(mine, 1, 2)
    traces.settled("r", [], 0, None, 0)
    assert traces.hand_on("r", {0: None}) is None  # type: ignore[dict-item]
    traces.forget("r")
    assert faults.take() == {"trace": 3}
    assert (len(traces), scheduler.written()) == (0, [])
