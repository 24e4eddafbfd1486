"""Write the spans of slow and failed loads where nothing is traced: a person reads them on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvobs.clock import wall_ns
from kvobs.probe.recorder import CallEvent
from kvobs.schema.spans import Reason, Value
from kvobs.state.events import ObservedRequest
from kvobs.state.transfers import NO_RESULT, Gain, Load, LookupResult, WrongBlocks
from kvobs.telemetry.events import TelemetryObserver
from kvobs.telemetry.tracing.call_spans import Parent
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.request_spans import Opened, RequestSpans, Trace, arrival_of
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.telemetry.tracing.trace_context import TraceContext, new_span_id, new_trace_id, remote_of

NO_MORE: Mapping[str, Value] = {}


class UrgentLoads(TelemetryObserver):
    """Writes each slow or failed load as a trace: one span, and the spans of its ranks.

    Lookups are not timed for it: the load's span contains the offers, and how long ago the request had arrived.
    """

    def __init__(self, names: Sequence[str], journal: Journal, tracing: TracingSettings) -> None:
        self._spans = RequestSpans(names, journal, tracing)
        self._lookups: dict[str, tuple[ObservedRequest, LookupResult]] = {}  # of the open loads
        self._unweighed: dict[str, tuple[Trace, Load]] = {}  # ended ones whose gain is not known yet

    def __len__(self) -> int:
        return len(self._lookups) + len(self._unweighed)

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        if owner is not None:
            self._lookups[request.request_id] = request, lookup

    def load_ended(self, request_id: str, load: Load) -> None:
        found = self._lookups.pop(request_id, None)
        if load.failed or self._spans.is_slow(load):
            self._unweighed[request_id] = _untraced(request_id, *found or ()), load
            if load.aborted:  # its request has ended, and no one waits
                self._write(request_id)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        self._write(request_id, gain)

    def request_ended(self, request: ObservedRequest) -> None:
        self._write(request.request_id)  # a load in vain

    def noted(self, notes: Sequence[object]) -> None:
        for note in notes:
            if isinstance(note, WrongBlocks):
                self._spans.got_wrong_blocks(_untraced(note.request), note, wall_ns())

    def _write(self, request_id: str, gain: Gain | None = None) -> None:
        if (ended := self._unweighed.pop(request_id, None)) is not None:
            trace, load = ended
            self._spans.loaded(Opened(trace, new_span_id(), ""), load, gain)


def _untraced(request_id: str, request: ObservedRequest | None = None, lookup: LookupResult = NO_RESULT) -> Trace:
    """Return a trace of its own for a request, with what is known of it."""
    trace = Trace(request_id, new_trace_id(), False, Reason.LEVEL, "", None, "", NO_MORE, lookup=lookup)
    if request is not None:
        trace.remote, trace.arrived_s = remote_of(request.kv_transfer_params), arrival_of(request)
        trace.prompt_tokens = request.num_prompt_tokens
    return trace


def untraced_request(event: CallEvent) -> Parent:
    """Return the parent of a slow or failed call about a request: a new trace."""
    request_id = getattr(event.subject, "request_id", None)
    labels = _untraced(request_id).labels if isinstance(request_id, str) else {}
    return TraceContext(new_trace_id(), "", False), labels
