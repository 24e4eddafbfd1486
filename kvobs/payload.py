"""kvobs's own part of the stats payload: its form on the wire, and how two of them merge.

::

    {"v": 3, "table": digest of the slot table,
     "children": {name: "module:Class"},               # in the order of the configuration
     "counts": [gap, n, gap, n, ...],                  # how much was added, by the gaps between slots
     "opened": [[signal, child, label values..., n]],  # the same, for label values that no table has
     "gauges": {slot: value},                          # the last one counts
     "spans": [[record, ...], ...]}                    # see spans.Record; a group is exported whole, or not at all

The gaps of a whole list add up to 0, so that two lists merge by being put one after the other; ``to_dict`` adds them
up, once for all ranks, where there are many. Only plain builtins, safe for pickle and msgpack.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.recorder import Taken
from kvobs.signals import CHILD_WIDTH, PROCESS_WIDTH, TABLE_DIGEST

VERSION = 3
FEW = 1_000  # numbers, of three parts or four
LONG = 50_000  # numbers; vLLM's log adds up all payloads of its interval, however long that is
# What a peer can mean; anything beyond is malformed, and must not decide how much memory is taken.
SLOTS = PROCESS_WIDTH + 1_000 * CHILD_WIDTH
ROWS = 4_096
LABEL = 128  # characters
MOST = 2**53  # of anything: what a float holds exactly, and well below the largest number in msgpack


def nothing() -> Taken:
    """Return numbers to which something can be added."""
    return Taken({}, [], {})


class KvobsStats(KVConnectorStats):
    """kvobs's own numbers; ``data`` is as this module's docstring says."""

    data: dict[str, Any]

    @classmethod
    def of(cls, children: Mapping[str, str], taken: Taken) -> KvobsStats:
        return cls(data={"v": VERSION, "table": TABLE_DIGEST, "children": dict(children), **_wire(taken)})

    @classmethod
    def bare(cls, children: Mapping[str, str]) -> KvobsStats:
        """Return a payload without numbers: it says whose the children's own stats are."""
        return cls(data={"v": VERSION, "table": TABLE_DIGEST, "children": children, **_empty()})

    @classmethod
    def read(cls, data: Any) -> KvobsStats:
        """Read what a peer sent, for adding up: of this version only what is well formed, of another all of it.

        Spans are left out: they are for who gets the payload itself.
        """
        stats = cls(data=as_dict(data))
        if stats.is_bare:  # most are, and need no more
            stats.data = {**stats.data, "children": stats.children, **_empty()}
        elif stats.is_ours:
            taken = stats.taken()._replace(spans=())
            stats.data = {**stats.data, "children": stats.children, **_wire(taken)}
        return stats

    def __deepcopy__(self, memo: dict[int, Any]) -> KvobsStats:
        """Copy what is ever changed in place: records and rows are not."""
        return KvobsStats(data={key: copy.copy(value) for key, value in self.data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the payload, with the counts of many merged parts added up: of a few the API server's reader does it.

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
        """Whether this process understands the numbers."""
        return self.data.get("v") == VERSION and self.data.get("table") == TABLE_DIGEST

    @property
    def is_bare(self) -> bool:
        """Whether this process understands it, and there are no numbers in it."""
        return self.is_ours and self.is_empty()

    def taken(self) -> Taken:
        """Return the numbers that are well formed; none when another version of kvobs wrote them."""
        if not self.is_ours:
            return nothing()
        opened, gauges = self.data.get("opened"), self.data.get("gauges")
        rows = [row for row in opened if _is_row(row)][:ROWS] if isinstance(opened, list) else []
        return Taken(_unpacked(self.data.get("counts")), rows, _slots(gauges), self.spans())

    def spans(self) -> list[Any]:
        """Return the groups of span records; none when another version of kvobs wrote them."""
        groups = self.data.get("spans") if self.is_ours else None
        return [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []

    def reset(self) -> None:
        self.data.update(_empty())

    def is_empty(self) -> bool:
        return not any(map(self.data.get, Taken._fields))

    def aggregate(self, other: KVConnectorStats) -> KvobsStats:
        """Add the numbers of ``other``; those of another version of kvobs can't be, and are left out."""
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
                self.data["opened"] = _add_rows(self.data["opened"], theirs.data["opened"])[:ROWS]
        return self

    def spend(self, slot: int, ns: int) -> None:
        """Add what handling this payload took to a slot of the process's own."""
        if self.is_ours:
            self.data["counts"] += (slot, ns, -slot, 0)


def _empty() -> dict[str, Any]:
    return {"counts": [], "opened": [], "gauges": {}, "spans": []}


def _wire(taken: Taken) -> dict[str, Any]:
    packed = _packed(taken.counts)
    return {"counts": packed, "opened": taken.opened, "gauges": taken.gauges, "spans": list(taken.spans)}


def _packed(counts: Mapping[int, int]) -> list[int]:
    if max(counts.values(), default=0) > MOST:  # what msgpack does not take would end the engine
        counts = {slot: min(n, MOST) for slot, n in counts.items()}
    packed: list[int] = []
    last = 0
    for slot in sorted(counts):
        packed += (slot - last, counts[slot])
        last = slot
    return [*packed, -last, 0] if last else packed


def _added_up(packed: list[int]) -> list[int]:
    """Return the same counts with each slot once."""
    if not packed:
        return packed
    flat = np.fromiter(packed, np.int64, len(packed))
    slots = flat[::2].cumsum()
    if slots.max() >= SLOTS:
        raise ValueError(f"a payload counts in slot {slots.max()}: allowed are slots below {SLOTS}")
    totals = np.bincount(slots, weights=flat[1::2]).clip(max=MOST)
    slots = totals.nonzero()[0]
    once = np.zeros(2 * len(slots) + 2, np.int64)
    once[:-2:2] = slots
    once[2::2] -= slots  # the last pair leads back to slot 0
    once[1:-2:2] = totals[slots]
    added_up: list[int] = once.tolist()
    return added_up


def _unpacked(packed: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    if not isinstance(packed, list) or not all(type(number) is int for number in packed):
        return counts
    for slot, n in zip(accumulate(packed[::2]), packed[1::2], strict=False):
        if 0 < n <= MOST and 0 <= slot < SLOTS:
            counts[slot] = counts.get(slot, 0) + n
    return counts


def _slots(numbers: Any) -> dict[int, int]:
    if not isinstance(numbers, dict):
        return {}
    return {
        slot: n
        for slot, n in numbers.items()
        if type(slot) is int and type(n) is int and 0 <= slot < SLOTS and 0 <= n < 2**63
    }


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) < len(("signal", "child", "n")):
        return False
    signal, child, *values, n = row
    return (
        type(child) is int
        and type(n) is int
        and child >= 0 <= n <= MOST
        and all(isinstance(v, str) and len(v) <= LABEL for v in (signal, *values))
    )


def _add_rows(mine: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
    added: dict[tuple[Any, ...], int] = {}
    for *key, n in (*mine, *theirs):
        added[tuple(key)] = added.get(tuple(key), 0) + n
    return [[*key, n] for key, n in added.items()]


def as_dict(stats: Any) -> dict[str, Any]:
    """Return a stats object's or payload's plain dict, whichever vLLM version wrote it.

    Up to 0.29 vLLM sent the dataclass itself, ``{"data": {...}}``; newer ones send ``to_dict()``.
    """
    if isinstance(stats, KVConnectorStats):
        to_dict = getattr(stats, "to_dict", None)
        stats = to_dict() if to_dict is not None else stats.data
    if isinstance(stats, dict | Mapping):  # to ask a Mapping takes far longer
        if len(stats) == 1 and isinstance(stats.get("data"), Mapping):
            stats = stats["data"]
        return dict(stats)
    return {"value": stats}
