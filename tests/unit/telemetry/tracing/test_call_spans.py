"""Which calls become spans, why, and where in the traces they belong."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvobs.probe.recorder import CallEvent
from kvobs.schema import signals
from kvobs.schema.spans import Reason, Record
from kvobs.telemetry.tracing.call_spans import LINKS_AT_MOST, CallSpans, Parent
from kvobs.telemetry.tracing.journal import PER_SECOND, RESERVED
from kvobs.telemetry.tracing.trace_context import TraceContext, new_span_id, new_trace_id
from kvobs.vllm_api.hooks import HOOKS, Cadence
from tests.support.contexts import SAMPLED, TRACING, UNSAMPLED, Sampler, journal, record, request, written
from tests.support.numbers import taken

STEP_HOOK, LOAD_HOOK = "wait_for_save", "start_load_kv"


class Calls:
    def __init__(self, *, traces_all: bool = False, roots: bool = True, sampler: Any = None, **more: Any) -> None:
        self.journal = journal()
        tracing = replace(TRACING, has_calls=traces_all)
        self.spans = CallSpans(["disk", "cpu"], self.journal, tracing, sampler or Sampler(roots), **more)

    def note(self, hook: str = STEP_HOOK, index: int = 0, *, is_slow: bool = False, **more: Any) -> list[Record]:
        self.spans.note(CallEvent(index, hook, 1_000, 50, is_slow, **more))
        return written(self.journal)

    def one(self, *args: Any, **more: Any) -> Record:
        (only,) = self.note(*args, **more)
        return only

    def dropped(self) -> int:
        return taken(self.journal._page).counts.get(signals.slot(signals.SPANS_DROPPED, "rate"), 0)


def context(is_sampled: bool = True) -> TraceContext:
    return TraceContext(new_trace_id(), new_span_id(), is_sampled)


@pytest.mark.parametrize(
    ("is_slow", "error", "traces_all", "roots"), list(product([False, True], ["", "OSError"], *[[False, True]] * 2))
)
def test_a_call_is_a_span_if_failed_slow_or_wanted(is_slow: bool, error: str, traces_all: bool, roots: bool) -> None:
    expected = Reason.ERROR if error else Reason.SLOW if is_slow else Reason.LEVEL if traces_all and roots else None
    found = Calls(traces_all=traces_all, roots=roots).note(is_slow=is_slow, error=error)
    assert [one.reason for one in found] == ([expected] if expected else [])
    assert [one.attributes.get("error.type") for one in found] == ([error or None] if expected else [])


def test_a_span_says_which_call_it_was_and_when() -> None:
    found = Calls(rank=3).one("wait_for_layer_load", 1, is_slow=True, more={"kv_transfer.layer": 7})
    assert found.title == "kv.call wait_for_layer_load"
    assert (found.start_ns, found.end_ns, found.observed_ns, found.parent_id) == (1_000, 1_050, 50, "")
    assert found.attributes == {
        "kv_transfer.connector": "cpu",
        "kv_transfer.hook": "wait_for_layer_load",
        "kv_transfer.rank": 3,
        "kv_transfer.layer": 7,
    }
    assert "kv_transfer.rank" not in Calls().one(is_slow=True).attributes
    assert Calls(traces_all=True).one(is_many=True).observed_ns == 0, "many calls are what no histogram saw"


def test_spans_above_the_rate_are_written_if_slow_or_failed() -> None:
    calls = Calls(traces_all=True)
    calls.journal._clock = lambda: calls.journal._since  # all in one moment
    for _ in range(PER_SECOND - RESERVED):
        calls.journal.add([record()])
    assert calls.note() == [record()] * (PER_SECOND - RESERVED)
    assert [one.reason for one in calls.note(is_slow=True)] == [Reason.SLOW]
    assert [one.reason for one in calls.note(error="OSError")] == [Reason.ERROR]
    assert calls.dropped() == 1


def test_calls_share_their_steps_trace_or_have_one_each() -> None:
    calls = Calls(traces_all=True)
    alone = [calls.one().trace_id for _ in range(3)]
    trace: Any = calls.spans.begin_step()
    together = [calls.one(index=index).trace_id for index in (0, 1)]
    assert together == [trace.trace_id] * 2
    assert len({*alone, *together}) == 4
    below = Calls()
    assert below.spans.begin_step() is None, "below level calls a step has no trace, and what is slow in it its own"
    assert len({below.one(is_slow=True).trace_id for _ in range(2)}) == 2


@pytest.mark.parametrize("roots", [True, False])
def test_a_step_has_one_verdict_in_every_process(roots: bool) -> None:
    scheduler, worker = Calls(traces_all=True, roots=roots), Calls(traces_all=True, roots=not roots)
    worker.spans.join_step(scheduler.spans.begin_step(), {})
    assert [bool(calls.note()) for calls in (scheduler, worker)] == [roots, roots]


@pytest.mark.parametrize("hook", [hook.name for hook in HOOKS.values() if hook.cadence is not Cadence.REQUEST])
def test_a_loading_calls_span_is_below_its_load_or_in_the_step(hook: str) -> None:
    step, load = context(), context()
    calls = Calls(traces_all=True)
    calls.spans.join_step(step, {1: [load]})
    mine, others = calls.one(hook, 1), calls.one(hook, 0)
    assert (others.trace_id, others.parent_id) == (step.trace_id, "")
    if hook in ("start_load_kv", "wait_for_layer_load"):
        assert (mine.trace_id, mine.parent_id) == (load.trace_id, load.span_id)
    else:
        assert (mine.trace_id, mine.parent_id) == (step.trace_id, "")


@pytest.mark.parametrize("loads", [1, 2, LINKS_AT_MOST + 1, LINKS_AT_MOST + 5])
def test_a_call_for_several_loads_is_below_one_and_links_others(loads: int) -> None:
    contexts = [context() for _ in range(loads)]
    calls = Calls()
    calls.spans.join_step(None, {0: contexts})
    found = calls.one(LOAD_HOOK, is_slow=True)
    assert found.parent_id == contexts[0].span_id
    assert found.links == tuple(other.traceparent for other in contexts[1 : LINKS_AT_MOST + 1])


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_ordinary_call_that_loads_is_seen_with_the_load(is_sampled: bool) -> None:
    calls = Calls(traces_all=True, roots=not is_sampled)
    calls.spans.join_step(context(not is_sampled), {0: [context(is_sampled)]})
    assert bool(calls.note(LOAD_HOOK)) is is_sampled
    assert calls.one(LOAD_HOOK, is_slow=True).reason == Reason.SLOW


@pytest.mark.parametrize("hook", [hook.name for hook in HOOKS.values() if hook.cadence is Cadence.REQUEST])
def test_a_schedulers_call_is_where_its_request_says(hook: str) -> None:
    asked: list[CallEvent] = []

    def place(noticed: CallEvent) -> Parent:
        asked.append(noticed)
        return UNSAMPLED, {"kv_transfer.request.id": "r"}

    calls = Calls(traces_all=True, of_request=place)
    mine = request()
    assert calls.note(hook, subject=mine) == []
    found = calls.one(hook, subject=mine, is_slow=True)
    assert (found.trace_id, found.parent_id) == (UNSAMPLED.trace_id, UNSAMPLED.span_id)
    assert found.attributes["kv_transfer.request.id"] == "r"
    assert [noticed.subject for noticed in asked] == [mine, mine]
    calls.spans.join_step(SAMPLED, {})
    assert calls.one(STEP_HOOK, subject=mine).trace_id == SAMPLED.trace_id
