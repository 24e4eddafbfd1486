"""A request joins its caller's trace or begins one; whatever clients send, nothing raises and nothing piles up."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from opentelemetry import trace as otel

from kvobs import faults
from kvobs.probe.recorder import CallEvent
from kvobs.schema import signals
from kvobs.schema.spans import Reason, Record
from kvobs.state.transfers import Gain, Load, LookupResult, Save, WrongBlocks
from kvobs.telemetry.composed import Composed
from kvobs.telemetry.tracing import trace_context
from kvobs.telemetry.tracing.request_spans import Trace
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.trace_context import TraceContext
from tests.support import contexts
from tests.support.contexts import SAMPLED, TRACING, UNSAMPLED, BrokenSampler, Sampler, lookup, request, written
from tests.support.numbers import taken

LOOKUP, ALLOC = "get_num_new_matched_tokens", "update_state_after_alloc"


class Scheduler:
    def __init__(self, *, roots: bool = True, traces_all: bool = False, sampler: Any = None) -> None:
        self.journal = journal = contexts.journal()
        self.traces = Traces(
            ["disk", "cpu"], journal, replace(TRACING, has_calls=traces_all, propagates=True), sampler or Sampler(roots)
        )

    def activated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        assert self.traces.activated is not None
        return self.traces.activated(call)

    def written(self) -> list[Record]:
        return written(self.journal)

    def note(self, hook: str, subject: Any, *, is_slow: bool = False, error: str = "") -> None:
        self.traces.calls.note(CallEvent(0, hook, 1, 1, is_slow, error, subject))

    def malformed(self) -> dict[str, int]:
        counts = taken(self.journal._page).counts
        found = {s: counts.get(signals.slot(signals.MALFORMED_CONTEXTS, s), 0) for s in ("headers", "params")}
        return {source: n for source, n in found.items() if n}


# --- whose trace it is

SENT: dict[str, Any] = {"none": None, "sampled": SAMPLED, "unsampled": UNSAMPLED, "bad": "bad"}
OTHER = {"sampled": SAMPLED._replace(trace_id="9" * 32), "unsampled": UNSAMPLED._replace(trace_id="8" * 32)}


@pytest.mark.parametrize(("own", "handed_on", "roots"), list(product(SENT, SENT, [True, False])))
def test_a_request_joins_a_clients_or_prefills_trace_if_any(own: str, handed_on: str, roots: bool) -> None:
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


def test_each_trace_links_to_its_own_prefill() -> None:
    traces = Scheduler().traces
    for context in (SAMPLED, UNSAMPLED):
        handed_on = {"kvobs": {"traceparent": context.traceparent}}
        assert traces.of(request(context.trace_id, params=handed_on)).link == context


def test_a_trace_lasts_as_long_as_its_request() -> None:
    scheduler = Scheduler()
    mine = request("r", {"traceparent": "bad"})
    first = scheduler.traces.of(mine)
    assert scheduler.traces.of(mine) is first
    assert scheduler.traces._active(mine) is scheduler.traces._active(mine), "made once"
    assert scheduler.malformed() == {"headers": 1}, "counted once a request"
    scheduler.traces.request_ended(request("r"))
    scheduler.traces.request_ended(request("r"))
    assert len(scheduler.traces) == 0
    assert scheduler.traces.of(mine) is not first


# --- whatever clients send


def strings(value: Any) -> list[str]:
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
    assert scheduler.activated(lambda subject: otel.get_current_span().get_span_context().is_valid)(mine) is True
    traces.looked_up(mine, 1, 2)
    for hook, error in ((LOOKUP, ""), (ALLOC, "OSError")):
        scheduler.note(hook, mine, is_slow=True, error=error)
    traces.allocated(mine, lookup((0, 16), (1, 0), local=32), 0, 16)
    load, save = Load(0, 16, True, 1), Save(True)
    traces.admitted(request_id, load)
    assert traces.of_load(request_id) is not None
    kept = traces.of(mine)
    fields = [getattr(kept, name) for name in Trace.__dataclass_fields__ if name not in ("request_id", "active")]
    assert max(map(len, strings(fields))) <= 32, "ids only"
    traces.looked_up(mine, 3, 4)
    traces.promised(request_id, {0: save}, {})
    params = traces.into_params(request_id, {})
    load.aborted = True
    traces.request_ended(request(request_id))
    traces.load_ended(request_id, load)
    traces.saved(request_id, 0, save, 5)
    return trace_context.of_params(params)


traceparent_like = contexts.json_values | contexts.near_misses
headers_like = st.none() | contexts.json_values | st.fixed_dictionaries({"traceparent": traceparent_like})
params_like = contexts.json_values | st.fixed_dictionaries({"kvobs": contexts.json_values | headers_like})


@given(st.text(max_size=600), headers_like, params_like)
def test_clients_params_never_raise_and_are_not_kept(request_id: str, headers: Any, params: Any) -> None:
    """Under pytest kvobs's own faults are raised on: there is none."""
    scheduler = Scheduler()
    context: Any = live(scheduler, request(request_id, headers, params))
    assert len(context.traceparent) == 55
    assert len(scheduler.traces) == 0
    records = scheduler.written()
    assert {one.reason for one in records} <= set(Reason)
    assert [one.name for one in records if one.is_urgent] == ["kv.call", "kv.call", "kv.lookup"]
    for one in records:
        assert len(one.attributes) <= 12
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
    scheduler.traces.allocated(request("r"), lookup((0, 16), (1, 0), local=32), 0, 16)
    (found,) = scheduler.written()
    assert (found.start_ns, found.end_ns, found.attributes["kv_transfer.lookups"]) == (10, 35, 3)
    assert found.attributes["kv_transfer.outcome"] == "hit"
    assert found.attributes["kv_transfer.offered_tokens.cpu"] == 0
    scheduler.traces.allocated(request("r"), lookup(), None, 0)
    assert scheduler.written() == [], "a second allocation follows no lookup"


