"""Compute differences of two scrapes of /metrics, select series by connector, engine and label, and find quantiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from kvobs.schema.signals import SIGNALS, Kind, Signal

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]
Values = Mapping[Series, float]
"""The samples of a scrape."""

_GAUGES = {signal.name for signal in SIGNALS if signal.kind is Kind.GAUGE}
_HISTOGRAMS = [signal.name for signal in SIGNALS if signal.kind is Kind.HISTOGRAM]
# Whole numbers, which only ever grow while the server lives; sums of seconds may lose a last digit on the way.
_EXACT = {f"{name}{part}" for name in _HISTOGRAMS for part in ("_bucket", "_count")} | {
    signal.name for signal in SIGNALS if signal.kind is Kind.COUNTER and signal.unit == 1
}


def has_restarted(before: Values, after: Values) -> bool:
    """Return whether a server has restarted: a counter of kvobs fell, or is gone."""
    return any(after.get(series, -1) < value for series, value in before.items() if series[0] in _EXACT)


def change(before: Values | None, after: Values) -> dict[Series, float]:
    """Return each counter's growth, never below 0, and kvobs's gauges unchanged.

    From the server's start if there is no scrape before, or the server has restarted since.
    """
    old = before if before is not None and not has_restarted(before, after) else {}
    return {
        series: value if series[0] in _GAUGES else max(0.0, value - old.get(series, 0.0))
        for series, value in after.items()
    }


@dataclass(frozen=True)
class Numbers:
    """A selection of series, such as those of one connector on one engine."""

    by_name: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[tuple[Series, float]]) -> Numbers:
        """Return these series."""
        numbers = cls()
        for (name, labels), value in values:
            numbers.by_name.setdefault(name, []).append((dict(labels), value))
        return numbers

    def sum(self, name: str, **labels: str) -> float:
        """Sum the samples of this name with these labels, and any others."""
        return sum(value for has, value in self.by_name.get(name, ()) if labels.items() <= has.items())

    def total(self, signal: Signal, part: str = "", **labels: str) -> float:
        """Sum the series with these labels; ``part`` is one of a histogram: "_sum", "_count"."""
        return self.sum(signal.name + part, **labels)

    def by_label(self, signal: Signal, label: str) -> dict[str, float]:
        """Sum the series by the value of one of their labels."""
        found: dict[str, float] = {}
        for has, value in self.by_name.get(signal.name, ()):
            found[has.get(label, "")] = found.get(has.get(label, ""), 0.0) + value
        return found

    def values(self, signal: Signal) -> list[float]:
        """Return the values of all series."""
        return [value for _, value in self.by_name.get(signal.name, ())]

    def label(self, signal: Signal, label: str) -> str:
        """Return a label's value of the first series; empty without any."""
        return next((has.get(label, "") for has, _ in self.by_name.get(signal.name, ())), "")

    def quantile(self, name: str, q: float) -> float | None:
        """Return the quantile of the histogram of this name over all its series; None without observations."""
        buckets: dict[float, float] = {}
        for has, value in self.by_name.get(f"{name}_bucket", ()):
            bound = float(has.get("le", "inf"))
            buckets[bound] = buckets.get(bound, 0.0) + value
        return quantile(buckets, q)


Owner = tuple[str, str]
"""Engine and connector; the latter is empty for the metrics of kvobs itself."""


def by_owner(values: Values) -> dict[Owner, Numbers]:
    """Sort series by the labels ``engine`` and ``connector``."""
    owners: dict[Owner, dict[Series, float]] = {}
    for (name, labels), value in values.items():
        has = dict(labels)
        owners.setdefault((has.get("engine", ""), has.get("connector", "")), {})[name, labels] = value
    return {owner: Numbers.of(series.items()) for owner, series in owners.items()}


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return what PromQL's ``histogram_quantile`` does: linear within a bucket, the last finite bound above it.

    Args:
        buckets: upper bound, which may be infinite -> how many observations are not above it.
        q: from 0 to 1.
    """
    bounds = sorted(buckets)
    # No bucket holds less than one below it: a scrape may come in the middle of an update.
    counts = list(accumulate((buckets[bound] for bound in bounds), max))
    if not counts or counts[-1] <= 0 or bounds[-1] != math.inf:
        return None
    at = bisect_left(counts, q * counts[-1])
    if bounds[at] == math.inf:
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    share = (q * counts[-1] - below) / (counts[at] - below) if counts[at] > below else 1
    return low + (bounds[at] - low) * share
