"""Write the spans of requests: lookups, load, promised saves.

A span is written at its end, and only if it will be exported: because the trace is sampled, or because it was slow or
failed. A load and its ranks are written as one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvobs.schema import spans
from kvobs.schema.spans import Reason, Record, Span, Value
from kvobs.state.transfers import NO_RESULT, Gain, Load, LookupResult, Save, Times, WrongBlocks
from kvobs.telemetry.tracing.journal import GROUP_AT_MOST, Journal
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.telemetry.tracing.trace_context import ID_AT_MOST, TraceContext, external_id, new_span_id

LOAD_FAILED, WRONG_BYTES = "load_failed", "wrong_bytes"


@dataclass(slots=True)
class Trace:
    """One live request's trace."""

    request_id: str
    trace_id: str
    is_sampled: bool
    reason: Reason  # the reason of spans that exist because the trace is sampled
    parent_id: str  # the caller's span; empty if the trace begins here
    link: TraceContext | None  # the prefill engine's
    lookup_id: str  # the span of the current lookups
    remote: Mapping[str, Value]  # attributes of the prefill engine
    arrived_s: float = 0.0  # at the server, since the epoch; 0: unknown
    lookup: LookupResult = NO_RESULT  # the one before the last load
    root_id: str = ""  # the first span of a trace that begins here
    prompt_tokens: int = 0
    lookups: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    is_slow: bool = False  # a lookup was, or failed
    active: Any = None  # OpenTelemetry's context, created on first use
    load_id: str = ""  # the span of the last load
    handed_id: str = ""  # the first promised save's span, which a decode engine links to

    @property
    def above(self) -> str:
        """Return the id of the parent of the request's next span."""
        return self.parent_id or self.root_id

    @property
    def labels(self) -> dict[str, Value]:
        return {spans.REQUEST: self.request_id[:ID_AT_MOST], spans.GEN_AI_REQUEST: external_id(self.request_id)}

    def why(self, *, is_slow: bool = False, has_failed: bool = False) -> Reason | None:
        """Return the reason for a span of this trace; None if it is not exported."""
        if has_failed:
            return Reason.ERROR
        return Reason.SLOW if is_slow else self.reason if self.is_sampled else None


class Opened(NamedTuple):
    """A span that has begun."""

    trace: Trace
    span_id: str
    parent_id: str

    @property
    def context(self) -> TraceContext:
        return TraceContext(self.trace.trace_id, self.span_id, self.trace.is_sampled)

    def record(
        self, span: Span, start_ns: int, end_ns: int, reason: Reason, attributes: Mapping[str, Value], *more: Any
    ) -> Record:
        """Return its record at its end."""
        labels = {**self.trace.labels, **attributes}
        ids = self.trace.trace_id, self.span_id, self.parent_id
        return Record(span.name, *ids, start_ns, end_ns, reason, labels, *more)