def test_a_lookup_without_hit_is_a_miss_and_an_unused_is_aborted() -> None:
    scheduler = Scheduler()
    for request_id in ("missed", "ignored", "aborted"):
        scheduler.traces.looked_up(request(request_id), 1, 2)
    scheduler.traces.allocated(request("missed"), lookup((0, 0)), None, 0)
    scheduler.traces.allocated(request("ignored"), LookupResult(is_read=False), None, 0)
    for request_id in ("missed", "ignored", "aborted"):
        scheduler.traces.request_ended(request(request_id))
    found = {
        one.attributes["kv_transfer.request.id"]: one.attributes["kv_transfer.outcome"] for one in scheduler.written()
    }
    assert found == {"missed": "miss", "ignored": "not_read", "aborted": "aborted"}


def test_unknown_request_changes_nothing() -> None:
    scheduler = Scheduler()
    scheduler.traces.allocated(request("nobody"), lookup((0, 16)), 0, 16)
    scheduler.traces.request_ended(request("nobody"))
    scheduler.traces.admitted("nobody", Load(0, 16, True, 1))
    assert scheduler.traces.of_load("nobody") is None
    scheduler.traces.load_ended("nobody", Load(0, 16, True, 1))
    scheduler.traces.promised("nobody", {0: Save(True)}, {1: Save(True)})
    scheduler.traces.saved("nobody", 0, Save(True), 1)
    assert scheduler.traces.into_params("nobody", {"key": 1}) == {"key": 1}
    assert (len(scheduler.traces), scheduler.written()) == (0, [])


# --- calls about a request


@pytest.mark.parametrize("how", [{"is_slow": True}, {"error": "OSError"}], ids=str)
def test_a_slow_or_failed_lookup_call_is_seen_with_its_lookup(how: dict[str, Any]) -> None:
    scheduler, mine = Scheduler(roots=False), request()
    scheduler.note(LOOKUP, mine, **how)
    scheduler.traces.looked_up(mine, 1, 2)
    scheduler.traces.allocated(request("r"), lookup(), None, 0)
    call, above = scheduler.written()
    assert (call.trace_id, call.parent_id) == (above.trace_id, above.span_id)
    assert above.reason == Reason.SLOW
    scheduler.traces.looked_up(mine, 3, 4)
    scheduler.traces.allocated(request("r"), lookup(), None, 0)
    assert scheduler.written() == [], "the next lookup was not slow"


