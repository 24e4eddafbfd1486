"""kvobs's own part of the stats payload: its form on the wire, and how two of them merge.

::

    {"v": 2, "table": digest of the slot table,
     "children": {name: "module:Class"},               # in the order of the configuration
     "counts": {slot: how much was added},             # add up
     "opened": [[signal, child, label values..., n]],  # the same, for label values that no table has
     "gauges": {slot: value}}                          # the last one counts

Only plain builtins, safe for pickle and msgpack. Merging takes time linear in the payload.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.recorder import Taken
from kvobs.signals import TABLE_DIGEST

VERSION = 2
NOTHING = Taken({}, [], {})


class KvobsStats(KVConnectorStats):
    """kvobs's own numbers; ``data`` is as this module's docstring says."""

    data: dict[str, Any]

    @classmethod
    def of(cls, children: Mapping[str, str], taken: Taken) -> KvobsStats:
        return cls(data={"v": VERSION, "table": TABLE_DIGEST, "children": dict(children), **taken._asdict()})

    @classmethod
    def read(cls, data: Any) -> KvobsStats:
        """Read what a peer sent: of this version only what is well formed, of another all of it, never to be used."""
        stats = cls(data=as_dict(data))
        if stats.is_ours:
            stats.data = {**stats.data, "children": stats.children, **stats.taken()._asdict()}
        return stats

    def __getstate__(self) -> dict[str, Any]:
        """Pack the counts for the way from worker to scheduler: gaps between slots need a byte where slots need two."""
        if not self.is_ours:
            return self.data
        packed: list[int] = []
        last = 0
        for slot in sorted(self.data["counts"]):
            packed += (slot - last, self.data["counts"][slot])
            last = slot
        return {**self.data, "counts": packed}

    def __setstate__(self, data: dict[str, Any]) -> None:
        self.data = data
        if self.is_ours:
            packed = data["counts"]
            data["counts"] = dict(zip(accumulate(packed[::2]), packed[1::2], strict=True))

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

    def taken(self) -> Taken:
        """Return the numbers that are well formed; none when another version of kvobs wrote them."""
        if not self.is_ours:
            return NOTHING
        counts, gauges, opened = (self.data.get(key) for key in ("counts", "gauges", "opened"))
        rows = opened if isinstance(opened, list) else []
        return Taken(_slots(counts), [row for row in rows if _is_row(row)], _slots(gauges))

    def reset(self) -> None:
        self.data.update({"counts": {}, "opened": [], "gauges": {}})

    def is_empty(self) -> bool:
        return not any(self.data.get(key) for key in Taken._fields)

    def aggregate(self, other: KVConnectorStats) -> KvobsStats:
        """Add the numbers of ``other``; those of another version of kvobs can't be, and are left out."""
        theirs = other if isinstance(other, KvobsStats) else KvobsStats.read(other)
        if not self.data:
            self.data = copy.deepcopy(theirs.data)
        elif theirs.is_ours and self.is_ours:
            counts = self.data["counts"]
            before = counts.get
            for slot, n in theirs.data["counts"].items():
                counts[slot] = before(slot, 0) + n
            self.data["gauges"].update(theirs.data["gauges"])
            if theirs.data["opened"]:
                self.data["opened"] = _add_rows(self.data["opened"], theirs.data["opened"])
        return self

    def spend(self, slot: int, ns: int) -> None:
        """Add what handling this payload took to a slot of the process's own."""
        if self.is_ours:
            counts = self.data["counts"]
            counts[slot] = counts.get(slot, 0) + ns


def _slots(numbers: Any) -> dict[int, int]:
    if not isinstance(numbers, dict):
        return {}
    return {slot: n for slot, n in numbers.items() if type(slot) is int and type(n) is int and slot >= 0 <= n}


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) < len(("signal", "child", "n")):
        return False
    signal, child, *values, n = row
    return (
        type(child) is int and type(n) is int and child >= 0 <= n and all(isinstance(v, str) for v in (signal, *values))
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
    if isinstance(stats, Mapping):
        if set(stats) == {"data"} and isinstance(stats["data"], Mapping):
            stats = stats["data"]
        return dict(stats)
    return {"value": stats}
