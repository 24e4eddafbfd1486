"""Keep the span records of one process until the next flush: bounded, slow and failed ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from kvobs.schema.spans import Record

AT_MOST = 64  # spans a flush

Group = list[Record]  # spans that belong together, such as a load and its ranks


class Journal:
    """Holds records by group; a group without room is dropped as a whole, and counted.

    It also counts the trace contexts from clients that could not be read.
    """

    def __init__(self) -> None:
        self._urgent: list[Group] = []
        self._ordinary: list[Group] = []
        self._size = 0
        self._dropped = 0
        self._malformed: Counter[str] = Counter()
        self._lock = Lock()  # a child may call from its own thread

    @property
    def is_full(self) -> bool:
        """Whether there is room only for slow and failed spans."""
        return self._size >= AT_MOST

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent)

    def add(self, group: Sequence[Record]) -> None:
        """Keep a group until the next flush; slow and failed groups displace others."""
        is_urgent = any(record.is_urgent for record in group)
        with self._lock:
            if is_urgent and sum(map(len, self._urgent)) + len(group) <= AT_MOST:
                while self._size + len(group) > AT_MOST:
                    self._drop(len(self._ordinary.pop()))
            if self._size and self._size + len(group) > AT_MOST:
                self._dropped += len(group)
                return
            (self._urgent if is_urgent else self._ordinary).append(list(group))
            self._size += len(group)

    def drop(self, n: int = 1) -> None:
        """Count spans that were dropped before they were written."""
        with self._lock:
            self._dropped += n

    def note_malformed(self, source: str) -> None:
        """Count a malformed context; ``source`` is a label value of kvobs_malformed_contexts_total."""
        with self._lock:
            self._malformed[source] += 1

    def take_malformed(self) -> dict[str, int]:
        """Return the numbers of malformed contexts since the last call, by source."""
        if not self._malformed:
            return {}
        with self._lock:
            malformed, self._malformed = self._malformed, Counter()
        return malformed

    def _drop(self, size: int) -> None:
        self._size -= size
        self._dropped += size

    def take(self) -> tuple[list[Group], int]:
        """Return the groups since the last call, slow and failed ones first, and the number of dropped spans."""
        with self._lock:
            groups, dropped = [*self._urgent, *self._ordinary], self._dropped
            self._urgent, self._ordinary, self._size, self._dropped = [], [], 0, 0
        return groups, dropped