@pytest.mark.parametrize("parent", [SAMPLED, None])
def test_other_calls_are_siblings_of_a_lookup_or_below_a_root(parent: TraceContext | None) -> None:
    scheduler = Scheduler(traces_all=True)
    mine = request("r-0123abcd", {"traceparent": parent.traceparent} if parent else None)
    scheduler.traces.looked_up(mine, 1, 2)
    scheduler.traces.allocated(request("r-0123abcd"), lookup(), None, 0)
    scheduler.note(ALLOC, mine)
    looked_up, call = scheduler.written()
    assert (call.trace_id, call.parent_id) == (looked_up.trace_id, parent.span_id if parent else looked_up.span_id)
    assert call.attributes["kv_transfer.request.id"] == "r-0123abcd"
    assert call.attributes["gen_ai.request.id"] == "r"


# --- handing on


def test_a_loads_context_has_the_traces_flag() -> None:
    for parent in (SAMPLED, UNSAMPLED):
        traces = Scheduler().traces
        traces.of(request("r", {"traceparent": parent.traceparent}))
        traces.admitted("r", Load(0, 16, True, 1))
        context: Any = traces.of_load("r")
        assert context == TraceContext(parent.trace_id, context.span_id, parent.is_sampled)


def test_transfers_outlive_their_request_with_the_sent_spans() -> None:
    scheduler, mine = Scheduler(), request("r", {"traceparent": SAMPLED.traceparent})
    scheduler.traces.of(mine)
    load, save = Load(0, 16, True, 1, aborted=True), Save(True, promised_ns=3)
    scheduler.traces.admitted("r", load)
    to_workers = scheduler.traces.of_load("r")
    scheduler.traces.promised("r", {1: save}, {})
    to_decode = trace_context.of_params(scheduler.traces.into_params("r", {}))
    scheduler.traces.request_ended(request("r"))
    assert len(scheduler.traces) == 2
    scheduler.traces.load_ended("r", load)
    scheduler.traces.saved("r", 1, save, 7)
    assert len(scheduler.traces) == 0
    loaded, saved = scheduler.written()
    titles = [(one.title, one.attributes["kv_transfer.outcome"]) for one in (loaded, saved)]
    assert titles == [("kv.load disk", "aborted"), ("kv.save cpu", "ok")]
    assert to_workers == SAMPLED._replace(span_id=loaded.span_id)
    assert to_decode == SAMPLED._replace(span_id=saved.span_id)
    assert (saved.start_ns, saved.end_ns, saved.parent_id) == (3, 7, SAMPLED.span_id)


@pytest.mark.parametrize("caller", [SAMPLED, UNSAMPLED], ids=["sampled", "unsampled"])
def test_wrong_blocks_of_a_live_request_are_an_error_at_a_load(caller: TraceContext) -> None:
    scheduler, asked = Scheduler(), request("r", {"traceparent": caller.traceparent})
    scheduler.traces.of(asked)
    scheduler.traces.admitted("r", Load(1, 16, True, 1))
    above = scheduler.traces.of_load("r")
    scheduler.traces.noted([WrongBlocks(0, "r", 3, 1), WrongBlocks(1, "unknown", 1, 1), "another observer's note"])
    (record,) = [each for each in scheduler.written() if each.name == "kv.load.wrong"]
    assert above is not None
    assert (record.trace_id, record.parent_id, record.reason) == (caller.trace_id, above.span_id, Reason.ERROR)
    found = {key: record.attributes[key] for key in ("kv_transfer.connector", "kv_transfer.wrong_blocks", "error.type")}
    assert found == {"kv_transfer.connector": "cpu", "kv_transfer.wrong_blocks": 3, "error.type": "wrong_bytes"}
    scheduler.traces.request_ended(asked)
    scheduler.traces.noted([WrongBlocks(1, "r", 1, 1)])
    assert [each.name for each in scheduler.written() if each.name == "kv.load.wrong"] == []


