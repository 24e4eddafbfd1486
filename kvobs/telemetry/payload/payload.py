"""kvobs's own part of the stats payload as an object of vLLM's: how payloads merge. ``wire`` describes its form."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.schema.signals import TABLE_DIGEST
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import BASE, ROWS, SLOTS, VERSION
from kvobs.telemetry.recording.taken import Taken, add_rows, nothing
from kvobs.vllm_api import versions

FEW = 1_000  # numbers, of three parts or four
LONG = 50_000  # numbers; vLLM's log adds up all payloads of its interval, however long that is

as_dict = versions.stats_reader()


class KvobsStats(KVConnectorStats):
    """kvobs's own numbers; ``wire`` describes ``data``."""

    data: dict[str, Any]

    @classmethod
    def of(cls, children: Mapping[str, str], taken: Taken) -> KvobsStats:
        return cls(data={**wire.message(taken), "children": dict(children)})

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
            taken = nothing()
            try:
                taken = stats.taken()._replace(spans=())
            except Exception:
                faults.contain("rebuild")
            stats.data = {**stats.data, "children": stats.children, **wire.message(taken)}
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

    def taken(self) -> Taken:
        """Return the numbers; none if another version of kvobs wrote them; ValueError if some are malformed."""
        return wire.read(self.data)

    def spans(self) -> list[Any]:
        """Return the groups of span records; none if another version of kvobs wrote them."""
        return wire.spans(self.data)

    def reset(self) -> None:
        self.data.update(wire.empty())

    def is_empty(self) -> bool:
        return not any(map(self.data.get, Taken._fields))

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

    def spend(self, slot: int, ns: int) -> None:
        """Add the time spent on this payload to a slot of the process."""
        if self.is_ours:
            self.data["counts"] += (slot, ns, -slot, 0)


def _added_up(pairs: list[int]) -> list[int]:
    """Return the same counts with each slot once."""
    flat = np.fromiter(pairs, np.int64, len(pairs))
    slots = flat[::2].cumsum()
    if slots.max(initial=0) < SLOTS:
        totals = np.bincount(slots, weights=flat[1::2])
        if totals.max(initial=0) < BASE:  # exact, and three times as fast
            slots = totals.nonzero()[0]
            once = np.zeros(2 * len(slots) + 2, np.int64)
            once[:-2:2] = slots
            once[2::2] -= slots  # the last pair leads back to slot 0
            once[1:-2:2] = totals[slots]
            added_up: list[int] = once.tolist()
            return added_up
    return wire.packed(wire.unpacked(pairs))
