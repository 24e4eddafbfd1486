"""What a reader sees in a page of this process, as plain numbers, and what has been added since it looked last."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvobs.page.layout import ORDINARY, ROW, SPAN_BYTES, URGENT
from kvobs.page.rows import RowReader
from kvobs.page.span_ring import SpanReader
from kvobs.page.writer import PageWriter
from kvobs.probe.pure import PureProbe
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import CONNECTOR_WIDTH, PROCESS_WIDTH, SERIES, Kind, Scope, Series, series_words
from kvobs.schema.spans import Record


class Numbers(NamedTuple):
    """Numbers by slot, rows of signal, connector, label values and count, and gauges by slot."""

    counts: dict[int, int]
    opened: list[list[Any]]
    gauges: dict[int, int]


_TAKEN: WeakKeyDictionary[PageWriter, Numbers] = WeakKeyDictionary()
_READERS: WeakKeyDictionary[PageWriter, list[SpanReader]] = WeakKeyDictionary()


def locate(slot: int) -> tuple[Series, int, int]:
    """Return a slot's series, its index within the series, and the connector's position (-1: none)."""
    scope, index = Scope.PROCESS, -1
    if slot >= PROCESS_WIDTH:
        scope = Scope.CONNECTOR
        index, slot = divmod(slot - PROCESS_WIDTH, CONNECTOR_WIDTH)
    series = next(each for each in reversed(SERIES[scope]) if each.first <= slot)
    return series, slot - series.first, index


def numbers(of: Recorder | PageWriter) -> Numbers:
    """Return all numbers of a page."""
    page = of if isinstance(of, PageWriter) else of.page
    if isinstance(of, Recorder) and isinstance(of.probe, PureProbe):
        for fan_outs in of.probe._short:
            of.probe.settle(fan_outs)
    at = page.layout
    gauges = {first for _, series, first in series_words(at.connectors) if series.signal.kind is Kind.GAUGE}
    words = np.frombuffer(page.words[at.counts : at.counts + at.slots], np.int64).copy()
    written = np.flatnonzero(words)
    counts = dict(zip(written.tolist(), words[written].tolist(), strict=True))
    held = {slot: counts.pop(slot) - 1 for slot in sorted(gauges & counts.keys())}
    found = np.frombuffer(page.words[at.rows : at.rows + at.row_count * ROW], np.int64).copy().reshape(-1, ROW)
    opened = [
        [signal.name, connector, *values, n]
        for (signal, connector, values), n in RowReader(found, at.connectors).read()
    ]
    return Numbers(counts, opened, held)


def taken(of: Recorder | PageWriter) -> Numbers:
    """Return what has been added, and the gauges that have changed, since the last call."""
    page = of if isinstance(of, PageWriter) else of.page
    before, now = _TAKEN.get(page, Numbers({}, [], {})), numbers(of)
    _TAKEN[page] = now
    known = {tuple(row[:-1]): row[-1] for row in before.opened}
    counts = {slot: n - before.counts.get(slot, 0) for slot, n in now.counts.items()}
    opened = [[*row[:-1], row[-1] - known.get(tuple(row[:-1]), 0)] for row in now.opened]
    return Numbers(
        {slot: n for slot, n in counts.items() if n},
        [row for row in opened if row[-1]],
        {slot: value for slot, value in now.gauges.items() if before.gauges.get(slot) != value},
    )


def spans(of: Recorder | PageWriter) -> list[list[Record]]:
    """Return the groups of spans that were written since the last call, slow and failed ones first."""
    page = of if isinstance(of, PageWriter) else of.page
    if page not in _READERS:
        at = page.layout
        _READERS[page] = [SpanReader(page.words, at.spans(i), SPAN_BYTES[i]) for i in (URGENT, ORDINARY)]
    return [group for reader in _READERS[page] for group in reader.read()]