def test_a_load_is_written_when_weighed_or_when_its_request_ends() -> None:
    """With what it gained, once; of a request that ends before it resumes that is not known."""
    scheduler, load = Scheduler(), Load(0, 16, True, 1)
    for request_id in ("resumed", "ended"):
        scheduler.traces.of(request(request_id))
        scheduler.traces.admitted(request_id, load)
        scheduler.traces.load_ended(request_id, load)
    assert scheduler.written() == []
    scheduler.traces.load_weighed("resumed", load, Gain(7_000_000_000, 5_000_000_000, 1))
    (resumed,) = scheduler.written()
    assert (resumed.attributes["kv_transfer.saved"], resumed.attributes["kv_transfer.waited"]) == (7.0, 5.0)
    scheduler.traces.load_weighed("resumed", load, Gain(7, 5, 1))
    for request_id in ("resumed", "ended"):
        scheduler.traces.request_ended(request(request_id))
    (ended,) = scheduler.written()
    assert "kv_transfer.waited" not in ended.attributes
    assert len(scheduler.traces) == 0


def test_an_early_save_is_written_at_once_and_no_abandoned_one() -> None:
    scheduler, abandoned = Scheduler(), Save(True, is_abandoned=True)
    scheduler.traces.of(request())
    scheduler.traces.promised("r", {}, {1: Save(True, True, promised_ns=3)})
    (saved,) = scheduler.written()
    assert (saved.title, saved.start_ns, saved.end_ns) == ("kv.save cpu", 3, 3)
    scheduler.traces.promised("r", {1: abandoned}, {})
    scheduler.traces.request_ended(request("r"))
    scheduler.traces.saved("r", 1, abandoned, 5)
    assert scheduler.written() == []
    assert len(scheduler.traces) == 0


def test_a_decode_engine_links_to_its_save_or_to_what_is_above() -> None:
    def handed(traces: Traces) -> TraceContext | None:
        return trace_context.of_params(traces.into_params("r", {"remote_host": "h"}))

    scheduler = Scheduler()
    traces = scheduler.traces
    traces.of(request("r", {"traceparent": SAMPLED.traceparent}))
    assert handed(traces) == SAMPLED
    traces.promised("r", {1: Save(True), 0: Save(True)}, {})
    context = handed(traces)
    for index in (0, 1):
        traces.saved("r", index, Save(True), 1)
    second, first = (one.span_id for one in scheduler.written())
    assert context == TraceContext(SAMPLED.trace_id, first, True)
    assert first != second
    assert handed(Scheduler().traces) is None
    begun = (other := Scheduler().traces).of(request())
    assert handed(other) == TraceContext(begun.trace_id, begun.lookup_id, True), "where the trace begins here"


# --- where nothing is traced, or kvobs fails


@pytest.mark.usefixtures("in_production")
def test_a_fault_costs_the_trace_and_nothing_else() -> None:
    scheduler = Scheduler(traces_all=True, sampler=BrokenSampler())
    traces, mine, load = scheduler.traces, request(), Load(0, 16, True, 1)
    observer = Composed([traces])
    assert scheduler.activated(lambda subject: "answer")(mine) == "answer"
    assert traces.calls.begin_step() is None
    observer.looked_up(mine, 1, 2)
    scheduler.note(LOOKUP, mine, is_slow=True)
    observer.allocated(request("r"), lookup(), None, 0)
    observer.admitted("r", load)
    assert traces.of_load("r") is None
    observer.request_ended(request("r"))
    assert faults.take() == {"trace": 4}
    broken: Any = traces
    broken._spans = None
    broken._verdicts = Sampler(True)
    observer.looked_up(mine, 1, 2)
    observer.allocated(request("r"), lookup(), None, 0)
    observer.admitted("r", load)
    observer.promised("r", {0: Save(True)}, {1: Save(True)})
    load.aborted = True
    observer.request_ended(request("r"))
    observer.load_ended("r", load)
    observer.saved("r", 0, Save(True), 1)
    assert faults.take() == {"trace": 5}
    assert (len(traces), scheduler.written()) == (0, [])
