"""The last records of one process, in a block of memory of fixed size: written over and over, readable at any time.

The block is meant to be a mapped file, which outlives its process. Little-endian: magic, version, length of what the
writer says of itself; that, as JSON; then 64-bit words: the live ones, which are written in place, and the records.
A record begins and ends with its number, which is written first and last: one whose numbers differ is half written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"KVOBSRNG"
VERSION = 1
_HEAD = struct.Struct("<8sIIII")  # magic, version, length of the JSON, live words, records
_WORD = 8

# The words of a record.
NUMBER, START, SPENT, WHAT, MORE, END = range(6)
WIDTH = END + 1
RECORD = struct.Struct(f"<{WIDTH}q")

OPEN = -1  # what a record says in SPENT until its call ends

Records: TypeAlias = npt.NDArray[np.int64]  # a row for each record


class RingError(ValueError):
    """What is read is no ring, or one that this version can't read."""


class Ring:
    """Writes records into ``memory``, the oldest of which it overwrites; threads may share it.

    Args:
        memory: zeros, of a length that has room for at least one record.
        about: what the writer says of itself, as JSON.
        live: how many words there are to be written in place.

    ``memory``, ``words``, ``first``, ``room`` and ``numbers`` are for those who write records in line, as ``add``
    does. Word ``live`` + n of ``words`` is the n-th live word.
    """

    def __init__(self, memory: Any, about: Mapping[str, Any], live: int = 0) -> None:
        text = json.dumps(about).encode()
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.live = -(-(_HEAD.size + len(text)) // _WORD)
        self.first = self.live + live
        self.room = (len(self.words) - self.first) // WIDTH
        if self.room < 1:
            raise ValueError(f"a ring of {len(memory)} bytes has no room for a record")
        self.numbers = count(1)
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        # The magic last: what is not there yet can't be read.
        head = _HEAD.pack(MAGIC, VERSION, len(text), live, self.room)
        memory[len(MAGIC) : len(head)] = head[len(MAGIC) :]
        memory[: len(MAGIC)] = MAGIC

    def add(self, start: int, spent: int, what: int, more: int = 0) -> int:
        """Write a record; return its place, for ``close``."""
        number = next(self.numbers)
        at = self.first + number % self.room * WIDTH
        RECORD.pack_into(self.memory, at * _WORD, number, start, spent, what, more, number)
        return at

    def close(self, at: int, end: int) -> None:
        """Write into an open record when it ended."""
        self.words[at + SPENT] = end - self.words[at + START]


@dataclass(frozen=True)
class Snapshot:
    """What a ring held when it was read: its records in the order in which they began."""

    about: dict[str, Any]
    live: list[int]
    records: Records


def read(memory: Any) -> Snapshot | None:
    """Read a ring, which may be written at the same time; None where its writer has not begun.

    Raises:
        RingError: it is none, or of a version that is not known here.
    """
    if len(memory) < _HEAD.size:
        raise RingError("it is too short to be a recording of kvobs's")
    magic, version, length, live, room = _HEAD.unpack_from(memory)
    if magic == bytes(len(MAGIC)):
        return None
    if magic != MAGIC:
        raise RingError("it is no recording of kvobs's")
    if version != VERSION:
        raise RingError(f"its format is {version}, and this kvobs reads format {VERSION}: use the kvobs that wrote it")
    first = -(-(_HEAD.size + length) // _WORD) * _WORD
    size = (live + room * WIDTH) * _WORD
    if first + size > len(memory):
        raise RingError(f"it has {len(memory)} bytes and needs {first + size}: it was cut off")
    try:
        about = json.loads(bytes(memory[_HEAD.size : _HEAD.size + length]))
    except ValueError as error:
        raise RingError(f"what it says of its process is unreadable: {error}") from error
    # What differs between two readings is just being written.
    before, after = (np.frombuffer(bytes(memory[first : first + size]), "<i8") for _ in range(2))
    ours, same = (words[live:].reshape(room, WIDTH) for words in (after, before))
    numbers = ours[:, NUMBER]
    whole = (ours == same).all(axis=1) & (numbers > 0) & (numbers == ours[:, END])
    whole &= numbers % room == np.arange(room)
    records = ours[whole]
    return Snapshot(about, after[:live].tolist(), records[records[:, NUMBER].argsort()])
