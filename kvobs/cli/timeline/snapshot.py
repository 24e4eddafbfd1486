"""Read a ring of records (see ``kvobs.telemetry.timeline.ring``), also while it is written."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvobs.telemetry.timeline import open_table
from kvobs.telemetry.timeline.flight import What
from kvobs.telemetry.timeline.ring import END, HEAD, MAGIC, NUMBER, VERSION, WIDTH, WORD


class RingError(ValueError):
    """The memory is not a ring, or this version can't read it."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a ring when it was read: its records in the order of their begin."""

    about: dict[str, Any]
    live: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]  # a row for each


def read(memory: Any) -> Snapshot | None:
    """Read a ring, which may be written at the same time; None if its writer has not begun.

    Raises:
        RingError: it is not a ring, or its format is another one.
    """
    if len(memory) < HEAD.size:
        raise RingError("it is too short for a kvobs recording")
    magic, version, length, live, room = HEAD.unpack_from(memory)
    if magic == bytes(len(MAGIC)):
        return None
    if magic != MAGIC:
        raise RingError("it is not a kvobs recording")
    if version != VERSION:
        raise RingError(
            f"its format is {version}, this kvobs reads format {VERSION}; use the version of kvobs that wrote it"
        )
    first = -(-(HEAD.size + length) // WORD) * WORD
    size = (live + room * WIDTH) * WORD
    if first + size > len(memory):
        raise RingError(f"it is truncated: it has {len(memory)} of {first + size} bytes")
    try:
        about = json.loads(bytes(memory[HEAD.size : HEAD.size + length]))
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


@lru_cache(1 << 12)
def unpack(word: int) -> tuple[What, int, int, int]:
    """Decode the word of ``pack``: kind, child, the hook's position in its writer's table, n."""
    return What(word & 0xFF), word >> 24 & 0xFFFF, word >> 8 & 0xFFFF, word >> 40


def rows(words: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return kind, start and request of each transfer in progress, from the words of their table."""
    parts = (words[part :: open_table.WIDTH] for part in (open_table.WHAT, open_table.START, open_table.REQUEST))
    return (row for row in zip(*parts, strict=False) if row[0])
