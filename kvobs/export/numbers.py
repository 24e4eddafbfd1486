"""Hold the numbers of a scrape; compute differences of two scrapes, sums and quantiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvobs.schema.percentiles import percentile
from kvobs.schema.signals import SIGNALS, Kind, Signal

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]
Values = Mapping[Series, float]
"""The samples of a scrape."""

PREFIX = "kvobs_"
# Of vLLM's own metrics, which an exporter does not have.
RUNNING, WAITING, TTFT = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True)
class Scrape:
    """A server's metrics and their time."""

    at_s: float
    """By the clock ``time.monotonic``."""
    values: Values
    """kvobs's metrics."""
    vllm: Values = field(default_factory=dict)


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
    """A selection of series, such as the series of one connector on one engine."""

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

    def buckets(self, name: str) -> dict[float, float]:
        """Return the buckets of the histogram of this name, summed over all its series."""
        buckets: dict[float, float] = {}
        for has, value in self.by_name.get(f"{name}_bucket", ()):
            bound = float(has.get("le", "inf"))
            buckets[bound] = buckets.get(bound, 0.0) + value
        return buckets

    def percentile(self, signal: Signal, q: float) -> float | None:
        """Return the quantile of a histogram over all its series; None without observations."""
        return percentile(signal, self.buckets(signal.name), q)

    def mean(self, signal: Signal) -> float | None:
        """Return the mean of a histogram over all its series; None without observations."""
        count = self.total(signal, "_count")
        return self.total(signal, "_sum") / count if count else None


Owner = tuple[str, str]
"""Engine and connector; the latter is empty for the metrics of kvobs itself."""


def by_owner(values: Values) -> dict[Owner, Numbers]:
    """Sort series by the labels ``engine`` and ``connector``."""
    owners: dict[Owner, dict[Series, float]] = {}
    for (name, labels), value in values.items():
        has = dict(labels)
        owners.setdefault((has.get("engine", ""), has.get("connector", "")), {})[name, labels] = value
    return {owner: Numbers.of(series.items()) for owner, series in owners.items()}
