"""Pass groups of span records from one process to any number of readers: a ring in its page.

A record is framed by the position at which it begins in all that was ever written, the number of spans before it, its
length and a checksum. The writer first moves the tail past what it is about to overwrite, and the head last. A reader
that comes too late continues with the oldest record that is whole, and knows how many spans it has missed.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from kvobs.page.layout import RING_BYTES, RING_HEAD, RING_TAIL, WORD
from kvobs.schema.spans import SPANS, Record

_FRAME = struct.Struct("<QQIIII")  # begin, spans before it, length, checksum, spans, nothing
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(list[Record]).decode


class SpanRing:
    """The ring at this position in the words of a page, with room for this many bytes; callers take turns."""

    def __init__(self, words: memoryview, at: int, size: int) -> None:
        self._ends = words[at : at + RING_BYTES]
        self._bytes = words.cast("B")[(at + RING_BYTES) * WORD :][:size]
        self._size = size
        self._records = deque[tuple[int, int]]()  # begin and end of the records that are whole
        self._spans = 0

    def write(self, group: Sequence[Record]) -> bool:
        """Write a group over the oldest ones; return whether it is small enough."""
        data = _ENCODE(group)
        size = -(-(_FRAME.size + len(data)) // WORD) * WORD
        if size > self._size // 2:
            return False
        begin = self._ends[RING_HEAD]
        if begin % self._size + size > self._size:  # a record is in one piece
            begin += self._size - begin % self._size
        end, records = begin + size, self._records
        while records and records[0][0] + self._size < end:
            records.popleft()
        self._ends[RING_TAIL] = records[0][0] if records else begin
        at = begin % self._size
        frame = begin, self._spans, len(data), zlib.crc32(data), len(group), 0
        self._bytes[at + _FRAME.size : at + _FRAME.size + len(data)] = data
        _FRAME.pack_into(self._bytes, at, *frame)
        records.append((begin, end))
        self._spans += len(group)
        self._ends[RING_HEAD] = end
        return True


class SpanReader:
    """Reads such a ring from the position ``at`` on, from the oldest record on by default."""

    def __init__(self, words: memoryview, at: int, size: int, begin: tuple[int, int] = (0, 0)) -> None:
        self._ends = words[at : at + RING_BYTES]
        self._bytes = words.cast("B")[(at + RING_BYTES) * WORD :][:size]
        self._size = size
        self._at, self._seen = begin  # of the next record: its position, and the spans before it
        self.missed = 0
        """Spans that were overwritten before they were read, or that are malformed."""

    @property
    def position(self) -> tuple[int, int]:
        """Return from where to read on later."""
        return self._at, self._seen

    def read(self) -> Iterator[list[Record]]:
        """Yield the groups that were written since."""
        at_most = self._size // _FRAME.size  # a page of another process may be anything
        while self._at < self._ends[RING_HEAD] and at_most:
            at_most -= 1
            tail = self._ends[RING_TAIL]
            self._at = max(self._at, tail)
            frame = self._frame()
            if frame is None:
                if self._at >= self._ends[RING_TAIL]:  # not overwritten meanwhile: the rest was left out
                    self._at += self._size - self._at % self._size
                continue
            before, length, checksum, spans = frame
            begin = self._at % self._size + _FRAME.size
            data = self._bytes[begin : begin + length].tobytes()
            if zlib.crc32(data) != checksum:
                if self._at >= self._ends[RING_TAIL]:  # not overwritten meanwhile: it is none
                    self._at = self._ends[RING_HEAD]
                continue
            if self._at < self._ends[RING_TAIL]:
                continue  # its header may be half of another record's: the checksum is of the data only
            self.missed += max(0, before - self._seen)
            self._seen = before + spans
            self._at += -(-(_FRAME.size + length) // WORD) * WORD
            try:
                group = _DECODE(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                group = []
            if group and all(record.name in SPANS for record in group):
                yield group
            else:
                self.missed += spans

    def skip(self) -> None:
        """Skip the groups that were written since: another reader takes them, and they do not count as missed."""
        missed = self.missed
        for _ in self.read():
            pass
        self.missed = missed

    def _frame(self) -> tuple[int, int, int, int] | None:
        """Return the spans before the record here, its length, checksum and spans; None if there is none."""
        at = self._at % self._size
        if self._size - at < _FRAME.size:
            return None
        begin, before, length, checksum, spans, _ = _FRAME.unpack_from(self._bytes, at)
        if begin != self._at or length > self._size - at - _FRAME.size:
            return None
        return before, length, checksum, spans
