"""Read the spans of several engines from their pages, slow and failed ones first, and export them.

What is above the rate stays in the pages: only what is overwritten there, before there is room, is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from kvobs.export.span_export import SpanConverter
from kvobs.export.totals import Totals
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.schema import signals
from kvobs.schema.spans import Record
from kvobs.telemetry.tracing.journal import GROUP_AT_MOST, PER_SECOND, RESERVED

LAST_S = 3.0
"""How long the last spans of engines that have ended are read, at most."""
_EXPORT = signals.slot(signals.OVERHEAD_SECONDS, "export")
_MISSED = signals.slot(signals.SPANS_DROPPED, "missed")
T = TypeVar("T")
Count = Callable[[Totals, int, int], None]
"""Adds this number to a slot of an engine."""


class SpanReading:
    """Hands the spans of engines to ``converter``; of all engines together as many as one process may write.

    Before spans are handed over ``noted`` is called: who reads on after this process has ended reads none twice.
    """

    def __init__(
        self,
        converter: SpanConverter,
        count: Count = Totals.count,
        noted: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.converter = converter
        self._count, self._noted, self._clock = count, noted, clock
        self._room, self._since = float(PER_SECOND), clock()
        self._missed: dict[Totals, int] = {}

    def go_on(self, engines: Sequence[Totals], *, is_last: bool = False) -> bool:
        """Export what has been written since, as far as there is room; return whether there was any.

        ``is_last``: no more is written, and only the queue limits what is read.
        """
        begin_ns = time.perf_counter_ns()
        taken = list(self._take(engines, is_last=is_last))
        for totals in engines:
            missed = totals.engine.missed
            if more := missed - self._missed.get(totals, 0):
                self._missed[totals] = missed
                self._count(totals, _MISSED, more)
        if not taken:
            return False
        self._noted()
        for totals, group in taken:
            for record in self.converter.convert([group], _index(totals)):
                totals.mark(record, time.time())
        self._count(taken[0][0], _EXPORT, time.perf_counter_ns() - begin_ns)
        return True

    def finish(self, engines: Sequence[Totals]) -> None:
        """Export all that is left, if the collector takes it in time."""
        until = self._clock() + LAST_S
        while (self.go_on(engines, is_last=True) or not self._has_room(0)) and self._clock() < until:
            time.sleep(0.02)

    def _take(self, engines: Sequence[Totals], *, is_last: bool) -> Iterator[tuple[Totals, list[Record]]]:
        """Yield groups, the slow and failed ones of all engines first."""
        now, n = self._clock(), 0
        self._room = min(PER_SECOND, self._room + (now - self._since) * PER_SECOND)
        self._since = now
        for ring, reserved in ((URGENT, 0), (ORDINARY, RESERVED)):
            groups = in_turns(_of_engine(totals, ring) for totals in engines)
            while self._has_room(n) if is_last else self._room > reserved:
                if (taken := next(groups, None)) is None:
                    break
                self._room -= len(taken[1])
                n += len(taken[1])
                yield taken

    def _has_room(self, n: int) -> bool:
        """Return whether the queue has room for a group after this many spans; an empty one takes any group."""
        return self.converter.room >= n + GROUP_AT_MOST or not (self.converter.queued or n)


def _index(totals: Totals) -> int:
    info = totals.engine.info
    return info.index if info is not None else 0


def _of_engine(totals: Totals, ring: int) -> Iterator[tuple[Totals, list[Record]]]:
    return ((totals, group) for group in in_turns(totals.engine.spans(ring)))


def in_turns(sources: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield from each of the iterators in turns, until all are exhausted."""
    waiting = list(sources)
    while waiting:
        for source in tuple(waiting):
            try:
                yield next(source)
            except StopIteration:
                waiting.remove(source)
