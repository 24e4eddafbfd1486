"""The transfers in progress of one process, written in place: some began before the oldest record.

Each row has three words: kind, start and request. A row is free while its first word is 0.
Only one thread writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROWS = 1024
_WIDTH = 3
WORDS = ROWS * _WIDTH
_WHAT, _START, _REQUEST = range(_WIDTH)

Key = tuple[int, int, int]  # kind of record, child, request


class OpenTable:
    """Writes the rows, from word ``first`` of ``words`` on. Transfers beyond ``ROWS`` are dropped."""

    def __init__(self, words: memoryview, first: int) -> None:
        self._words = words
        self._free = [first + row * _WIDTH for row in reversed(range(ROWS))]
        self._rows: dict[Key, int] = {}

    def begin(self, key: Key, what: int, start: int) -> None:
        """Add a transfer, or set its start again."""
        at = self._rows.get(key)
        if at is None:
            if not self._free:
                return
            at = self._rows[key] = self._free.pop()
        words = self._words
        words[at + _WHAT] = 0
        words[at + _START], words[at + _REQUEST] = start, key[2]
        words[at + _WHAT] = what

    def end(self, key: Key) -> None:
        """Remove a transfer, if the table has it."""
        at = self._rows.pop(key, None)
        if at is not None:
            self._words[at + _WHAT] = 0
            self._free.append(at)


def rows(words: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield kind, start and request of each transfer, from the words of a table."""
    for at in range(0, len(words) - _WIDTH + 1, _WIDTH):
        if words[at + _WHAT]:
            yield words[at + _WHAT], words[at + _START], words[at + _REQUEST]
