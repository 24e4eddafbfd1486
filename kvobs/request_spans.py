"""The spans of a request: its lookups, its load, its promised saves.

A span is written once it is known how it ended, and only if it will be exported: because the trace is sampled, or
because it was slow or failed. A load and its ranks are written together: none is seen without the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvobs import spans
from kvobs.context import ID_AT_MOST, TraceContext, external_id, new_span_id
from kvobs.faults import contained
from kvobs.journal import AT_MOST, Journal
from kvobs.sampling import Tracing
from kvobs.spans import Reason, Record, Span, Value
from kvobs.transfers import Load, Save

LOAD_FAILED = "load_failed"


@dataclass(slots=True)
class Trace:
    """One live request's trace."""

    request_id: str
    trace_id: str
    is_sampled: bool
    reason: Reason  # of spans that exist because the trace is sampled
    parent_id: str  # the caller's span; empty where the trace begins here
    link: TraceContext | None  # the prefill engine's
    lookup_id: str  # the span of the lookups that are under way
    root_id: str = ""  # the first span of a trace that begins here
    lookups: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    is_slow: bool = False  # a lookup was, or failed
    active: Any = None  # as OpenTelemetry's context, once it was needed

    @property
    def above(self) -> str:
        """Return the id of the span that the request's next one is a child of."""
        return self.parent_id or self.root_id

    @property
    def labels(self) -> dict[str, Value]:
        return {spans.REQUEST: self.request_id[:ID_AT_MOST], spans.GEN_AI_REQUEST: external_id(self.request_id)}

    def why(self, *, is_slow: bool = False, has_failed: bool = False) -> Reason | None:
        """Return why a span of this trace exists; None if it does not."""
        if has_failed:
            return Reason.ERROR
        if is_slow:
            return Reason.SLOW
        return self.reason if self.is_sampled else None


class Opened(NamedTuple):
    """A span that has begun."""

    trace: Trace
    span_id: str
    parent_id: str

    @property
    def context(self) -> TraceContext:
        return TraceContext(self.trace.trace_id, self.span_id, self.trace.is_sampled)


