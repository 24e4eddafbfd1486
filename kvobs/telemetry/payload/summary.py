"""Summarize each child for vLLM's periodic log: lookups, loads, losses, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from kvobs.schema import signals
from kvobs.schema.signals import Scope, Signal
from kvobs.telemetry.payload.histogram import bucket_of
from kvobs.telemetry.recording.taken import Taken

_COUNTED: tuple[tuple[str, Signal, Mapping[str, str]], ...] = (
    ("lookups", signals.LOOKUPS, {}),
    ("hits", signals.LOOKUPS, {"outcome": "hit"}),
    ("loads", signals.LOADS, {"outcome": "ok"}),
    ("load_tokens", signals.LOAD_TOKENS, {}),
    ("failed_loads", signals.LOADS, {"outcome": "failed"}),
    ("aborted_loads", signals.LOADS, {"outcome": "aborted"}),
    ("unused_hit_tokens", signals.UNUSED_HIT_TOKENS, {"reason": "other_chosen"}),
    ("promised_saves", signals.SAVES, {}),
    ("slow_calls", signals.SLOW_CALLS, {}),
)
"""Key in the log, and the series that it sums."""

_WAITED: tuple[tuple[str, Signal], ...] = (
    ("load_wait_ms", signals.LOAD_STALL),
    ("save_wait_ms", signals.SAVE_STALL),
)


def summarize(children: Sequence[str], taken: Taken) -> dict[str, dict[str, int | float]]:
    """Return name -> key -> number of every child that was called; zeros are omitted.

    ``children`` holds the names, by position.
    """
    found = {}
    for i, name in enumerate(children):
        errors = sum(row[-1] for row in taken.opened if row[:2] == [signals.CALL_ERRORS.name, i])
        if numbers := _summary(_Numbers(signals.of_child(i, taken.counts)), errors):
            found[name] = numbers
    return found


class _Numbers:
    """One child's numbers in an interval, by signal."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts

    def total(self, signal: Signal, **labels: str) -> int:
        """Sum the series with these labels."""
        return sum(self._counts.get(s.first, 0) for s in _series(signal, labels))

    def quantile_ms(self, signal: Signal, q: float) -> float | None:
        """Return the upper bucket bound, in ms, of the quantile ``q``; None without observations.

        Above the last bound the sum of all observations is the upper bound.
        """
        buckets = [0] * (len(signal.bounds) + 1)
        for series in _series(signal, {}):
            for k in range(len(buckets)):
                buckets[k] += self._counts.get(series.first + k, 0)
        at = bucket_of(list(accumulate(buckets)), q)
        if at is None:
            return None
        return 2 ** signal.bounds[at] / 1e6 if at < len(signal.bounds) else self.sum_ms(signal)

    def sum_ms(self, signal: Signal) -> float:
        """Return the sum of a histogram, in ms."""
        return sum(self._counts.get(s.first + signal.sum_offset, 0) for s in _series(signal, {})) / 1e6


def _series(signal: Signal, labels: Mapping[str, str]) -> list[signals.Series]:
    names = list(signal.labels)
    return [
        s
        for s in signals.SERIES[Scope.CHILD]
        if s.signal is signal and all(s.values[names.index(label)] == value for label, value in labels.items())
    ]


def _summary(numbers: _Numbers, errors: int) -> dict[str, int | float]:
    summary: dict[str, int | float] = {}
    for key, signal, labels in _COUNTED:
        if n := numbers.total(signal, **labels):
            summary[key] = n
        if signal is signals.LOAD_TOKENS and (p99 := numbers.quantile_ms(signals.LOAD_DURATION, 0.99)) is not None:
            summary["load_p99_ms"] = float(f"{p99:.3g}")
    if errors:
        summary["errors"] = errors
    for key, signal in _WAITED:
        if (waited := numbers.sum_ms(signal)) >= 1:
            summary[key] = round(waited)
    return summary
