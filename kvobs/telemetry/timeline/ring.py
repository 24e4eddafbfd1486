"""Keep the last calls of a process in a ring, which is a part of its page.

A record has three words: begin and duration of a call, in ns, and which call it was. It is written before the call
counts as ended: a record that a killed process left incomplete has the begin of a call in progress.
"""

import struct

RECORDS = 1 << 16
RECORD = struct.Struct("3q")
SIZE = RECORD.size
BYTES = RECORDS * SIZE


class Ring:
    """Writes records into ``memory``, which is of zeros, and overwrites the oldest.

    ``memory``, ``next``, the position of the next record, and ``last``, the highest one, are for callers that inline
    ``add``: calling it costs as much again. No call may stand between reading and writing ``next``: there Python may
    change threads.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.next = [0]
        self.last = len(memory) - SIZE

    def add(self, begin_ns: int, spent_ns: int, what: int) -> None:
        """Write a record; ``what`` is made by ``pack``."""
        at = self.next[0]
        self.next[0] = at + SIZE if at < self.last else 0
        RECORD.pack_into(self.memory, at, begin_ns, spent_ns, what)


def pack(call: int, calls: int = 1, *, has_raised: bool = False) -> int:
    """Encode a call, by the position of its words in the page, or so many calls, in one word."""
    return calls << 32 | call << 1 | has_raised


def unpack(what: int) -> tuple[int, int, bool]:
    """Return what ``pack`` has encoded."""
    return (what & 0xFFFFFFFF) >> 1, what >> 32, bool(what & 1)


def read(memory: memoryview) -> list[tuple[int, int, int]]:
    """Return the records, in the order of their begin."""
    return sorted(record for record in RECORD.iter_unpack(bytes(memory)) if record[0])
