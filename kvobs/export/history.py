"""Keep what an engine has counted in the last ten minutes: of all of it the last minute, and of loads all the time.

A sample is taken every 20 s, whether the numbers are asked for or not, and costs less than a millisecond.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from kvobs.export.numbers import Scrape, Series
from kvobs.export.texts import printable
from kvobs.export.totals import Counted, Point, Totals
from kvobs.schema.percentiles import percentile
from kvobs.schema.signals import CALL_DURATION, LOAD_DURATION, LOAD_TOKENS, LOADS, Kind, Signal, labelnames, slot, word

EVERY_S, ALL_S = 20.0, 600.0
LATELY_S = 60.0
_MODES = LOADS.labels["mode"]
_BOUNDS = (*LOAD_DURATION.buckets, float("inf"))
_KEPT = (
    slot(LOAD_TOKENS),
    *(slot(LOADS, mode, "failed") for mode in _MODES),
    *(slot(LOAD_DURATION, mode) + i for mode in _MODES for i in range(len(_BOUNDS))),
)
"""The slots of a connector whose course is kept."""
_FIRST_BUCKET = 1 + len(_MODES)


class Interval(NamedTuple):
    """What one connector did between two samples. Times are in seconds before now; durations are None without loads."""

    begin_ago_s: float
    end_ago_s: float
    tokens_per_s: float
    failed: int
    p50_s: float | None
    p99_s: float | None


class History:
    """Samples what one engine counts; one thread takes samples, another one reads them."""

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals, self._clock = totals, clock
        self._loads = deque[tuple[float, Any]](maxlen=round(ALL_S / EVERY_S) + 1)
        self._lately = deque[tuple[float, Counted]](maxlen=round(LATELY_S / EVERY_S) + 1)

    @property
    def index(self) -> str:
        """Return the engine's number in its group, as labels have it."""
        info = self.totals.engine.info
        return str(info.index) if info is not None else ""

    def sample(self) -> None:
        """Keep what has been counted, if the last sample is old enough."""
        now = self._clock()
        if (self._loads and now - self._loads[-1][0] < EVERY_S) or (info := self.totals.engine.info) is None:
            return
        counted = self.totals.counted()
        slots = [[word(i, each) for each in _KEPT] for i in range(len(info.connectors))]
        self._loads.append((now, np.array(counted.counts, np.uint64)[slots].astype(np.int64)))
        self._lately.append((now, counted))

    def scrapes(self) -> tuple[Scrape | None, Scrape]:
        """Return the numbers of a minute ago, as far as they are known, and the present ones."""
        before = next(((at, past) for at, past in tuple(self._lately) if self._clock() - at < 2 * LATELY_S), None)
        now = Scrape(self._clock(), values_of(self.totals.series()))
        return Scrape(before[0], values_of(self.totals.series(before[1]))) if before is not None else None, now

    def course(self, connector: str) -> list[Interval]:
        """Return what a connector did in the last ten minutes, the oldest first."""
        now, info = self._clock(), self.totals.engine.info
        index = next((i for i, name in enumerate(info.names if info else ()) if printable(name) == connector), None)
        samples = [(now - at, kept[index]) for at, kept in tuple(self._loads) if index is not None]
        return [_interval(*before, *after) for before, after in pairwise(samples) if before[0] <= ALL_S + EVERY_S]


def _interval(begin_s: float, before: Any, end_s: float, after: Any) -> Interval:
    grown = np.maximum(after - before, 0)
    counts = grown[_FIRST_BUCKET:].reshape(len(_MODES), len(_BOUNDS)).sum(axis=0).tolist()
    buckets = dict(zip(_BOUNDS, accumulate(counts), strict=True)) if any(counts) else {}
    p50, p99 = (percentile(LOAD_DURATION, buckets, q) for q in (0.5, 0.99))
    return Interval(begin_s, end_s, int(grown[0]) / (begin_s - end_s), int(grown[1:_FIRST_BUCKET].sum()), p50, p99)


def values_of(series: Iterable[tuple[Signal, list[Point]]]) -> dict[Series, float]:
    """Return an engine's series as they are read from the text of /metrics, without the buckets of calls."""
    values: dict[Series, float] = {}
    for signal, points in series:
        names = labelnames(signal)
        for point in points:
            labels = [(name, printable(value)) for name, value in zip(names, point.labels, strict=True)]
            own = frozenset(labels)
            if signal.kind is not Kind.HISTOGRAM:
                values[signal.name, own] = float(point.value)
                continue
            values[f"{signal.name}_sum", own] = float(point.value)
            values[f"{signal.name}_count", own] = float(sum(point.buckets))
            if signal is not CALL_DURATION:
                for bound, n in zip((*signal.buckets, float("inf")), accumulate(point.buckets), strict=True):
                    values[f"{signal.name}_bucket", frozenset((*labels, ("le", str(bound))))] = float(n)
    return values
