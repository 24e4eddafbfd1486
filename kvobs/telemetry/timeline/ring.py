"""A ring buffer of the last records of one process, in a memory block of fixed size that can be read at any time.

The block is meant to be a mapped file, which outlives its process. Little-endian: magic, version, length of the
description; the writer's description as JSON; then 64-bit words: the live words, which are written in place, and the
records. A record begins and ends with its number, written first and last: if they differ it is incomplete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"KVOBSRNG"
VERSION = 4
_HEAD = struct.Struct("<8sIIII")  # magic, version, length of the JSON, live words, records
_WORD = 8

# The words of a record.
NUMBER, START, SPENT, WHAT, MORE, END = range(6)
WIDTH = END + 1
RECORD = struct.Struct(f"<{WIDTH}q")

OPEN = -1  # the value of SPENT until the call ends

Records: TypeAlias = npt.NDArray[np.int64]  # a row for each record


class RingError(ValueError):
    """The memory is not a ring, or this version can't read it."""


class Ring:
    """Writes records into ``memory`` and overwrites the oldest; of threads that write at once a record may be lost.

    Args:
        memory: zeros, with room for at least one record.
        about: the writer's description of itself, as JSON.
        live: number of words that are written in place.

    ``memory``, ``words``, ``first``, ``room`` and ``numbers`` are for callers that inline ``add``; ``numbers`` has the
    last record's, and may be set back, to overwrite the last records. Word ``live`` + n of ``words`` is the n-th live
    word, and of ``floats`` the same one as a float.
    """

    def __init__(self, memory: Any, about: Mapping[str, Any], live: int = 0) -> None:
        text = json.dumps(about).encode()
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.floats = memoryview(memory).cast("d")
        self.live = -(-(_HEAD.size + len(text)) // _WORD)
        self.first = self.live + live
        self.room = (len(self.words) - self.first) // WIDTH
        if self.room < 1:
            raise ValueError(f"a ring of {len(memory)} bytes has no room for a record")
        self.numbers = [0]
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        # The magic is written last: before it nothing can be read.
        head = _HEAD.pack(MAGIC, VERSION, len(text), live, self.room)
        memory[len(MAGIC) : len(head)] = head[len(MAGIC) :]
        memory[: len(MAGIC)] = MAGIC

    def add(self, start: int, spent: int, what: int, more: int = 0) -> int:
        """Write a record; return its position, for ``close``."""
        number = self.numbers[0] = self.numbers[0] + 1
        at = self.first + number % self.room * WIDTH
        RECORD.pack_into(self.memory, at * _WORD, number, start, spent, what, more, number)
        return at

    def close(self, at: int, end: int) -> None:
        """Write the end of an open record."""
        self.words[at + SPENT] = end - self.words[at + START]


@dataclass(frozen=True)
class Snapshot:
    """The content of a ring when it was read: its records in the order of their begin."""

    about: dict[str, Any]
    live: npt.NDArray[np.int64]
    records: Records


def read(memory: Any) -> Snapshot | None:
    """Read a ring, which may be written at the same time; None if its writer has not begun.

    Raises:
        RingError: it is not a ring, or its format is another one.
    """
    if len(memory) < _HEAD.size:
        raise RingError("it is too short for a kvobs recording")
    magic, version, length, live, room = _HEAD.unpack_from(memory)
    if magic == bytes(len(MAGIC)):
        return None
    if magic != MAGIC:
        raise RingError("it is not a kvobs recording")
    if version != VERSION:
        raise RingError(
            f"its format is {version}, this kvobs reads format {VERSION}; use the version of kvobs that wrote it"
        )
    first = -(-(_HEAD.size + length) // _WORD) * _WORD
    size = (live + room * WIDTH) * _WORD
    if first + size > len(memory):
        raise RingError(f"it is truncated: it has {len(memory)} of {first + size} bytes")
    try:
        about = json.loads(bytes(memory[_HEAD.size : _HEAD.size + length]))
    except ValueError as error:
        raise RingError(f"its description of the process is unreadable: {error}") from error
    # Records that differ between two readings are being written.
    before, after = (np.frombuffer(bytes(memory[first : first + size]), "<i8") for _ in range(2))
    ours, same = (words[live:].reshape(room, WIDTH) for words in (after, before))
    numbers = ours[:, NUMBER]
    whole = (ours == same).all(axis=1) & (numbers > 0) & (numbers == ours[:, END])
    whole &= numbers % room == np.arange(room)
    records = ours[whole]
    return Snapshot(about, after[:live], records[records[:, NUMBER].argsort()])
