"""Keep the traces of live requests on the scheduler's side: the client's, the prefill engine's, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvobs.clock import wall_ns
from kvobs.faults import contained
from kvobs.probe.recorder import CallEvent
from kvobs.schema.spans import Reason
from kvobs.state.events import ObservedRequest, Params
from kvobs.state.transfers import Gain, Load, LookupResult, Save, WrongBlocks
from kvobs.telemetry.events import TelemetryObserver
from kvobs.telemetry.tracing import trace_context
from kvobs.telemetry.tracing.call_spans import CallSpans, Parent
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.request_spans import Opened, RequestSpans, Trace, arrival_of
from kvobs.telemetry.tracing.sampling import TracingSettings, Verdicts
from kvobs.telemetry.tracing.trace_context import MalformedContextError, TraceContext, new_span_id

Call = Callable[..., Any]


class Traces(TelemetryObserver):
    """The traces of all live requests, and of their open loads and promised saves.

    ``calls`` traces the calls into the connectors. ``activated`` returns a call about a request with that request's
    context active in it; None: it is not to be.
    """

    def __init__(self, names: Sequence[str], journal: Journal, tracing: TracingSettings, verdicts: Verdicts) -> None:
        self.calls = CallSpans(names, journal, tracing, verdicts, of_request=self._parent)
        self.activated: Callable[[Call], Call] | None = None
        if tracing.propagates:
            self.activated = partial(trace_context.activated, context_of=self._active)
        self._spans = RequestSpans(names, journal, tracing)
        self._journal = journal
        self._verdicts = verdicts
        self._traces: dict[str, Trace] = {}
        self._loads: dict[str, Opened] = {}  # they may outlive their request's trace
        self._unweighed: dict[str, tuple[Opened, Load]] = {}  # ended loads whose gain is not known yet
        self._saves: dict[tuple[int, str], Opened] = {}

    def __len__(self) -> int:
        return len(self._traces) + len(self._loads) + len(self._unweighed) + len(self._saves)

    def of(self, request: ObservedRequest) -> Trace:
        """Return the request's trace; begin it if it is new here."""
        if (trace := self._traces.get(request.request_id)) is None:
            trace = self._traces[request.request_id] = self._begin(request)
        return trace

    def _begin(self, request: ObservedRequest) -> Trace:
        """Join the client's trace, otherwise the prefill engine's, otherwise begin one.

        With a malformed context the caller's sampling decision is unknown: such a request's spans are not exported,
        unless slow or failed.
        """
        client, client_is_bad = self._read("headers", trace_context.of_headers, getattr(request, "trace_headers", None))
        link, link_is_bad = self._read("params", trace_context.of_params, request.kv_transfer_params)
        parent = client or link
        trace_id = parent.trace_id if parent is not None else trace_context.new_trace_id()
        is_unclear = parent is None and (client_is_bad or link_is_bad)
        return Trace(
            request_id=request.request_id,
            trace_id=trace_id,
            is_sampled=not is_unclear and self._verdicts.on(trace_id, parent),
            reason=Reason.LEVEL if parent is None else Reason.PARENT,
            parent_id="" if parent is None else parent.span_id,
            link=link,
            lookup_id=new_span_id(),
            remote=trace_context.remote_of(request.kv_transfer_params),
            arrived_s=arrival_of(request),
            prompt_tokens=request.num_prompt_tokens,
        )

    def _read(
        self, source: str, read: Callable[[object], TraceContext | None], value: object
    ) -> tuple[TraceContext | None, bool]:
        """Return the context, and whether it was malformed."""
        try:
            return read(value), False
        except MalformedContextError:
            self._journal.note_malformed(source)
            return None, True

    @contained("trace")
    def _active(self, request: ObservedRequest) -> Any:
        trace = self.of(request)
        if trace.active is None:
            above = TraceContext(trace.trace_id, trace.above or trace.lookup_id, trace.is_sampled)
            trace.active = trace_context.as_otel(above)
        return trace.active

    def _parent(self, event: CallEvent) -> Parent:
        """Return the parent of a call about a request."""
        trace = self.of(event.subject)
        above = trace.above
        if event.hook == "get_num_new_matched_tokens":
            above = trace.lookup_id
            trace.is_slow |= event.is_slow or bool(event.error)  # if the call is exported, so is the lookup
        return TraceContext(trace.trace_id, above, trace.is_sampled), trace.labels

    @contained("trace")
    def of_load(self, request_id: str) -> TraceContext | None:
        """Return the context of the request's open load, the parent of the workers' spans."""
        opened = self._loads.get(request_id)
        return opened.context if opened is not None else None

    @contained("trace")
    def into_params(self, request_id: str, params: Params | None) -> Params | None:
        """Return a finished request's params with the context that a decode engine links to."""
        # Other clients than decode engines have no params, and see no change.
        if params is None or (trace := self._traces.get(request_id)) is None:
            return params
        handed = TraceContext(trace.trace_id, trace.handed_id or trace.above or trace.lookup_id, trace.is_sampled)
        return trace_context.into_params(params, trace_context.TRACEPARENT, handed.traceparent)

    def looked_up(self, request: ObservedRequest, began_ns: int, ended_ns: int) -> None:
        trace = self.of(request)
        if not trace.lookups:
            trace.began_ns = began_ns
        trace.lookups += 1
        trace.ended_ns = ended_ns

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Write the span of the lookups that have ended."""
        trace = self._traces.get(request.request_id)
        if trace is not None and owner is not None:
            trace.lookup = lookup
        if trace is not None and trace.lookups:
            outcome = "hit" if owner is not None else "miss" if lookup.is_read else "not_read"
            self._spans.looked_up(trace, outcome, lookup, owner=owner, tokens=tokens)

    def admitted(self, request_id: str, load: Load) -> None:
        if (opened := self._open(request_id)) is not None:
            self._loads[request_id] = opened
            opened.trace.load_id = opened.span_id

    def noted(self, notes: Sequence[Any]) -> None:
        for note in notes:
            if isinstance(note, WrongBlocks) and (trace := self._traces.get(note.request)) is not None:
                self._spans.got_wrong_blocks(trace, note, wall_ns())

    def load_ended(self, request_id: str, load: Load) -> None:
        if (opened := self._loads.pop(request_id, None)) is None:
            return
        self._write_load(request_id)
        self._unweighed[request_id] = opened, load
        if load.aborted:  # its request has ended, and no one waits
            self._write_load(request_id)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        self._write_load(request_id, gain)

    def _write_load(self, request_id: str, gain: Gain | None = None) -> None:
        if (ended := self._unweighed.pop(request_id, None)) is not None:
            self._spans.loaded(*ended, gain)

    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        """Begin the spans of the promised saves, and write the spans of the saves that are done."""
        for index in (*promised, *early):
            if (opened := self._open(request_id)) is None:
                return
            opened.trace.handed_id = opened.trace.handed_id or opened.span_id
            if index in promised:
                self._saves[index, request_id] = opened
            else:
                self._spans.saved(opened, index, early[index], early[index].promised_ns)

    def saved(self, request_id: str, index: int, save: Save, ended_ns: int) -> None:
        opened = self._saves.pop((index, request_id), None)
        if opened is not None and not save.is_abandoned:
            self._spans.saved(opened, index, save, ended_ns)

    def request_ended(self, request: ObservedRequest) -> None:
        """Forget the request, and write the spans that are still open: of lookups, and of a load in vain."""
        self._write_load(request.request_id)
        trace = self._traces.pop(request.request_id, None)
        if trace is not None and trace.lookups:
            self._spans.looked_up(trace, "aborted")

    def _open(self, request_id: str) -> Opened | None:
        """Begin a span of this request."""
        trace = self._traces.get(request_id)
        return Opened(trace, new_span_id(), trace.above) if trace is not None else None
