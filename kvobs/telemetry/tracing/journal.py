"""Keep the span records of one process until the next flush: bounded, slow and failed ones first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock

from kvobs.probe.increments import Group
from kvobs.schema import signals
from kvobs.schema.spans import Record

AT_MOST = 64  # spans a flush

_DROPPED = signals.slot(signals.SPANS_DROPPED, "flush")


class Journal:
    """Holds records by group; a group without room is dropped as a whole, and counted.

    It also counts the trace contexts from clients that could not be read.
    """

    def __init__(self) -> None:
        self.has_urgent = False
        """Whether there are slow or failed spans."""
        self._urgent: list[Group] = []
        self._ordinary: list[Group] = []
        self._size = 0
        self._counts = Counter[int]()  # slot of the process -> what was counted
        self._lock = Lock()  # a child may call from its own thread

    @property
    def is_full(self) -> bool:
        """Whether there is room only for slow and failed spans."""
        return self._size >= AT_MOST

    @property
    def is_half_full(self) -> bool:
        return 2 * self._size >= AT_MOST

    def add(self, group: Sequence[Record]) -> None:
        """Keep a group until the next flush; slow and failed groups displace others."""
        is_urgent = any(record.is_urgent for record in group)
        with self._lock:
            if is_urgent and sum(map(len, self._urgent)) + len(group) <= AT_MOST:
                while self._size + len(group) > AT_MOST:
                    size = len(self._ordinary.pop())
                    self._size -= size
                    self._counts[_DROPPED] += size
            if self._size and self._size + len(group) > AT_MOST:
                self._counts[_DROPPED] += len(group)
                return
            (self._urgent if is_urgent else self._ordinary).append(list(group))
            self.has_urgent |= is_urgent
            self._size += len(group)

    def drop(self, n: int = 1) -> None:
        """Count spans that were dropped before they were written."""
        with self._lock:
            self._counts[_DROPPED] += n

    def note_malformed(self, source: str) -> None:
        """Count a malformed context; ``source`` is a label value of kvobs_malformed_contexts_total."""
        with self._lock:
            self._counts[signals.slot(signals.MALFORMED_CONTEXTS, source)] += 1

    def take(self) -> tuple[list[Group], Mapping[int, int]]:
        """Return the groups since the last call, slow and failed ones first, and what was counted, by slot."""
        with self._lock:
            groups, counts = [*self._urgent, *self._ordinary], self._counts
            self._urgent, self._ordinary, self._size, self._counts = [], [], 0, Counter()
            self.has_urgent = False
        return groups, counts
