"""The stats payload: what travels worker -> scheduler -> API server, and its way back into objects.

``MultiKVConnectorStats.data`` maps a child's name to that child's own stats, and ``kvobs`` to kvobs's own numbers:
``{"v": 1, "table": digest, "children": {name: "module:Class"}, "counts": [slot, value, ...]}``. The API server sees
only this dict, so it carries what is needed to rebuild every child's stats. Nothing here raises for a peer's sake: a
payload that can't be understood keeps its raw numbers.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.config import RESERVED_NAME
from kvobs.notices import once
from kvobs.recorder import WIDTH
from kvobs.signals import LOAD_TOKENS, LOADS, LOOKUPS, SLOTS, TABLE_DIGEST

VERSION = 1


class RawStats(KVConnectorStats):
    """The numbers of a child whose class is not known here: numbers add up, anything else keeps its last value."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> RawStats:
        _add(self.data, as_dict(other))
        return self

    def reduce(self) -> dict[str, Any]:
        return {key: value for key, value in self.data.items() if isinstance(value, int | float)}


class KvobsStats(KVConnectorStats):
    """kvobs's own numbers: differences of counters, as flat pairs (slot, value)."""

    data: dict[str, Any]

    @classmethod
    def of(cls, children: Mapping[str, str], counts: list[int]) -> KvobsStats:
        return cls(data={"v": VERSION, "table": TABLE_DIGEST, "children": dict(children), "counts": counts})

    @property
    def children(self) -> dict[str, str]:
        """Return name -> "module:Class", in the order of the configuration."""
        children = self.data.get("children")
        if not isinstance(children, dict):
            return {}
        return {name: path for name, path in children.items() if isinstance(path, str)}

    @property
    def is_ours(self) -> bool:
        """Whether this process understands the counts."""
        return self.data.get("v") == VERSION and self.data.get("table") == TABLE_DIGEST

    def counts(self) -> dict[int, int]:
        """Return slot -> value; empty when another version of kvobs wrote them."""
        flat = self.data.get("counts") if self.is_ours else None
        if not isinstance(flat, list) or not all(type(number) is int for number in flat):
            return {}
        return dict(zip(flat[::2], flat[1::2], strict=False))

    def reset(self) -> None:
        self.data["counts"] = []

    def is_empty(self) -> bool:
        return not self.data.get("counts")

    def aggregate(self, other: KVConnectorStats) -> KvobsStats:
        theirs = KvobsStats(data=as_dict(other))
        if not self.data:
            self.data = copy.deepcopy(theirs.data)
        elif theirs.is_ours and self.is_ours:
            merged = self.counts()
            for slot, value in theirs.counts().items():
                merged[slot] = merged.get(slot, 0) + value
            self.data["counts"] = [number for pair in merged.items() for number in pair]
        return self

    def reduce(self) -> dict[str, str]:
        """Return one short line for each child that was asked anything."""
        counts = self.counts()
        lines = {}
        for i, name in enumerate(self.children):
            mine = {slot - i * WIDTH: n for slot, n in counts.items() if i * WIDTH <= slot < (i + 1) * WIDTH}
            by_signal: dict[str, int] = {}
            for slot, n in mine.items():
                by_signal[SLOTS[slot][0].name] = by_signal.get(SLOTS[slot][0].name, 0) + n
            if by_signal:
                lookups, loads, tokens = (by_signal.get(s.name, 0) for s in (LOOKUPS, LOADS, LOAD_TOKENS))
                lines[name] = f"{lookups} lookups, {loads} loads of {tokens} tokens"
        return lines