class RequestSpans:
    """Writes the records of requests' spans."""

    def __init__(self, names: Sequence[str], journal: Journal, tracing: TracingSettings) -> None:
        self._names = names
        self._offered = [f"{spans.OFFERED}.{name}" for name in names]
        self._journal = journal
        self._tracing = tracing

    def looked_up(
        self,
        trace: Trace,
        outcome: str,
        lookup: LookupResult = NO_RESULT,
        *,
        owner: int | None = None,
        tokens: int = 0,
    ) -> None:
        """Write the span of the lookups that have ended; ``Observer.allocated`` describes the arguments."""
        opened, lookups = Opened(trace, trace.lookup_id, trace.above), trace.lookups
        reason = trace.why(is_slow=trace.is_slow)
        # Later lookups, after a preemption, get their own span.
        trace.lookup_id, trace.lookups, trace.is_slow = new_span_id(), 0, False
        if reason is None:
            return
        trace.root_id = trace.root_id or opened.span_id
        attributes = self._of_lookup(trace, lookup) | {spans.LOOKUPS: lookups, spans.OUTCOME: outcome}
        if outcome in {"hit", "miss"} and trace.prompt_tokens:
            attributes[spans.HIT_RATE] = min(1.0, (lookup.local + tokens) / trace.prompt_tokens)
        if owner is not None:
            attributes |= {spans.CONNECTOR: self._names[owner], spans.TOKENS: tokens}
        self._journal.add([opened.record(spans.LOOKUP, trace.began_ns, trace.ended_ns, reason, attributes)])

    def _of_lookup(self, trace: Trace, lookup: LookupResult) -> dict[str, Value]:
        """Return the attributes of a lookup's offers."""
        offers: dict[str, Value] = {self._offered[offer.connector_index]: offer.tokens for offer in lookup.offers}
        return offers | {spans.LOCAL_TOKENS: lookup.local, spans.PROMPT_TOKENS: trace.prompt_tokens}

    def is_slow(self, load: Load) -> bool:
        """Return whether a load took so long that its span is always written."""
        return load.duration_ns > (self._tracing.slow_load_ns if load.is_async else self._tracing.slow_sync_load_ns)

    def loaded(self, opened: Opened, load: Load, gain: Gain | None = None) -> None:
        """Write the spans of a finished load; ``gain`` is None if unknown."""
        reason = opened.trace.why(is_slow=self.is_slow(load), has_failed=load.failed)
        if reason is None:
            return
        mode = "async" if load.is_async else "sync"
        attributes: dict[str, Value] = {
            spans.CONNECTOR: self._names[load.connector_index],
            spans.MODE: mode,
            spans.OUTCOME: load.outcome,
            spans.TOKENS: load.tokens,
            spans.BYTES: load.size,
            **opened.trace.remote,
        }
        if load.failed:
            attributes |= {spans.ERROR_TYPE: LOAD_FAILED, spans.RECOMPUTED_TOKENS: load.recomputed_tokens}
        if not opened.trace.is_sampled:  # then its lookup has no span
            attributes |= self._of_lookup(opened.trace, opened.trace.lookup)
        if opened.trace.arrived_s:  # by the clock of the API server's process
            attributes[spans.QUEUED] = max(0.0, load.opened_ns / 1e9 - opened.trace.arrived_s)
        if gain is not None:
            attributes[spans.WAITED] = gain.waited_ns / 1e9
            if gain.saved_ns is not None:
                attributes[spans.SAVED] = gain.saved_ns / 1e9
        reported = load.reported
        of_ranks: dict[int, dict[str, Value]] = {rank: {spans.MODE: mode} for rank in reported}
        for rank, more in of_ranks.items():
            if not load.is_async:
                more[spans.STALL] = reported[rank][1] / 1e9
            if rank in load.failed_on:
                more[spans.ERROR_TYPE] = LOAD_FAILED
        # A rank's times are by its host's clock: only how long it took can be added to the scheduler's.
        steps_ns = (time_ns - began_ns for time_ns, _, began_ns in reported.values() if began_ns)
        lasted_ns = load.duration_ns if load.is_async else max(steps_ns, default=0)
        head = opened.record(
            spans.LOAD,
            load.opened_ns,
            load.opened_ns + lasted_ns,
            reason,
            attributes | _compared(load),
            load.duration_ns if load.outcome == "ok" else 0,
            (opened.trace.link.traceparent,) if opened.trace.link is not None else (),
        )
        self._write(head, spans.LOAD_RANK, reported, of_ranks)

    def got_wrong_blocks(self, trace: Trace, wrong: WrongBlocks, now_ns: int) -> None:
        """Write that a load has brought wrong bytes; the span of the load may have been sent by now."""
        attributes: dict[str, Value] = {spans.CONNECTOR: self._names[wrong.writer], spans.WRONG_BLOCKS: wrong.blocks}
        opened = Opened(trace, new_span_id(), trace.load_id or trace.above)
        more = attributes | {spans.ERROR_TYPE: WRONG_BYTES}
        self._journal.add([opened.record(spans.LOAD_WRONG, now_ns, now_ns, Reason.ERROR, more)])

    def saved(self, opened: Opened, index: int, save: Save, ended_ns: int) -> None:
        """Write the spans of a promised save that has ended."""
        reason = opened.trace.why()
        if reason is None:
            return
        attributes: dict[str, Value] = {spans.CONNECTOR: self._names[index], spans.OUTCOME: "ok"}
        held_ns = max(0, ended_ns - save.promised_ns)
        ended_ns = save.promised_ns + held_ns
        head = opened.record(spans.SAVE, save.promised_ns, ended_ns, reason, attributes | _compared(save), held_ns)
        # A span without length has no ranks: they had reported before the promise.
        reported = save.reported if held_ns else {}
        self._write(head, spans.SAVE_RANK, reported, {rank: {} for rank in reported})

    def _write(
        self, head: Record, of_rank: Span, reported: Mapping[int, Times], more: Mapping[int, Mapping[str, Value]]
    ) -> None:
        """Write a load's or save's span and its ranks' (of very many only the slowest) as one group.

        A rank's span has times by its host's clock.
        """
        same = {key: head.attributes[key] for key in (spans.REQUEST, spans.GEN_AI_REQUEST, spans.CONNECTOR)}
        group = [head]
        for rank in sorted(heapq.nlargest(GROUP_AT_MOST - 1, more, key=lambda rank: reported[rank][1])):
            ended_ns, _, began_ns = reported[rank]
            start_ns = began_ns or ended_ns
            ids = head.trace_id, new_span_id(), head.span_id
            attributes = {**same, spans.RANK: rank, **more[rank]}
            group.append(Record(of_rank.name, *ids, start_ns, ended_ns, head.reason, attributes))
        self._journal.add(group)


def arrival_of(request: object) -> float:
    """Return when a request arrived at the server, in seconds since the epoch; 0 if the request does not carry it."""
    arrived_s = getattr(request, "arrival_time", 0.0)
    return arrived_s if isinstance(arrived_s, float) else 0.0


def _compared(transfer: Load | Save) -> dict[str, Value]:
    slowest = transfer.slowest
    return {} if slowest is None else {spans.SLOWEST_RANK: slowest.rank, spans.RANK_SKEW: slowest.skew_ns / 1e9}
