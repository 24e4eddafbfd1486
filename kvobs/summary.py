"""One short line for each child, for vLLM's periodic log: what was asked, loaded, lost, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvobs import signals
from kvobs.recorder import Taken
from kvobs.signals import CHILD_WIDTH, PROCESS_WIDTH, Scope, Signal


def summarize(children: Sequence[str], taken: Taken) -> dict[str, str]:
    """Return name -> line of every child that was asked for something; ``children`` holds the names, by position."""
    lines = {}
    for i, name in enumerate(children):
        first = PROCESS_WIDTH + i * CHILD_WIDTH
        counts = {slot - first: n for slot, n in taken.counts.items() if first <= slot < first + CHILD_WIDTH}
        errors = sum(row[-1] for row in taken.opened if row[:2] == [signals.CALL_ERRORS.name, i])
        line = _line(_Numbers(counts), errors)
        if line:
            lines[name] = line
    return lines


class _Numbers:
    """One child's numbers of an interval, by signal."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts

    def total(self, signal: Signal, **labels: str) -> int:
        """Add up the series that carry these labels."""
        return sum(self._counts.get(s.first, 0) for s in _series(signal, labels))

    def quantile_ms(self, signal: Signal, q: float) -> float | None:
        """Return the bound, in ms, below which the share ``q`` of the observations lies; None without any."""
        buckets = [0] * (len(signal.bounds) + 1)
        for series in _series(signal, {}):
            for k in range(len(buckets)):
                buckets[k] += self._counts.get(series.first + k, 0)
        wanted, seen = q * sum(buckets), 0
        for k, n in enumerate(buckets):
            seen += n
            if n and seen >= wanted:
                return 2 ** signal.bounds[k] / 1e6 if k < len(signal.bounds) else float("inf")
        return None

    def sum_ms(self, signal: Signal) -> float:
        """Return the sum of a histogram, in ms."""
        return sum(self._counts.get(s.first + s.width - 1, 0) for s in _series(signal, {})) / 1e6


def _series(signal: Signal, labels: Mapping[str, str]) -> list[signals.Series]:
    names = list(signal.labels)
    return [
        s
        for s in signals.SERIES[Scope.CHILD]
        if s.signal is signal and all(s.values[names.index(label)] == value for label, value in labels.items())
    ]


def _line(numbers: _Numbers, errors: int) -> str:
    lookups, loads = numbers.total(signals.LOOKUPS), numbers.total(signals.LOADS, outcome="ok")
    parts = []
    if lookups:
        parts.append(f"{lookups} lookups, {numbers.total(signals.LOOKUPS, outcome='hit')} hits")
    if loads:
        tokens, p99 = numbers.total(signals.LOAD_TOKENS), numbers.quantile_ms(signals.LOAD_DURATION, 0.99)
        parts.append(f"{loads} loads of {tokens} tokens" + (f" (p99 <= {p99:.3g} ms)" if p99 is not None else ""))
    for signal, labels, what in (
        (signals.LOADS, {"outcome": "failed"}, "failed loads"),
        (signals.LOADS, {"outcome": "aborted"}, "aborted loads"),
        (signals.FORGONE_TOKENS, {}, "forgone tokens"),
        (signals.SAVES, {}, "promised saves"),
        (signals.SLOW_CALLS, {}, "slow calls"),
    ):
        n = numbers.total(signal, **labels)
        if n:
            parts.append(f"{n} {what}")
    if errors:
        parts.append(f"{errors} errors")
    for signal, what in ((signals.LOAD_STALL, "loads"), (signals.SAVE_STALL, "saves")):
        waited = numbers.sum_ms(signal)
        if waited >= 1:
            parts.append(f"waited {waited:.0f} ms for {what}")
    return ", ".join(parts)
