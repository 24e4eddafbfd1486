"""Gather the stats that one process sends: the connectors' own, and kvobs's when they are due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvobs import faults
from kvobs.children.child import Child
from kvobs.schema import signals
from kvobs.schema.config import RESERVED_NAME
from kvobs.telemetry.payload.payload import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, class_path
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.telemetry.recording.taken import Taken, nothing

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

_HOOK = "get_kv_connector_stats"


class Sink(Protocol):
    """Receives kvobs's numbers instead of the payload, for the exporter."""

    def put(self, stats: KvobsStats) -> None:
        """Hand over a payload; this never waits."""


@faults.contained("flush")
def divert(stats: KVConnectorStats | None, sink: Sink) -> None:
    """Take the workers' numbers out of their payload, for the exporter; the connectors' own stats stay."""
    numbers = stats.data.get(RESERVED_NAME) if stats is not None else None
    if stats is not None and isinstance(numbers, KvobsStats):
        stats.data[RESERVED_NAME] = KvobsStats.bare(numbers.children)
        if len(stats.data) == 1:
            del stats.data[RESERVED_NAME]
        sink.put(numbers)


class Collector:
    """Collects the payload of one process: the children's own stats, and kvobs's numbers when they are due.

    With ``sink`` kvobs's numbers go to the exporter instead.
    """

    def __init__(self, children: Sequence[Child], recorder: Recorder, sink: Sink | None = None) -> None:
        self._sink = sink
        self._hooks = [(child.name, child.get_kv_connector_stats) for child in children if child.does(_HOOK)]
        self._classes = {child.name: class_path(type(child.connector)) for child in children}
        self._recorder = recorder

    def collect(self, *, is_due: bool) -> MultiKVConnectorStats | None:
        """Return the payload, or None if it would be empty."""
        data: dict[str, KVConnectorStats] = {}
        for name, hook in self._hooks:
            if (stats := hook()) is not None:
                data[name] = stats
        if self._sink is not None and is_due:
            self.feed(self._sink)
            is_due = False
        if not data and not is_due:
            return None
        if (numbers := self._numbers() if is_due else KvobsStats.bare(self._classes)) is not None:
            data[RESERVED_NAME] = numbers
        return MultiKVConnectorStats(data=data) if data else None

    def feed(self, sink: Sink) -> None:
        """Pass kvobs's numbers on to the exporter."""
        if (numbers := self._numbers()) is not None:
            sink.put(numbers)

    @faults.contained("flush")
    def _numbers(self) -> KvobsStats:
        return KvobsStats.of(self._classes, self._take())

    def _take(self) -> Taken:
        """Take the counters. If that fails, the internal error is still reported."""
        try:
            taken = self._recorder.take()
        except Exception:
            faults.contain("flush")
            taken = nothing()
        for where, n in faults.take().items():
            taken.counts[signals.slot(signals.INTERNAL_ERRORS, where)] = n
        return taken
