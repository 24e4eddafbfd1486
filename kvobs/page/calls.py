"""Encode the last calls of a process: the ring at the end of its page.

A record has three words: start and duration of a call, in ns, and which call it was. It is written before the call
counts as ended: a record that a killed process left incomplete has the start of a call in progress.
"""

import struct

WORDS = 3
_RECORD = struct.Struct(f"{WORDS}q")
CALLS_AT = 32  # the first bit of the number of calls in a record's last word


def pack(call: int, calls: int = 1, *, has_raised: bool = False) -> int:
    """Encode a call, by the position of its marks in the page, or this many calls, in one word."""
    return calls << CALLS_AT | call << 1 | has_raised


def unpack(what: int) -> tuple[int, int, bool]:
    """Return what ``pack`` has encoded."""
    return (what & (1 << CALLS_AT) - 1) >> 1, what >> CALLS_AT, bool(what & 1)


def read(memory: memoryview) -> list[tuple[int, int, int]]:
    """Return the records, in the order of their start."""
    return sorted(record for record in _RECORD.iter_unpack(bytes(memory)) if record[0])
