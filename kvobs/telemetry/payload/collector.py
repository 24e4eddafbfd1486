"""Collect the connectors' own stats of one process, with the classes that can rebuild them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvobs.schema.config import RESERVED_NAME
from kvobs.telemetry.payload.stats import Classes, MultiKVConnectorStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Collector:
    """Collects the stats of a step; ``classes`` are the paths of the connectors' classes as "module:Class", by name."""

    hooks: Sequence[tuple[str, Callable[[], KVConnectorStats | None]]] = ()
    """The calls for the stats of those connectors that have any, by name."""

    def __init__(self, classes: Mapping[str, str]) -> None:
        self.classes = classes

    def collect(self) -> MultiKVConnectorStats | None:
        """Return the stats; None if there are none."""
        data: dict[str, KVConnectorStats] = {}
        for name, hook in self.hooks:
            if (stats := hook()) is not None:
                data[name] = stats
        if not data:
            return None
        data[RESERVED_NAME] = Classes.of(self.classes)
        return MultiKVConnectorStats(data=data)
