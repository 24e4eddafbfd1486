"""The traces of live requests, on the scheduler's side: the client's, the prefill engine's, or one that begins here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvobs import context, signals
from kvobs.call_spans import CallSpans, Place
from kvobs.context import MalformedContextError, TraceContext, new_span_id
from kvobs.faults import contained
from kvobs.noticed import Noticed
from kvobs.recorder import Recorder
from kvobs.request_spans import Opened, RequestSpans, Trace
from kvobs.sampling import Tracing, Verdicts
from kvobs.spans import Reason
from kvobs.transfers import Save

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MALFORMED = {
    source: signals.slot(signals.MALFORMED_CONTEXTS, source) for source in signals.MALFORMED_CONTEXTS.labels["source"]
}


class Untraced:
    """What takes the place of ``Traces`` where nothing is traced."""

    request_spans: RequestSpans | None = None

    def looked_up(self, request: Request, began_ns: int, ended_ns: int) -> None: ...

    def settled(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def open(self, request_id: str) -> Opened | None: ...

    def begin_step(self) -> TraceContext | None: ...

    def context_of(self, opened: Opened | None) -> TraceContext | None: ...

    def hand_on(self, request_id: str, saves: Mapping[int, Save]) -> TraceContext | None: ...

    def into_params(self, params: dict[str, Any] | None, handed: TraceContext | None) -> dict[str, Any] | None: ...


class Traces(Untraced):
    """The traces of all live requests.

    Args:
        names: the children's names, by position.
        recorder: where records and counts go.
        tracing: what is traced.
        verdicts: the sampler.
    """

    def __init__(self, names: Sequence[str], recorder: Recorder, tracing: Tracing, verdicts: Verdicts) -> None:
        self.request_spans = self._request_spans = RequestSpans(names, recorder.journal, tracing)
        self._recorder = recorder
        self._verdicts = verdicts
        self._calls = CallSpans(names, recorder, tracing, verdicts, of_request=self.place)
        recorder.tracer = self._calls
        self._traces: dict[str, Trace] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def of(self, request: Request) -> Trace:
        """Return the request's trace; begin it if it is new here."""
        trace = self._traces.get(request.request_id)
        if trace is None:
            trace = self._traces[request.request_id] = self._begin(request)
        return trace

    def _begin(self, request: Request) -> Trace:
        """Join the client's trace, else the prefill engine's, else begin one.

        Where there was something that is no context, it is not known what the caller wanted: such a request's spans
        are not exported, unless slow or failed.
        """
        own, own_is_bad = self._read("headers", context.of_headers, getattr(request, "trace_headers", None))
        link, link_is_bad = self._read("params", context.of_params, request.kv_transfer_params)
        parent = own or link
        trace_id = parent.trace_id if parent is not None else context.new_trace_id()
        is_unclear = parent is None and (own_is_bad or link_is_bad)
        return Trace(
            request_id=request.request_id,
            trace_id=trace_id,
            is_sampled=not is_unclear and self._verdicts.on(trace_id, parent),
            reason=Reason.LEVEL if parent is None else Reason.PARENT,
            parent_id="" if parent is None else parent.span_id,
            link=link,
            lookup_id=new_span_id(),
        )

    def _read(
        self, source: str, read: Callable[[object], TraceContext | None], value: object
    ) -> tuple[TraceContext | None, bool]:
        """Return the context, and whether there was something else in its place."""
        try:
            return read(value), False
        except MalformedContextError:
            self._recorder.count_own(_MALFORMED[source])
            return None, True

    @contained("trace")
    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; if it was still looked up, that is over."""
        trace = self._traces.pop(request_id, None)
        if trace is not None and trace.lookups:
            self._request_spans.looked_up(trace, "aborted")

    def activated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call about a request with that request's context active in it."""
        return context.activated(call, self._active)

    @contained("trace")
    def _active(self, request: Request) -> Any:
        trace = self.of(request)
        if trace.active is None:
            above = TraceContext(trace.trace_id, trace.above or trace.lookup_id, trace.is_sampled)
            trace.active = context.as_otel(above)
        return trace.active

    def place(self, noticed: Noticed) -> Place:
        """Return where the span of a call about a request belongs."""
        trace = self.of(noticed.subject)
        above = trace.above
        if noticed.hook == "get_num_new_matched_tokens":
            above = trace.lookup_id
            trace.is_slow |= noticed.is_slow or bool(noticed.error)  # whoever sees the call, sees the lookup
        return Place(trace.trace_id, above, trace.is_sampled, trace.labels)

    def begin_step(self) -> TraceContext | None:
        """Begin the next step's trace, where every call is traced."""
        return self._calls.begin_step()

    # Lookups

    @contained("trace")
    def looked_up(self, request: Request, began_ns: int, ended_ns: int) -> None:
        """Note that vLLM has asked what could be loaded."""
        trace = self.of(request)
        if not trace.lookups:
            trace.began_ns = began_ns
        trace.lookups += 1
        trace.ended_ns = ended_ns

    @contained("trace")
    def settled(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None:
        """Write the span of the lookups that have come to an end.

        Args:
            request_id: whose.
            offers: (child, tokens) of the last lookup.
            local: tokens that vLLM had itself.
            owner: the child that loads ``tokens``.
            tokens: how many.
        """
        trace = self._traces.get(request_id)
        if trace is not None and trace.lookups:
            outcome = "miss" if owner is None else "hit"
            self._request_spans.looked_up(trace, outcome, offers, local=local, owner=owner, tokens=tokens)

    @contained("trace")
    def open(self, request_id: str) -> Opened | None:
        """Begin a span of this request."""
        trace = self._traces.get(request_id)
        return Opened(trace, new_span_id(), trace.above) if trace is not None else None

    @contained("trace")
    def context_of(self, opened: Opened | None) -> TraceContext | None:
        """Return what the workers' spans are to join."""
        return opened.context if opened is not None else None

    @contained("trace")
    def into_params(self, params: dict[str, Any] | None, handed: TraceContext | None) -> dict[str, Any] | None:
        """Return the params with what a decode engine is to link to."""
        return context.into_params(params, handed)

    @contained("trace")
    def hand_on(self, request_id: str, saves: Mapping[int, Save]) -> TraceContext | None:
        """Begin the spans of the promised saves; return the context of what a decode engine is to link to."""
        for save in saves.values():
            save.trace = self.open(request_id)
        trace = self._traces.get(request_id)
        if trace is None:
            return None
        opened = [save.trace for save in saves.values() if save.trace is not None]
        span_id = opened[0].span_id if opened else trace.above or trace.lookup_id
        return TraceContext(trace.trace_id, span_id, trace.is_sampled)
