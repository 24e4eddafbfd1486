"""Write spans of single calls into connectors: slow and failed ones, and with level ``calls`` all of them.

A call about a request is in that request's trace; a worker's call that loads is a child of the load's span; any other
call belongs to its step, which has its own trace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvobs.faults import contained
from kvobs.probe.recorder import CallEvent
from kvobs.schema import spans
from kvobs.schema.spans import Reason, Record, Value
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.sampling import TracingSettings, Verdicts
from kvobs.telemetry.tracing.trace_context import TraceContext, new_span_id, new_trace_id
from kvobs.vllm_api.hooks import HOOKS, Cadence

LOADING = ("start_load_kv", "wait_for_layer_load")
LINKS_AT_MOST = 8  # to the other loads of the same call


class StepTraces(NamedTuple):
    """The traces of one step's calls: the step's own trace, if any, and the loads that begin in it, by connector."""

    step: TraceContext | None
    loads: Mapping[int, Sequence[TraceContext]]


Parent = tuple[TraceContext, Mapping[str, Value]]
"""The span above a call, whose id is empty if there is none, and the attributes of its request."""


@dataclass(eq=False)
class CallSpans:
    """Writes the span records of one process's calls: of all of them with ``traces_all``.

    On the scheduler's side, which has no rank, ``of_request`` returns the parent of a call about a request. ``step``
    has the traces of the running step. Without ``verdicts`` only slow and failed calls are written.
    """

    names: Sequence[str]
    journal: Journal
    tracing: TracingSettings
    verdicts: Verdicts | None
    rank: int | None = None
    of_request: Callable[[CallEvent], Parent] | None = None
    step: StepTraces | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.traces_all = self.tracing.has_calls and self.verdicts is not None

    @contained("trace")
    def begin_step(self) -> TraceContext | None:
        """Begin and return a trace for the step that is being built, if every call is traced."""
        self.step = None
        trace = self._new_trace() if self.traces_all else None
        self.step = StepTraces(trace, {})
        return trace

    def join_step(self, trace: TraceContext | None, loads: Mapping[int, Sequence[TraceContext]]) -> None:
        """Continue the step's trace that the scheduler has begun."""
        self.step = StepTraces(trace, loads)

    @contained("trace")
    def note(self, event: CallEvent) -> None:
        """Write the record of a call, if it is to be exported."""
        is_urgent = bool(event.error) or event.is_slow
        labels: Mapping[str, Value] = {}
        links: tuple[str, ...] = ()
        if self.of_request is not None and HOOKS[event.hook].cadence is Cadence.REQUEST:
            parent, labels = self.of_request(event)
        else:
            parent, *others = self._parents(event)
            links = tuple(other.traceparent for other in others[:LINKS_AT_MOST])
        if not is_urgent and not (self.traces_all and parent.is_sampled):
            return
        if not is_urgent and self.journal.is_full:
            self.journal.drop()
            return
        reason = Reason.ERROR if event.error else Reason.SLOW if event.is_slow else Reason.LEVEL
        attributes: dict[str, Value] = {spans.CONNECTOR: self.names[event.connector_index], spans.HOOK: event.hook}
        if self.rank is not None:
            attributes[spans.RANK] = self.rank
        if event.error:
            attributes[spans.ERROR_TYPE] = event.error
        record = Record(
            spans.CALL.name,
            parent.trace_id,
            new_span_id(),
            parent.span_id,
            event.start_ns,
            event.start_ns + event.spent_ns,
            reason,
            {**attributes, **event.more, **labels},
            0 if event.is_many else event.spent_ns,
            links,
        )
        self.journal.add([record])

    def _parents(self, event: CallEvent) -> Sequence[TraceContext]:
        """Return the loads that a call serves, else its step's trace, without a span."""
        traces = self.step
        if traces is not None and event.hook in LOADING and (loads := traces.loads.get(event.connector_index)):
            return loads
        trace = traces.step if traces is not None and traces.step is not None else self._new_trace()
        return [trace._replace(span_id="")]

    def _new_trace(self) -> TraceContext:
        trace_id = new_trace_id()
        # Slow and failed calls are always exported; below level calls nothing else is.
        is_sampled = self.traces_all and self.verdicts is not None and self.verdicts.on(trace_id, None)
        return TraceContext(trace_id, new_span_id(), is_sampled)
