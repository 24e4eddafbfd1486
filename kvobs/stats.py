"""The stats payload: what travels worker -> scheduler -> API server, and its way back into objects.

``MultiKVConnectorStats.data`` maps a child's name to that child's own stats, and ``kvobs`` to kvobs's own numbers (see
``payload``). The API server sees only this dict, so it carries what is needed to rebuild every child's stats. Nothing
here raises for a peer's sake: what can't be understood keeps its raw numbers.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter_ns
from types import ModuleType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults, signals
from kvobs.children import Child
from kvobs.config import RESERVED_NAME
from kvobs.notices import once
from kvobs.payload import KvobsStats, as_dict, nothing
from kvobs.recorder import Recorder, Taken
from kvobs.summary import summarize

_MERGE = signals.slot(signals.SELF_SECONDS, "merge")
_ENTRIES_AT_MOST = 1_000  # children: names come from the peer


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


class _Merging:
    """What merging has taken in this process, until numbers that go out take it along."""

    owed_ns = 0

    @faults.contained("merge")
    def spend(self, own: Any, ns: int) -> None:
        self.owed_ns += ns
        if isinstance(own, KvobsStats) and not own.is_bare:
            own.spend(_MERGE, self.owed_ns)
            self.owed_ns = 0


_merging = _Merging()


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
        _merging.spend(self.data.get(RESERVED_NAME), perf_counter_ns() - begin)
        return payload

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Merge ``other`` in; it is neither changed nor kept."""
        for name, theirs in other.data.items() if isinstance(other.data, Mapping) else ():
            try:
                self._merge(name, theirs)
            except Exception:
                faults.contain("merge")
        return self

    def _merge(self, name: str, theirs: KVConnectorStats) -> None:
        mine = self.data.get(name)
        if mine is None:
            if len(self.data) < _ENTRIES_AT_MOST or name == RESERVED_NAME:
                self.data[name] = copy.deepcopy(theirs)
        elif name == RESERVED_NAME:
            mine.aggregate(theirs)
        else:
            self.data[name] = _merged(name, mine, theirs)

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
        return all(_is_empty(name, stats) for name, stats in self.data.items())

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
        if (own := self._own() if is_due else KvobsStats.bare(self._classes)) is not None:
            data[RESERVED_NAME] = own
        return MultiKVConnectorStats(data=data) if data else None

    @faults.contained("flush")
    def _own(self) -> KvobsStats:
        return KvobsStats.of(self._classes, self._take())

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
            elif len(rebuilt) < _ENTRIES_AT_MOST:
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


_found: dict[str, type[KVConnectorBase_V1]] = {}
_FOUND_AT_MOST = 64


def _class_at(path: str) -> Any:
    """Find a connector's class where this process has it already: a payload decides on no import.

    The API server imports the configured connectors when it makes their metrics, before any payload comes in.
    """
    if (known := _found.get(path)) is not None:
        return known
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    if isinstance(found, type) and issubclass(found, KVConnectorBase_V1):
        if len(_found) < _FOUND_AT_MOST:
            _found[path] = found
        return found
    once(
        f"class:{path}",
        logging.ERROR,
        "%.200r is no connector that this process has imported: its stats can't be rebuilt, its raw numbers are kept",
        path,
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


def _is_empty(name: str, stats: KVConnectorStats) -> bool:
    """Return a child's own word; stats that can't tell are shown."""
    try:
        return stats.is_empty()
    except Exception:
        once(f"empty:{name}", logging.ERROR, "the stats of connector %r can't be read", name, exc_info=True)
        return False


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
