"""Write spans of single calls into children: slow and failed ones, and with level ``calls`` all of them.

A call about a request is in that request's trace; a worker's call that loads is a child of the load's span; any other
call belongs to its step, which has its own trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvobs import faults
from kvobs.faults import contained
from kvobs.schema import spans
from kvobs.schema.spans import Reason, Record, Value
from kvobs.telemetry.recording.call_event import CallEvent
from kvobs.telemetry.recording.journal import Journal
from kvobs.telemetry.requests.sampling import TracingSettings, Verdicts
from kvobs.telemetry.requests.trace_context import TraceContext, new_span_id, new_trace_id
from kvobs.vllm_api.hooks import HOOKS, Cadence

LOADING = ("start_load_kv", "wait_for_layer_load")
LINKS_AT_MOST = 8  # to the other loads of the same call


class Step(NamedTuple):
    """Parents of one step's calls: the step's own trace, if any, and the loads that begin in it, by child."""

    trace: TraceContext | None
    loads: Mapping[int, Sequence[TraceContext]]


class Place(NamedTuple):
    """The parent of a call's span."""

    trace_id: str
    parent_id: str
    is_sampled: bool
    labels: Mapping[str, Value] = {}
    links: tuple[str, ...] = ()


class CallSpans:
    """Writes the span records of one process's calls.

    Args:
        names: the children's names, by position.
        journal: receives the records.
        tracing: the tracing settings.
        verdicts: the sampler.
        rank: the worker's, None on the scheduler's side.
        of_request: returns the place of a call of this hook about a request; on the scheduler's side.
    """

    def __init__(
        self,
        names: Sequence[str],
        journal: Journal,
        tracing: TracingSettings,
        verdicts: Verdicts,
        *,
        rank: int | None = None,
        of_request: Callable[[CallEvent], Place] | None = None,
    ) -> None:
        self.traces_all = tracing.has_calls
        self.step: Step | None = None
        self._names = names
        self._journal = journal
        self._verdicts = verdicts
        self._rank = rank
        self._of_request = of_request

    def begin_step(self) -> TraceContext | None:
        """Begin and return a trace for the step that is being built, if every call is traced."""
        trace = None
        try:
            trace = self._new_trace() if self.traces_all else None
        except Exception:
            faults.contain("trace")
        self.step = Step(trace, {})
        return trace

    def join_step(self, trace: TraceContext | None, loads: Mapping[int, Sequence[TraceContext]]) -> None:
        """Continue the step's trace that the scheduler has begun."""
        self.step = Step(trace, loads)

    @contained("trace")
    def note(self, noticed: CallEvent) -> None:
        """Write the record of a call, if it is to be exported."""
        is_urgent = bool(noticed.error) or noticed.is_slow
        place = self._place(noticed)
        if not is_urgent and not (self.traces_all and place.is_sampled):
            return
        if not is_urgent and self._journal.is_full:
            self._journal.drop()
            return
        reason = Reason.ERROR if noticed.error else Reason.SLOW if noticed.is_slow else Reason.LEVEL
        attributes: dict[str, Value] = {spans.CONNECTOR: self._names[noticed.child], spans.HOOK: noticed.hook}
        if self._rank is not None:
            attributes[spans.RANK] = self._rank
        if noticed.error:
            attributes[spans.ERROR_TYPE] = noticed.error
        attributes.update(noticed.more)
        attributes.update(place.labels)
        record = Record(
            spans.CALL.name,
            place.trace_id,
            new_span_id(),
            place.parent_id,
            noticed.start_ns,
            noticed.start_ns + noticed.spent_ns,
            reason,
            attributes,
            0 if noticed.is_many else noticed.spent_ns,
            place.links,
        )
        self._journal.add([record])

    def _place(self, noticed: CallEvent) -> Place:
        hook = HOOKS[noticed.hook]
        if self._of_request is not None and hook.cadence is Cadence.REQUEST:
            return self._of_request(noticed)
        # Layer calls are recorded after their step: they carry its place.
        step = noticed.subject if isinstance(noticed.subject, Step) else self.step
        if step is not None and noticed.hook in LOADING and (loads := step.loads.get(noticed.child)):
            first, *others = loads
            links = tuple(other.traceparent for other in others[:LINKS_AT_MOST])
            return Place(first.trace_id, first.span_id, first.is_sampled, links=links)
        trace = step.trace if step is not None and step.trace is not None else self._new_trace()
        return Place(trace.trace_id, "", trace.is_sampled)

    def _new_trace(self) -> TraceContext:
        trace_id = new_trace_id()
        # Slow and failed calls are always exported; below level calls nothing else is.
        return TraceContext(trace_id, new_span_id(), self.traces_all and self._verdicts.on(trace_id, None))
