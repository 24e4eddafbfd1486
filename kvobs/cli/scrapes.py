"""Read kvobs's metrics, and some of vLLM's, from /metrics; compute differences of two scrapes, sums and quantiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvobs.cli.output import printable
from kvobs.cli.web import NoAnswerError, get
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.percentiles import percentile
from kvobs.schema.signals import SIGNALS, Kind, Signal

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]
Values = Mapping[Series, float]
"""The samples of a scrape."""

PLAIN = "text/plain"
PREFIX = "kvobs_"


class EndedError(NoAnswerError):
    """The engine of these metrics has ended; its exporter serves the last ones."""


NO_METRICS = (
    f"no {PREFIX}* metrics at this address: if the exporter runs, it serves them at its own port "
    f"({ExporterOptions.model_fields['port'].default} by default); otherwise check that kvobs is enabled"
)
# Of vLLM's own metrics, which an exporter does not have.
RUNNING, WAITING, TTFT = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_OF_VLLM = {RUNNING, WAITING, f"{TTFT}_bucket", PROMPT_TOKENS}
_CALL_BUCKETS = f"{signals.CALL_DURATION.name}_bucket"
"""Two thirds of kvobs's lines, which are not shown."""


@dataclass(frozen=True)
class Scrape:
    """A server's metrics and their time."""

    at_s: float
    """By the clock ``time.monotonic``."""
    values: Values
    """kvobs's metrics."""
    vllm: Values = field(default_factory=dict)


def fetch(url: str, of_vllm: str | None = None, *, ended: bool = False) -> Scrape:
    """Read kvobs's metrics once, and vLLM's own, there or at ``of_vllm``; ``NoAnswerError`` if kvobs's are missing.

    With ``ended``, the last metrics of engines that have ended are also read.
    """
    text = get(url, PLAIN).text
    values, vllm = all_of(text) if ended else values_of(text), parse_vllm(text)
    if of_vllm is not None:
        engines = {dict(labels).get("engine") for _, labels in values}
        with suppress(NoAnswerError):
            vllm = {
                (name, labels): value
                for (name, labels), value in parse_vllm(get(of_vllm, PLAIN).text).items()
                if dict(labels).get("engine") in engines
            }
    return Scrape(time.monotonic(), values, vllm)


def all_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any."""
    try:
        values = parse(text)
    except ValueError as error:
        raise NoAnswerError(f"its metrics can't be read: {printable(str(error))[:200]}") from None
    if not values:
        raise NoAnswerError(NO_METRICS)
    return values


def values_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any, or with the last ones of its engines."""
    values = all_of(text)
    if end := end_of(values):
        raise EndedError(end)
    return values


def end_of(values: Values) -> str:
    """Return that the engine of these metrics has ended, and in what; empty while it runs."""
    up = [value for (name, _), value in values.items() if name == signals.ENGINE_UP.name]
    has_ended = any(name == signals.ENGINE_ENDED.name and value == 1 for (name, _), value in values.items())
    # vLLM's server ends with one of its engines.
    return f"its engine has ended{_end(values)}" if has_ended or (up and not any(up)) else ""


def _end(values: Values) -> str:
    """Return in which connector's call an engine ended, and of what."""
    end = next((dict(labels) for name, labels in values if name == signals.ENGINE_ENDED.name), {})
    where = f" in {end.get('hook')} of connector {end['connector']}" if end.get("connector") else ""
    return f"{where}: {end.get('reason')}" if end else ""


def parse(text: str) -> dict[Series, float]:
    """Return the finite values of kvobs's metrics in the text of /metrics; ValueError for a malformed line."""
    return _parse(text, lambda name: name.startswith(PREFIX) and name != _CALL_BUCKETS)


def parse_vllm(text: str) -> dict[Series, float]:
    """Return what is read of vLLM's own metrics; empty for text that is malformed."""
    try:
        return _parse(text, _OF_VLLM.__contains__)
    except ValueError:
        return {}


def _parse(text: str, is_read: Callable[[str], bool]) -> dict[Series, float]:
    lines = (line for line in text.splitlines() if is_read(line.partition("{")[0].partition(" ")[0]))
    return {
        (sample.name, frozenset((label, printable(value)) for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
        for sample in family.samples
        if math.isfinite(sample.value) and not math.isnan(float(sample.labels.get("le", 0)))
    }


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
