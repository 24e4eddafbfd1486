"""The connectors' own stats from workers over the scheduler to the API server, and their conversion back into objects.

``MultiKVConnectorStats.data`` maps a connector's name to its stats, and ``kvobs`` to the classes that can rebuild them:
the API server gets only this dict. kvobs's own numbers are not in it (see ``kvobs.page``). Input of a peer never raises
here: what can't be rebuilt keeps its raw values.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.log import once
from kvobs.schema.config import RESERVED_NAME
from kvobs.vllm_api import versions

as_dict = versions.stats_reader()
_ENTRIES_AT_MOST = 1_000  # connectors: names come from the peer


class RawStats(KVConnectorStats):
    """Stats of a connector of unknown class: numbers are summed, anything else keeps its last value."""

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


class Classes(KVConnectorStats):
    """The classes that can rebuild the connectors' stats: ``data`` is name -> "module:Class"."""

    data: dict[str, Any]

    @classmethod
    def of(cls, classes: Mapping[str, str]) -> Classes:
        return cls(data=dict(classes))

    @classmethod
    def read(cls, data: Any) -> Classes:
        """Parse the class paths of a peer; what is not text is left out."""
        paths = as_dict(data)
        return cls(data={name: path for name, path in paths.items() if isinstance(name, str) and isinstance(path, str)})

    def reset(self) -> None:
        """Keep the classes: they are not numbers."""

    def is_empty(self) -> bool:
        return True

    def aggregate(self, other: KVConnectorStats) -> Classes:
        self.data = self.data or dict(as_dict(other))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {}


class MultiKVConnectorStats(stock.MultiKVConnectorStats):
    """The stats of all connectors, by name, and their classes under ``kvobs``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the payload as plain builtins, without stats that can't be converted."""
        payload = {}
        data = _by_class(self.data) if _is_for_rust() else self.data
        for name, stats in data.items():
            try:
                payload[name] = as_dict(stats)
            except Exception:
                faults.contain("merge")
        return payload

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Merge ``other`` into this; it is neither changed nor kept."""
        for name, theirs in other.data.items() if isinstance(other.data, Mapping) else ():
            self._merge(name, theirs)
        return self

    @faults.contained("merge")
    def _merge(self, name: str, theirs: KVConnectorStats) -> None:
        mine = self.data.get(name)
        if mine is None:
            if len(self.data) < _ENTRIES_AT_MOST or name == RESERVED_NAME:
                self.data[name] = copy.deepcopy(theirs)
        elif name == RESERVED_NAME:
            mine.aggregate(theirs)
        else:
            self.data[name] = _merged(name, mine, theirs)

    def reduce(self) -> dict[str, Any]:
        """Return name -> key -> number, as vLLM's class does: the connector's own summary."""
        reduced: dict[str, dict[str, Any]] = {
            name: _attempt(name, "can't be summarized", _summary, stats) or {}
            for name, stats in self.data.items()
            if name != RESERVED_NAME
        }
        return {name: numbers for name, numbers in reduced.items() if numbers}

    def is_empty(self) -> bool:
        # vLLM drops empty ones: those that can't be read are not.
        return all(_attempt(name, "can't be read", stats.is_empty) for name, stats in self.data.items())


_is_for_rust = cache(versions.has_rust_frontend)


def _by_class(data: Mapping[str, KVConnectorStats]) -> dict[str, KVConnectorStats]:
    """Return the connectors' stats as vLLM's own class has them, by class name: its Rust front end reads no others."""
    classes = data.get(RESERVED_NAME)
    paths = classes.data if isinstance(classes, Classes) else {}
    by_class: dict[str, KVConnectorStats] = {}
    for name, stats in data.items():
        if name == RESERVED_NAME:
            continue
        class_name = paths.get(name, name).rpartition(":")[2].rpartition(".")[2]
        mine = by_class.get(class_name)
        try:
            by_class[class_name] = copy.deepcopy(stats) if mine is None else _merged(class_name, mine, stats)
        except Exception:
            faults.contain("merge")
    return by_class


class StatsParts:
    """Takes the stats of all connectors apart; ``classes`` are the paths of their classes by name, in their order."""

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = classes
        self._paths = tuple(classes.items())

    def of(self, stats: KVConnectorStats, index: int) -> KVConnectorStats | None:
        """Return a connector's part; None if there is none, or its class can't build it."""
        name, path = self._paths[index]
        part = stats.data.get(name)
        if part is None or (isinstance(part, KVConnectorStats) and not isinstance(part, RawStats)):
            return part
        built = _rebuild_one(name, path, as_dict(part))  # raw, as its class could not merge the stats of two ranks
        if built is None or isinstance(built, RawStats):
            return None
        stats.data[name] = built
        return built

    def replaced(self, stats: KVConnectorStats | None, index: int, part: KVConnectorStats | None) -> KVConnectorStats:
        """Return the stats with another part of a connector, or without one (None)."""
        stats = MultiKVConnectorStats() if stats is None else stats
        name, _ = self._paths[index]
        if part is None:
            stats.data.pop(name, None)
        else:
            stats.data.setdefault(RESERVED_NAME, Classes.of(self._classes))
            stats.data[name] = part
        return stats


def rebuild(data: Any) -> MultiKVConnectorStats:
    """Build stats from whatever a peer sent: objects, dicts, ``{"data": ...}`` wrappers, or a mixture; never raise."""
    if isinstance(data, KVConnectorStats):
        data = data.data
    rebuilt: dict[str, KVConnectorStats] = {}
    try:
        entries = data if isinstance(data, Mapping) else {}
        theirs = entries.get(RESERVED_NAME)
        ours = Classes.read(theirs)
        for name, value in entries.items():
            if name == RESERVED_NAME:
                rebuilt[name] = ours
            elif isinstance(value, KVConnectorStats):
                rebuilt[name] = value
            elif len(rebuilt) < _ENTRIES_AT_MOST:
                stats = _rebuild_one(name, ours.data.get(name), as_dict(value))
                if stats is not None:
                    rebuilt[name] = stats
    except Exception:
        faults.contain("rebuild")
    return MultiKVConnectorStats(data=rebuilt)


def class_path(connector_class: type) -> str:
    """Return "module:Class", by which ``rebuild`` finds a connector's class."""
    return f"{connector_class.__module__}:{connector_class.__qualname__}"


