"""The stats payload: what travels worker -> scheduler -> API server, and its way back into objects.

``MultiKVConnectorStats.data`` maps a child's name to that child's own stats, and ``kvobs`` to kvobs's own numbers (see
``payload``). The API server sees only this dict, so it carries what is needed to rebuild every child's stats. Nothing
here raises for a peer's sake: what can't be understood keeps its raw numbers.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults, signals
from kvobs.children import Child
from kvobs.config import RESERVED_NAME
from kvobs.notices import once
from kvobs.payload import KvobsStats, as_dict, nothing
from kvobs.recorder import Recorder, Taken
from kvobs.summary import summarize

_MERGE = signals.slot(signals.SELF_SECONDS, "merge")


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


class MultiKVConnectorStats(stock.MultiKVConnectorStats):
    """The stats of all children, by name, and kvobs's own under ``kvobs``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the payload as plain builtins; what can't be told is left out."""
        begin = perf_counter_ns()
        payload = {}
        for name, stats in self.data.items():
            try:
                payload[name] = as_dict(stats)
            except Exception:
                faults.contain("merge")
        own = self.data.get(RESERVED_NAME)
        if isinstance(own, KvobsStats) and RESERVED_NAME in payload:
            own.spend(_MERGE, perf_counter_ns() - begin)
        return payload

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Merge ``other`` in; it is neither changed nor kept."""
        try:
            for name, theirs in other.data.items():
                mine = self.data.get(name)
                if mine is None:
                    self.data[name] = copy.deepcopy(theirs)
                elif name == RESERVED_NAME:
                    mine.aggregate(theirs)
                else:
                    self.data[name] = _merged(name, mine, theirs)
        except Exception:
            faults.contain("merge")
        return self

    def reset(self) -> None:
        for stats in self.data.values():
            stats.reset()

    def reduce(self) -> dict[str, Any]:
        """Return a line for each child, for vLLM's log: what kvobs counted, then the child's own summary."""
        own = self.data.get(RESERVED_NAME)
        lines: dict[str, str] = {}
        try:
            lines = summarize(list(own.children), own.taken()) if isinstance(own, KvobsStats) else {}
        except Exception:
            faults.contain("summarize")
        for name, stats in self.data.items():
            if name != RESERVED_NAME and (childs := _reduced(name, stats)):
                lines[name] = f"{lines[name]}; {childs}" if name in lines else childs
        # vLLM puts all entries into one line; its formatter repeats the prefix after a newline.
        return {f"\n  {name}": line for name, line in lines.items()}

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())

    def __getitem__(self, name: str) -> KVConnectorStats:
        stats: KVConnectorStats = self.data[name]
        return stats

    def __setitem__(self, name: str, stats: KVConnectorStats) -> None:
        self.data[name] = stats


class Collector:
    """Gathers what one process has to tell: the children's own stats, and kvobs's numbers when they are due."""

    def __init__(self, children: Sequence[Child], recorder: Recorder) -> None:
        self._hooks = [(child.name, child.get_kv_connector_stats) for child in children if child.does(_HOOK)]
        self._classes = {child.name: class_path(type(child.connector)) for child in children}
        self._recorder = recorder

    def collect(self, *, is_due: bool) -> MultiKVConnectorStats | None:
        """Return the payload, or None when there is nothing to tell."""
        data: dict[str, KVConnectorStats] = {name: stats for name, hook in self._hooks if (stats := hook()) is not None}
        if not data and not is_due:
            return None
        data[RESERVED_NAME] = KvobsStats.of(self._classes, self._take() if is_due else nothing())
        return MultiKVConnectorStats(data=data)

    def _take(self) -> Taken:
        """Take the numbers; whatever happens to them, that there was a fault gets out."""
        try:
            taken = self._recorder.take()
        except Exception:
            faults.contain("flush")
            taken = nothing()
        for where, n in faults.take().items():
            taken.counts[signals.slot(signals.INTERNAL_ERRORS, where)] = n
        return taken


_HOOK = "get_kv_connector_stats"


def has_news(stats: KVConnectorStats | None) -> bool:
    """Return whether kvobs's own numbers are in there."""
    own = stats.data.get(RESERVED_NAME) if stats is not None else None
    return own is not None and not own.is_empty()


def rebuild(data: Any) -> MultiKVConnectorStats:
    """Build stats from whatever a peer sent: objects, dicts, ``{"data": ...}`` wrappers, or a mixture; never raise."""
    if isinstance(data, KVConnectorStats):
        data = data.data
    rebuilt: dict[str, KVConnectorStats] = {}
    try:
        entries = data if isinstance(data, Mapping) else {}
        own = entries.get(RESERVED_NAME)
        ours = KvobsStats.read(own) if own is not None else KvobsStats()
        for name, value in entries.items():
            if name == RESERVED_NAME:
                rebuilt[name] = ours
            elif isinstance(value, KVConnectorStats):
                rebuilt[name] = value
            else:
                rebuilt[name] = _rebuild_child(name, ours.children.get(name), as_dict(value))
    except Exception:
        faults.contain("rebuild")
    return MultiKVConnectorStats(data=rebuilt)


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


def _reduced(name: str, stats: KVConnectorStats) -> str:
    """Return a child's own summary; empty when it has none, or can't make it."""
    try:
        return ", ".join(f"{key}={value}" for key, value in stats.reduce().items())
    except Exception:
        once(f"reduce:{name}", logging.ERROR, "the stats of connector %r can't be summed up", name, exc_info=True)
        return ""


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
