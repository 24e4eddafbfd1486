"""The transfers in progress of one process, written in place: some began before the oldest record.

Each row has three words: kind, start and request. A row is free while its first word is 0.
Only one thread writes it.
"""

ROWS = 1024
WIDTH = 3
WORDS = ROWS * WIDTH
WHAT, START, REQUEST = range(WIDTH)

Key = tuple[int, int, int]  # kind of record, child, request


class OpenTable:
    """Writes the rows, from word ``first`` of ``words`` on. Transfers beyond ``ROWS`` are dropped."""

    def __init__(self, words: memoryview, first: int) -> None:
        self._words = words
        self._free = [first + row * WIDTH for row in reversed(range(ROWS))]
        self._rows: dict[Key, int] = {}

    def begin(self, key: Key, what: int, start: int) -> None:
        """Add a transfer, or set its start again."""
        at = self._rows.get(key)
        if at is None:
            if not self._free:
                return
            at = self._rows[key] = self._free.pop()
        words = self._words
        words[at + WHAT] = 0
        words[at + START], words[at + REQUEST] = start, key[2]
        words[at + WHAT] = what

    def end(self, key: Key) -> None:
        """Remove a transfer, if the table has it."""
        at = self._rows.pop(key, None)
        if at is not None:
            self._words[at + WHAT] = 0
            self._free.append(at)