class RequestSpans:
    """Writes the records of requests' spans.

    Args:
        names: the children's names, by position.
        journal: where the records go.
        tracing: what is traced.
    """

    def __init__(self, names: Sequence[str], journal: Journal, tracing: Tracing) -> None:
        self._names = names
        self._offered = [f"{spans.OFFERED}.{name}" for name in names]
        self._journal = journal
        self._tracing = tracing

    def looked_up(
        self,
        trace: Trace,
        outcome: str,
        offers: Sequence[tuple[int, int]] = (),
        *,
        local: int = 0,
        owner: int | None = None,
        tokens: int = 0,
    ) -> None:
        """Write the span of the lookups that have come to an end.

        Args:
            trace: the request's.
            outcome: how they ended.
            offers: (child, tokens) of the last lookup.
            local: tokens that vLLM had itself.
            owner: the child that loads ``tokens``.
            tokens: how many.
        """
        span_id, parent_id, lookups = trace.lookup_id, trace.above, trace.lookups
        reason = trace.why(is_slow=trace.is_slow)
        # What is looked up later, after a preemption, is a span of its own.
        trace.lookup_id, trace.lookups, trace.is_slow = new_span_id(), 0, False
        if reason is None:
            return
        trace.root_id = trace.root_id or span_id
        attributes = trace.labels
        attributes |= {self._offered[child]: offered for child, offered in offers}
        attributes |= {spans.LOOKUPS: lookups, spans.LOCAL_TOKENS: local, spans.OUTCOME: outcome}
        if owner is not None:
            attributes |= {spans.CONNECTOR: self._names[owner], spans.TOKENS: tokens}
        times = (trace.began_ns, trace.ended_ns)
        record = Record(spans.LOOKUP.name, trace.trace_id, span_id, parent_id, *times, reason, attributes)
        self._journal.add([record])

    @contained("trace")
    def loaded(self, load: Load, outcome: str, size: int) -> None:
        """Write the spans of a load that is over; ``size`` is in bytes, over all ranks."""
        opened: Opened | None = load.trace
        if opened is None:
            return
        limit = self._tracing.slow_load_ns if load.is_async else self._tracing.slow_sync_load_ns
        has_failed = outcome == "failed"
        reason = opened.trace.why(is_slow=load.duration_ns > limit, has_failed=has_failed)
        if reason is None:
            return
        mode = "async" if load.is_async else "sync"
        attributes: dict[str, Value] = {
            spans.CONNECTOR: self._names[load.child],
            spans.MODE: mode,
            spans.OUTCOME: outcome,
            spans.TOKENS: load.tokens,
            spans.BYTES: size,
        }
        if has_failed:
            lost = load.tokens if load.lost_tokens is None else load.lost_tokens
            attributes |= {spans.ERROR_TYPE: LOAD_FAILED, spans.RECOMPUTED_TOKENS: lost}
        of_ranks: dict[int, dict[str, Value]] = {rank: {spans.MODE: mode} for rank in load.ranks}
        for rank, more in of_ranks.items():
            if not load.is_async:
                more[spans.STALL] = load.arrived[rank] / 1e9
            if rank in load.failed_on:
                more[spans.ERROR_TYPE] = LOAD_FAILED
        last_ns = max((ended for _, ended in load.ranks.values()), default=0)
        head = Record(
            spans.LOAD.name,
            opened.trace.trace_id,
            opened.span_id,
            opened.parent_id,
            load.opened_ns,
            max(load.opened_ns, last_ns),
            reason,
            opened.trace.labels | attributes | _compared(load),
            load.duration_ns if outcome == "ok" else 0,
            (opened.trace.link.traceparent,) if opened.trace.link is not None else (),
        )
        self._write(head, spans.LOAD_RANK, load, of_ranks)

    @contained("trace")
    def saved(self, child: int, save: Save, now_ns: int) -> None:
        """Write the spans of a promised save that is over."""
        opened: Opened | None = save.trace
        reason = opened.trace.why() if opened is not None else None
        if opened is None or reason is None:
            return
        attributes: dict[str, Value] = {spans.CONNECTOR: self._names[child], spans.OUTCOME: "ok"}
        held_ns = max(0, now_ns - save.promised_ns)
        head = Record(
            spans.SAVE.name,
            opened.trace.trace_id,
            opened.span_id,
            opened.parent_id,
            save.promised_ns,
            save.promised_ns + held_ns,
            reason,
            opened.trace.labels | attributes | _compared(save),
            held_ns,
        )
        # What was reported before the promise lies before the span, which then has no length.
        self._write(head, spans.SAVE_RANK, save, {rank: {} for rank in save.ranks if held_ns})

    def _write(
        self, head: Record, of_rank: Span, transfer: Load | Save, more: Mapping[int, Mapping[str, Value]]
    ) -> None:
        """Write a load's or save's span and those of its ranks, the slowest where there are very many, as one group."""
        same = {key: head.attributes[key] for key in (spans.REQUEST, spans.GEN_AI_REQUEST, spans.CONNECTOR)}
        group = [head]
        for rank in sorted(heapq.nlargest(AT_MOST - 1, more, key=lambda rank: transfer.ranks[rank][1])):
            began, ended = transfer.ranks[rank]
            start = began or head.start_ns
            group.append(
                Record(
                    of_rank.name,
                    head.trace_id,
                    new_span_id(),
                    head.span_id,
                    start,
                    max(start, ended),
                    head.reason,
                    {**same, spans.RANK: rank, **more[rank]},
                )
            )
        self._journal.add(group)


def _compared(transfer: Load | Save) -> dict[str, Value]:
    slowest = transfer.slowest
    return {} if slowest is None else {spans.SLOWEST_RANK: slowest.rank, spans.RANK_SKEW: slowest.skew_ns / 1e9}
