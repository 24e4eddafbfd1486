"""Log what each connector of an engine did since the last line, as vLLM logs its own stats."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from time import monotonic

from kvobs.export.engine import Engine
from kvobs.log import log
from kvobs.page.rows import Key
from kvobs.schema import signals
from kvobs.schema.percentiles import percentile
from kvobs.schema.signals import CONNECTOR_WIDTH, Scope, Signal, word

DEFAULT_S = 10.0
_INTERVAL = "VLLM_LOG_STATS_INTERVAL"

_COUNTED: tuple[tuple[str, Signal, str], ...] = (
    ("lookups", signals.LOOKUPS, ""),
    ("hits", signals.LOOKUPS, "hit"),
    ("loads", signals.LOADS, "ok"),
    ("load_tokens", signals.LOAD_TOKENS, ""),
    ("failed_loads", signals.LOADS, "failed"),
    ("aborted_loads", signals.LOADS, "aborted"),
    ("lost_to_shorter_offer", signals.UNUSED_HIT_TOKENS, "other_chosen"),
    ("promised_saves", signals.SAVES, ""),
    ("slow_calls", signals.SLOW_CALLS, ""),
)
"""Key in the log, and the series that it sums: those with this label value, or all."""

_WAITED = (("load_wait_ms", signals.LOAD_STALL), ("save_wait_ms", signals.SAVE_STALL))


class Summary:
    """Logs one line for each interval of vLLM's stat logging in which a connector was used."""

    def __init__(self) -> None:
        self._next_s = monotonic() + interval_s()
        self._counts: list[int] = []
        self._rows: dict[Key, int] = {}

    def log(self, engine: Engine, index: int) -> None:
        """Log the numbers since the last time, if the interval is over and there are any."""
        if monotonic() < self._next_s or engine.info is None:
            return
        self._next_s = monotonic() + interval_s()
        counts, rows = engine.counts(), engine.rows()
        grown = [n - before for n, before in zip(counts, self._counts or [0] * len(counts), strict=True)]
        more = {key: n - self._rows.get(key, 0) for key, n in rows.items()}
        self._counts, self._rows = counts, rows
        for name, numbers in summarize(engine.info.names, grown, more).items():
            text = ", ".join(f"{key}={n}" for key, n in numbers.items())
            log.info("engine %03d, connector %s: %s", index, name, text)


def interval_s() -> float:
    """Return the time between two lines: vLLM's variable."""
    with suppress(ValueError):
        return float(os.environ[_INTERVAL]) if _INTERVAL in os.environ else DEFAULT_S
    return DEFAULT_S


def summarize(
    connectors: Sequence[str], counts: Sequence[int], rows: Mapping[Key, int]
) -> dict[str, dict[str, int | float]]:
    """Return name -> key -> number of every connector that was used; ``counts`` are by slot."""
    summaries = {}
    for i, name in enumerate(connectors):
        errors = sum(n for (signal, index, _), n in rows.items() if signal is signals.CALL_ERRORS and index == i)
        if summary := _summary(counts[word(i, 0) : word(i, CONNECTOR_WIDTH)], errors):
            summaries[name] = summary
    return summaries


def _summary(counts: Sequence[int], errors: int) -> dict[str, int | float]:
    summary: dict[str, int | float] = {}
    for key, signal, value in _COUNTED:
        if n := _total(counts, signal, value):
            summary[key] = n
        if signal is signals.LOAD_TOKENS:
            summary |= _loads_ms(counts)
    if summary.get("loads"):
        summary |= _gain(counts)
    if errors:
        summary["errors"] = errors
    for key, signal in _WAITED:
        if (waited_ns := _total(counts, signal, offset=signal.sum_offset)) >= 1e6:  # noqa: PLR2004 - a millisecond
            summary[key] = round(waited_ns / 1e6)
    return summary


def _total(counts: Sequence[int], signal: Signal, value: str = "", offset: int = 0) -> int:
    """Sum the slots at this offset of a signal's series with this label value, or of all."""
    series = (s for s in signals.SERIES[Scope.CONNECTOR] if s.signal is signal and (not value or value in s.values))
    return sum(counts[s.first + offset] for s in series)


def _gain(counts: Sequence[int]) -> dict[str, float]:
    """Return how many loads have an estimate, even if it is 0, and the time that these saved less the waits."""
    estimated = _total(counts, signals.ESTIMATED_LOADS)
    gain_ns = _total(counts, signals.PREFILL_SAVED) - _total(counts, signals.LOAD_WAITED)
    return {"estimated_loads": estimated, **({"gain_ms": round(gain_ns / 1e6)} if estimated else {})}


def _loads_ms(counts: Sequence[int]) -> dict[str, float]:
    """Return the mean and the p99 of the durations of loads, as kvobs's other tools show them; empty without any."""
    signal = signals.LOAD_DURATION
    below = list(accumulate(_total(counts, signal, offset=k) for k in range(signal.sum_offset)))
    p99 = percentile(signal, dict(zip((*signal.buckets, math.inf), below, strict=True)), 0.99)
    if p99 is None:
        return {}
    mean_ns = _total(counts, signal, offset=signal.sum_offset) / below[-1]
    return {"load_mean_ms": float(f"{mean_ns / 1e6:.3g}"), "load_p99_ms": float(f"{1e3 * p99:.3g}")}
