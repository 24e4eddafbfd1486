"""Text of /metrics -> numbers; what happened between two scrapes; quantiles of a histogram's buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvobs import signals
from kvobs.signals import Kind, Signal

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]

PREFIX = "kvobs_"
# Of all that kvobs exposes: calls by hook alone are two thirds of it, and take as much time to read.
READ = (
    *(signals.LOOKUPS, signals.LOADS, signals.LOAD_DURATION, signals.LOAD_TOKENS, signals.LOAD_STALL),
    *(signals.SAVE_STALL, signals.IN_FLIGHT, signals.OLDEST_IN_FLIGHT, signals.RANK_SKEW, signals.SLOWEST_RANK),
    *(signals.CALL_ERRORS, signals.QUARANTINED, signals.CONNECTOR_INFO, signals.BUILD_INFO),
    *(signals.SELF_SECONDS, signals.INTERNAL_ERRORS),
)
_GAUGES = {signal.name for signal in READ if signal.kind is Kind.GAUGE}
_HISTOGRAMS = [signal.name for signal in READ if signal.kind is Kind.HISTOGRAM]
# Whole numbers, which only ever grow while the server lives; sums of seconds may lose a last digit on the way.
_EXACT = {f"{name}{part}" for name in _HISTOGRAMS for part in ("_bucket", "_count")} | {
    signal.name for signal in READ if signal.kind is Kind.COUNTER and signal.unit == 1
}
_NAMES = {signal.name for signal in READ} | _EXACT | {f"{name}_sum" for name in _HISTOGRAMS}


@dataclass(frozen=True)
class Scrape:
    """What a server said, and when."""

    at_s: float
    """By the clock ``time.monotonic``."""
    unix_s: float
    values: Mapping[Series, float]


def parse(text: str) -> dict[Series, float]:
    """Return what is ``READ`` in the text of /metrics, without what is no number; ValueError for a malformed line.

    The start of the oldest transfer is no number while none is open.
    """
    lines = (line for line in text.splitlines() if line.startswith(PREFIX))
    ours = "".join(f"{line}\n" for line in lines if line.partition("{")[0].partition(" ")[0] in _NAMES)
    return {
        (sample.name, frozenset((label, printable(value)) for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(ours)
        for sample in family.samples
        if math.isfinite(sample.value) and not math.isnan(float(sample.labels.get("le", 0)))
    }


def printable(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are question marks."""
    return "".join(char if char.isprintable() else "?" for char in text)


def has_restarted(before: Mapping[Series, float], after: Mapping[Series, float]) -> bool:
    """Return whether a server began to count anew: something counted became less, or is gone."""
    return any(after.get(series, -1) < value for series, value in before.items() if series[0] in _EXACT)


def change(before: Scrape | None, after: Scrape) -> dict[Series, float]:
    """Return by how much each counter grew, never below 0, and the gauges as they are.

    From the server's start if there is no scrape before, or the server has restarted since.
    """
    old = before.values if before and not has_restarted(before.values, after.values) else {}
    return {
        series: value if series[0] in _GAUGES else max(0.0, value - old.get(series, 0.0))
        for series, value in after.values.items()
    }


@dataclass(frozen=True)
class Numbers:
    """The series of one child, or of kvobs itself, on one engine."""

    by_name: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def total(self, signal: Signal, part: str = "", **labels: str) -> float:
        """Add up the series that carry these labels; ``part`` is one of a histogram: "_sum", "_count"."""
        return sum(value for has, value in self.by_name.get(signal.name + part, ()) if labels.items() <= has.items())

    def by_label(self, signal: Signal, label: str) -> dict[str, float]:
        """Add up the series by the value of one of their labels."""
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

    def quantile(self, signal: Signal, q: float) -> float | None:
        """Return a histogram's quantile over all its series; None without observations."""
        buckets: dict[float, float] = {}
        for has, value in self.by_name.get(f"{signal.name}_bucket", ()):
            bound = float(has.get("le", "inf"))
            buckets[bound] = buckets.get(bound, 0.0) + value
        return quantile(buckets, q)


Owner = tuple[str, str]
"""Engine and child; no child for what kvobs says of itself."""


def by_owner(values: Mapping[Series, float]) -> dict[Owner, Numbers]:
    """Sort series by the labels ``engine`` and ``connector``."""
    owners: dict[Owner, Numbers] = {}
    for (name, labels), value in values.items():
        has = dict(labels)
        owner = owners.setdefault((has.get("engine", ""), has.get("connector", "")), Numbers())
        owner.by_name.setdefault(name, []).append((has, value))
    return owners


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return what PromQL's ``histogram_quantile`` does: linear within a bucket, the last finite bound above it.

    Args:
        buckets: upper bound, which may be infinite -> how many observations are not above it.
        q: from 0 to 1.
    """
    bounds = sorted(buckets)
    counts = list(_rising(buckets[bound] for bound in bounds))
    if not counts or counts[-1] <= 0 or bounds[-1] != math.inf:
        return None
    rank = q * counts[-1]
    at = next(i for i, count in enumerate(counts) if count >= rank)
    if bounds[at] == math.inf:
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / (counts[at] - below) if counts[at] > below else bounds[at]


def _rising(counts: Iterable[float]) -> Iterable[float]:
    """Never let a bucket hold less than one below it: a scrape may come in the middle of an update."""
    most = 0.0
    for count in counts:
        most = max(most, count)
        yield most
