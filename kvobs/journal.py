"""The span records of one process until the next flush: bounded, the slow and failed ones first."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from kvobs.spans import Record

AT_MOST = 64  # spans a flush

Group = list[Record]  # spans that make sense together only, such as a load and its ranks


class Journal:
    """Holds records group by group; a group that has no room is dropped whole, and counted."""

    def __init__(self) -> None:
        self._urgent: list[Group] = []
        self._ordinary: list[Group] = []
        self._size = 0
        self._dropped = 0
        self._lock = Lock()  # a child may call back from a thread of its own

    @property
    def is_full(self) -> bool:
        """Whether anything but a slow or failed span would be dropped: no need to write it."""
        return self._size >= AT_MOST

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent)

    def add(self, group: Sequence[Record]) -> None:
        """Keep a group until the next flush; one that is slow or failed displaces others."""
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
        """Count spans that were not even written."""
        with self._lock:
            self._dropped += n

    def _drop(self, size: int) -> None:
        self._size -= size
        self._dropped += size

    def take(self) -> tuple[list[Group], int]:
        """Return the groups since the last call, slow and failed ones first, and how many spans were dropped."""
        with self._lock:
            groups, dropped = [*self._urgent, *self._ordinary], self._dropped
            self._urgent, self._ordinary, self._size, self._dropped = [], [], 0, 0
        return groups, dropped
