"""kvobs's own part of the stats payload as an object of vLLM's: how payloads merge, and their summary in vLLM's log."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.probe.increments import Increments, add_rows
from kvobs.schema import signals
from kvobs.schema.percentiles import percentile
from kvobs.schema.signals import TABLE_DIGEST, Scope, Signal
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import ROWS, SLOTS, VERSION
from kvobs.vllm_api import versions

FEW = 1_000  # numbers, of three parts or four
LONG = 50_000  # numbers; vLLM's log adds up all payloads of its interval, however long that is

as_dict = versions.stats_reader()


class KvobsStats(KVConnectorStats):
    """kvobs's own numbers; ``wire`` describes ``data``."""

    data: dict[str, Any]

    @classmethod
    def of(cls, children: Mapping[str, str], increments: Increments) -> KvobsStats:
        return cls(data={**wire.message(increments), "children": dict(children)})

    @classmethod
    def bare(cls, children: Mapping[str, str]) -> KvobsStats:
        """Return a payload without numbers: it names the classes of the children's own stats."""
        return cls(data={"v": VERSION, "table": TABLE_DIGEST, "children": children, **wire.empty()})

    @classmethod
    def read(cls, data: Any) -> KvobsStats:
        """Parse a peer's payload for merging. Malformed numbers are refused; other versions are kept unparsed.

        Spans are omitted: only the receiver of the payload itself needs them.
        """
        stats = cls(data=as_dict(data))
        if stats.is_bare:  # most are, and need no copy
            stats.data = {**stats.data, "children": stats.children, **wire.empty()}
        elif stats.is_ours:
            increments = Increments.none()
            try:
                increments = stats.increments()._replace(spans=())
            except Exception:
                faults.contain("rebuild")
            stats.data = {**stats.data, "children": stats.children, **wire.message(increments)}
        return stats

    def __deepcopy__(self, memo: dict[int, Any]) -> KvobsStats:
        """Copy the parts that are changed in place; records and rows never are."""
        return KvobsStats(data={key: copy.copy(value) for key, value in self.data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the payload; the counts of many merged parts are summed, those of few parts later in the API server.

        This runs in EngineCore before a step's outputs go out.
        """
        if self.is_ours and len(self.data["counts"]) > FEW:
            self.data["counts"] = _added_up(self.data["counts"])
        return self.data

    @property
    def children(self) -> dict[str, str]:
        """Return name -> "module:Class", in the order of the configuration."""
        children = self.data.get("children")
        if not isinstance(children, dict):
            return {}
        return {name: path for name, path in children.items() if isinstance(path, str)}

    @property
    def is_ours(self) -> bool:
        """Whether this process can read the numbers."""
        return wire.is_ours(self.data)

    @property
    def is_bare(self) -> bool:
        """Whether this process can read it, and it has no numbers."""
        return self.is_ours and self.is_empty()

    def increments(self) -> Increments:
        """Return the numbers; none if another version of kvobs wrote them; ValueError if some are malformed."""
        return wire.read(self.data)

    def reset(self) -> None:
        self.data.update(wire.empty())

    def is_empty(self) -> bool:
        return not any(map(self.data.get, Increments._fields))

    def aggregate(self, other: KVConnectorStats) -> KvobsStats:
        """Add the numbers of ``other``; those of another version of kvobs are dropped."""
        theirs = other if isinstance(other, KvobsStats) else KvobsStats.read(other)
        if not self.data:
            self.data = copy.deepcopy(theirs).data
        elif theirs.is_ours and self.is_ours:
            self.data["counts"] += theirs.data["counts"]
            if len(self.data["counts"]) > LONG:
                self.data["counts"] = _added_up(self.data["counts"])
            self.data["gauges"].update(theirs.data["gauges"])
            self.data["spans"] += theirs.data["spans"]
            if theirs.data["opened"]:
                self.data["opened"] = add_rows(self.data["opened"], theirs.data["opened"])[:ROWS]
        return self

    def spend(self, slot: int, ns: int) -> bool:
        """Add the time spent on this payload to a slot of the process, if it has numbers; return whether it has."""
        if has_numbers := self.is_ours and not self.is_empty():
            self.data["counts"] += (slot, ns, -slot, 0)
        return has_numbers

    def reduce(self) -> dict[str, dict[str, int | float]]:
        """Return name -> key -> number of every connector that was called; zeros are omitted."""
        return summarize(list(self.children), self.increments())


def _added_up(pairs: list[int]) -> list[int]:
    """Return the same counts with each slot once."""
    flat = np.fromiter(pairs, np.int64, len(pairs))
    slots = flat[::2].cumsum()
    if slots.max(initial=0) < SLOTS:
        totals = np.bincount(slots, weights=flat[1::2])
        if totals.max(initial=0) < 2**53:  # exact as a float, and three times as fast
            slots = totals.nonzero()[0]
            once = np.zeros(2 * len(slots) + 2, np.int64)
            once[:-2:2] = slots
            once[2::2] -= slots  # the last pair leads back to slot 0
            once[1:-2:2] = totals[slots]
            added_up: list[int] = once.tolist()
            return added_up
    return wire.packed(wire.unpacked(pairs))


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


def summarize(children: Sequence[str], increments: Increments) -> dict[str, dict[str, int | float]]:
    """Return name -> key -> number of every child that was called; ``children`` holds the names, by position."""
    summaries = {}
    for i, name in enumerate(children):
        errors = sum(row[-1] for row in increments.opened if row[:2] == [signals.CALL_ERRORS.name, i])
        if summary := _summary(signals.of_child(i, increments.counts), errors):
            summaries[name] = summary
    return summaries


def _summary(counts: Mapping[int, int], errors: int) -> dict[str, int | float]:
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


def _total(counts: Mapping[int, int], signal: Signal, value: str = "", offset: int = 0) -> int:
    """Sum the slots at this offset of a signal's series with this label value, or of all."""
    series = (s for s in signals.SERIES[Scope.CHILD] if s.signal is signal and (not value or value in s.values))
    return sum(counts.get(s.first + offset, 0) for s in series)


def _gain(counts: Mapping[int, int]) -> dict[str, float]:
    """Return how many loads have an estimate, also if none has, and the time that these saved less the waits."""
    estimated = _total(counts, signals.ESTIMATED_LOADS)
    gain_ns = _total(counts, signals.PREFILL_SAVED) - _total(counts, signals.LOAD_WAITED)
    return {"estimated_loads": estimated, **({"gain_ms": round(gain_ns / 1e6)} if estimated else {})}


def _loads_ms(counts: Mapping[int, int]) -> dict[str, float]:
    """Return the mean and the p99 of the durations of loads, as kvobs's other tools show them; empty without any."""
    signal = signals.LOAD_DURATION
    below = list(accumulate(_total(counts, signal, offset=k) for k in range(signal.sum_offset)))
    p99 = percentile(signal, dict(zip((*signal.buckets, math.inf), below, strict=True)), 0.99)
    if p99 is None:
        return {}
    mean_ns = _total(counts, signal, offset=signal.sum_offset) / below[-1]
    return {"load_mean_ms": float(f"{mean_ns / 1e6:.3g}"), "load_p99_ms": float(f"{1e3 * p99:.3g}")}
