"""A ring buffer of the last records of one process, in a memory block of fixed size that can be read at any time.

The block is meant to be a mapped file, which outlives its process. Little-endian: magic, version, length of the
description; the writer's description as JSON; then 64-bit words: the live words, which are written in place, and the
records. A record begins and ends with its number, written first and last: if they differ it is incomplete.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

MAGIC = b"KVOBSRNG"
VERSION = 4
HEAD = struct.Struct("<8sIIII")  # magic, version, length of the JSON, live words, records
WORD = 8

# The words of a record.
NUMBER, START, SPENT, WHAT, MORE, END = range(6)
WIDTH = END + 1
RECORD = struct.Struct(f"<{WIDTH}q")

OPEN = -1  # the value of SPENT until the call ends


class Ring:
    """Writes records into ``memory`` and overwrites the oldest; of threads that write at once a record may be lost.

    The memory is of zeros, with room for at least one record; ``about`` is the writer's description of itself, and
    ``live`` the number of words that are written in place.

    ``memory``, ``words``, ``first``, ``room`` and ``numbers`` are for callers that inline ``add``; ``numbers`` has the
    last record's, and may be set back, to overwrite the last records. Word ``live`` + n of ``words`` is the n-th live
    word, and of ``floats`` the same one as a float.
    """

    def __init__(self, memory: Any, about: Mapping[str, Any], live: int = 0) -> None:
        text = json.dumps(about).encode()
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.floats = memoryview(memory).cast("d")
        self.live = -(-(HEAD.size + len(text)) // WORD)
        self.first = self.live + live
        self.room = (len(self.words) - self.first) // WIDTH
        if self.room < 1:
            raise ValueError(f"a ring of {len(memory)} bytes has no room for a record")
        self.numbers = [0]
        memory[HEAD.size : HEAD.size + len(text)] = text
        # The magic is written last: before it nothing can be read.
        head = HEAD.pack(MAGIC, VERSION, len(text), live, self.room)
        memory[len(MAGIC) : len(head)] = head[len(MAGIC) :]
        memory[: len(MAGIC)] = MAGIC

    def add(self, start: int, spent: int, what: int, more: int = 0) -> int:
        """Write a record; return its position, for ``close``."""
        number = self.numbers[0] = self.numbers[0] + 1
        at = self.first + number % self.room * WIDTH
        RECORD.pack_into(self.memory, at * WORD, number, start, spent, what, more, number)
        return at

    def close(self, at: int, end: int) -> None:
        """Write the end of an open record."""
        self.words[at + SPENT] = end - self.words[at + START]
