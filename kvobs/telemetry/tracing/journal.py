"""Write span records into the page of this process, where readers find them: a limited number a second, slow first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic

from kvobs.faults import contained
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.page.writer import PageWriter
from kvobs.schema import signals
from kvobs.schema.spans import Record

PER_SECOND = 200  # spans, sustained: with more, exporting them would slow the API server
RESERVED = 50  # of these, reserved for slow and failed ones
GROUP_AT_MOST = 64  # spans

_DROPPED = signals.slot(signals.SPANS_DROPPED, "rate")


class Journal:
    """Writes records by group; a group without room is left out as a whole, and counted.

    It also counts the trace contexts from clients that could not be read.
    """

    def __init__(self, page: PageWriter, clock: Callable[[], float] = monotonic) -> None:
        self._page = page
        self._clock = clock
        self._room, self._since = float(PER_SECOND), clock()
        self._lock = Lock()  # a connector may call from its own thread

    @property
    def is_full(self) -> bool:
        """Whether there is room only for slow and failed spans."""
        return self._room_now() <= RESERVED

    @contained("trace")
    def add(self, group: Sequence[Record]) -> None:
        """Write a group."""
        is_urgent = any(record.is_urgent for record in group)
        with self._lock:
            self._room, self._since = self._room_now(), self._clock()
            ring = self._page.spans[URGENT if is_urgent else ORDINARY]
            if self._room - len(group) >= (0 if is_urgent else RESERVED) and ring.write(group):
                self._room -= len(group)
                return
        self.drop(len(group))

    def drop(self, n: int = 1) -> None:
        """Count spans that were left out before they were written."""
        self._page.add(_DROPPED, n)

    def note_malformed(self, source: str) -> None:
        """Count a malformed context; ``source`` is a label value of kvobs_malformed_contexts_total."""
        self._page.add(signals.slot(signals.MALFORMED_CONTEXTS, source), 1)

    def _room_now(self) -> float:
        return min(PER_SECOND, self._room + (self._clock() - self._since) * PER_SECOND)