class MultiKVConnectorStats(stock.MultiKVConnectorStats):
    """The stats of all children, by name, and kvobs's own under ``kvobs``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the payload as plain builtins."""
        return {name: as_dict(stats) for name, stats in self.data.items()}

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Merge ``other`` in; it is neither changed nor kept."""
        for name, theirs in other.data.items():
            mine = self.data.get(name)
            self.data[name] = copy.deepcopy(theirs) if mine is None else _merged(name, mine, theirs)
        return self

    def reset(self) -> None:
        for stats in self.data.values():
            stats.reset()

    def reduce(self) -> dict[str, Any]:
        """Return one entry for each child: what kvobs counted, then the child's own summary."""
        counted = self.data.get(RESERVED_NAME)
        lines: dict[str, Any] = dict(counted.reduce()) if counted is not None else {}
        for name, stats in self.data.items():
            if name == RESERVED_NAME:
                continue
            try:
                reduced = stats.reduce()
            except Exception:
                once(
                    f"reduce:{name}", logging.ERROR, "the stats of connector %r can't be summed up", name, exc_info=True
                )
                continue
            if reduced:
                own = ", ".join(f"{key}={value}" for key, value in reduced.items())
                lines[name] = f"{lines[name]}; {own}" if name in lines else own
        return lines

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())

    def __getitem__(self, name: str) -> KVConnectorStats:
        stats: KVConnectorStats = self.data[name]
        return stats

    def __setitem__(self, name: str, stats: KVConnectorStats) -> None:
        self.data[name] = stats


def collect(
    stats: Mapping[str, KVConnectorStats | None], classes: Mapping[str, str], counts: list[int]
) -> MultiKVConnectorStats | None:
    """Put the children's stats, by name, and kvobs's counts into one object; None when there is nothing to tell."""
    data: dict[str, KVConnectorStats] = {name: own for name, own in stats.items() if own is not None}
    if not data and not counts:
        return None
    data[RESERVED_NAME] = KvobsStats.of(classes, counts)
    return MultiKVConnectorStats(data=data)


def rebuild(data: Any) -> MultiKVConnectorStats:
    """Build stats from whatever a peer sent: objects, dicts, ``{"data": ...}`` wrappers, or a mixture; never raise."""
    if isinstance(data, KVConnectorStats):
        data = data.data
    if not isinstance(data, Mapping):
        return MultiKVConnectorStats()
    own = data.get(RESERVED_NAME)
    ours = KvobsStats(data=as_dict(own)) if own is not None else KvobsStats()
    rebuilt: dict[str, KVConnectorStats] = {}
    for name, value in data.items():
        if name == RESERVED_NAME:
            rebuilt[name] = ours
        elif isinstance(value, KVConnectorStats):
            rebuilt[name] = value
        else:
            rebuilt[name] = _rebuild_child(name, ours.children.get(name), as_dict(value))
    return MultiKVConnectorStats(data=rebuilt)


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


def class_path(connector_class: type) -> str:
    """Return "module:Class", by which ``rebuild`` finds a child's class again."""
    return f"{connector_class.__module__}:{connector_class.__qualname__}"


def _rebuild_child(name: str, path: str | None, data: dict[str, Any]) -> KVConnectorStats:
    connector_class = _class_at(path) if path else _registered(name)
    if connector_class is not None:
        try:
            stats = connector_class.build_kv_connector_stats(data=data)
            if isinstance(stats, KVConnectorStats):
                return stats
        except Exception:
            once(
                f"rebuild:{name}",
                logging.ERROR,
                "connector %r can't rebuild its own stats; its raw numbers are kept",
                name,
                exc_info=True,
            )
    return RawStats(data=data)


@lru_cache(maxsize=64)
def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except Exception:
        once(
            f"class:{path}",
            logging.ERROR,
            "can't import %s to rebuild its stats; its raw numbers are kept",
            path,
            exc_info=True,
        )
        return None


@lru_cache(maxsize=64)
def _registered(name: str) -> Any:
    """Find the class of an old payload's entry, which is named by its class only."""
    try:
        return KVConnectorFactory.get_connector_class_by_name(name)
    except Exception:
        once(f"registered:{name}", logging.INFO, "no connector is registered as %r; its raw stats are kept", name)
        return None


def _merged(name: str, mine: KVConnectorStats, theirs: KVConnectorStats) -> KVConnectorStats:
    try:
        return mine.aggregate(theirs)
    except Exception:
        once(
            f"aggregate:{name}",
            logging.ERROR,
            "the stats of connector %r can't be merged by its own rule; its raw numbers are kept",
            name,
            exc_info=True,
        )
        return RawStats(data=copy.deepcopy(as_dict(mine))).aggregate(RawStats(data=as_dict(theirs)))


def _add(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        mine = into.get(key)
        if isinstance(mine, dict) and isinstance(value, Mapping):
            _add(mine, value)
        elif _is_number(mine) and _is_number(value):
            into[key] = mine + value
        else:
            into[key] = copy.deepcopy(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
