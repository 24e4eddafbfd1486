"""Hold series whose label values are known at run time only: rows of text and count. A page has few of them.

A row is published by the length of its text, which is written last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from threading import Lock
from typing import Any

from kvobs.page.layout import ROW, ROW_COUNT, ROW_KEY, ROW_LENGTH, ROW_TEXT, TEXT, WORD, Layout
from kvobs.schema.signals import DYNAMIC_COUNTERS, OTHER_VALUE, SERIES_AT_MOST, Signal

_CONNECTORS = 1 << 32  # a row's key is its signal's number times this, and the connector's position
_BETWEEN = "\0"  # label values

Key = tuple[Signal, int, tuple[str, ...]]
"""A signal, the connector's position, label values."""


class Rows:
    """Counts in the rows of a page; each signal and connector has its share of them, and one row for further values."""

    def __init__(self, words: memoryview, layout: Layout) -> None:
        self._words = words
        self._bytes = words.cast("B")
        self._first = layout.rows
        self._left = layout.row_count - layout.connectors * len(DYNAMIC_COUNTERS)
        self._next = layout.rows + (layout.row_count - self._left) * ROW
        self._at: dict[Key, int] = {}
        self._lock = Lock()

    def add(self, signal: Signal, index: int, values: tuple[str, ...], n: int) -> None:
        """Add to a series, or to the series of further values if there is no room for another one."""
        at = self._at.get((signal, index, values))
        if at is None:
            with self._lock:
                at = self._at.get((signal, index, values)) or self._begin(signal, index, values)
        self._words[at] += n

    def known(self, signal: Signal) -> int:
        """Return how many series a signal has, of all connectors."""
        return sum(key[0] is signal for key in list(self._at))

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def _begin(self, signal: Signal, index: int, values: tuple[str, ...]) -> int:
        """Begin a row; return the position of its count."""
        alike = sum(key[:2] == (signal, index) for key in self._at)
        number = DYNAMIC_COUNTERS.index(signal)
        if alike < SERIES_AT_MOST and self._left:
            at, self._next, self._left = self._next, self._next + ROW, self._left - 1
        else:
            values = (OTHER_VALUE,) * len(signal.labels)
            at = self._at.get((signal, index, values), self._first + (index * len(DYNAMIC_COUNTERS) + number) * ROW)
        if not self._words[at + ROW_LENGTH]:
            encoded = _encode(values)
            begin = (at + ROW_TEXT) * WORD
            self._bytes[begin : begin + len(encoded)] = encoded
            self._words[at + ROW_KEY] = number * _CONNECTORS + index
            self._words[at + ROW_LENGTH] = len(encoded) + 1
        self._at[signal, index, values] = at + ROW_COUNT
        return at + ROW_COUNT


def _encode(values: tuple[str, ...]) -> bytes:
    """Return label values as a row's text; where they are too long, each has a share of it."""
    texts = [value.replace(_BETWEEN, "").encode(errors="replace") for value in values]
    if sum(map(len, texts)) + len(texts) - 1 > TEXT:
        texts = [text[: (TEXT + 1) // len(texts) - 1] for text in texts]
    return _BETWEEN.encode().join(texts)


class RowReader:
    """Reads the rows of a page, an array of two dimensions, again and again, from any thread.

    What a row counts never changes.
    """

    def __init__(self, rows: Any, connectors: int) -> None:
        self._rows, self._connectors = rows, connectors
        self._lengths, self._counts = rows[:, ROW_LENGTH], rows[:, ROW_COUNT]
        self._known: tuple[int, list[Key], list[int]] = 0, [], []
        """How many rows are published, and of those that are well-formed the keys and the numbers."""

    def read(self) -> Iterator[tuple[Key, int]]:
        """Yield the series with their counts; others are left out."""
        there = self._lengths > 0
        published, keys, numbers = self._known
        if int(there.sum()) != published:
            found = [(i, key) for i in there.nonzero()[0].tolist() if (key := self._key(self._rows[i].tolist()))]
            keys, numbers = [key for _, key in found], [i for i, _ in found]
            self._known = int(there.sum()), keys, numbers
        for key, n in zip(keys, self._counts[numbers].tolist(), strict=True):
            if n > 0:
                yield key, n

    def _key(self, row: list[int]) -> Key | None:
        number, index = divmod(row[ROW_KEY], _CONNECTORS)
        text = struct.pack(f"{ROW - ROW_TEXT}q", *row[ROW_TEXT:])[: row[ROW_LENGTH] - 1]
        values = tuple(text.decode(errors="ignore").split(_BETWEEN))
        if not (0 <= number < len(DYNAMIC_COUNTERS) and index < self._connectors):
            return None
        signal = DYNAMIC_COUNTERS[number]
        return (signal, index, values) if len(values) == len(signal.labels) else None