def _rebuild_one(name: str, path: str | None, data: dict[str, Any]) -> KVConnectorStats | None:
    """Return the stats object that the connector's class builds; None if it has none, as in vLLM's class."""
    if path and (connector_class := _class_at(path)) is not None:
        try:
            stats = connector_class.build_kv_connector_stats(data=data)
            if stats is None or isinstance(stats, KVConnectorStats):
                return stats
        except Exception:
            text = "the stats of connector %r can't be rebuilt by its class; their raw values are kept"
            once(f"rebuild:{name}", logging.ERROR, text, name, exc_info=True)
    return RawStats(data=data)


def _class_at(path: str) -> Any:
    """Find a connector's class among imported modules: a payload must not cause an import.

    The API server imports the configured connectors when it creates their metrics, before the first payload.
    """
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    if isinstance(found, type) and issubclass(found, KVConnectorBase_V1):
        return found
    text = "%.200r is not a connector imported in this process: its stats can't be rebuilt, their raw values are kept"
    once(f"class:{path}", logging.ERROR, text, path)
    return None


def _attempt(name: str, problem: str, call: Callable[..., Any], *args: Any) -> Any:
    """Return the answer of a connector's stats; None if they raise, which is logged once."""
    try:
        return call(*args)
    except Exception:
        text = f"the stats of connector %r {problem}"
        once(f"{problem}:{name}", logging.ERROR, text, name, exc_info=True)
        return None


def _summary(stats: KVConnectorStats) -> dict[str, Any]:
    return dict(stats.reduce())


def _merged(name: str, mine: KVConnectorStats, theirs: KVConnectorStats) -> KVConnectorStats:
    merged = _attempt(name, "can't be merged by its class; their raw values are kept", mine.aggregate, theirs)
    if merged is None:
        return RawStats(data=copy.deepcopy(as_dict(mine))).aggregate(RawStats(data=as_dict(theirs)))
    return merged


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
