"""Keep the last calls of a process in a ring, which is a part of its page.

A record has three words: begin and duration of a call, in ns, and which call it was. It is written before the call
counts as ended: a record that a killed process left incomplete has the begin of a call in progress.
"""

import struct

RECORDS = 1 << 16
RECORD = struct.Struct("3q")
SIZE = RECORD.size
BYTES = RECORDS * SIZE
CALLS_AT = 32  # the first bit of the number of calls in a record's last word


class Ring:
    """The memory of the records, of zeros at first, in which the newest overwrites the oldest.

    Callers write them in place, since a call would cost as much again: into ``memory`` at ``next``, which goes on to
    ``last``, the highest place. No call may stand between reading and writing ``next``: it may change threads.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.next = [0]
        self.last = len(memory) - SIZE


def pack(call: int, calls: int = 1, *, has_raised: bool = False) -> int:
    """Encode a call, by the position of its words in the page, or so many calls, in one word."""
    return calls << CALLS_AT | call << 1 | has_raised


def unpack(what: int) -> tuple[int, int, bool]:
    """Return what ``pack`` has encoded."""
    return (what & (1 << CALLS_AT) - 1) >> 1, what >> CALLS_AT, bool(what & 1)


def read(memory: memoryview) -> list[tuple[int, int, int]]:
    """Return the records, in the order of their begin."""
    return sorted(record for record in RECORD.iter_unpack(bytes(memory)) if record[0])
