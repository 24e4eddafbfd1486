"""The API server's side: kvobs's metrics in a registry of their own, and payloads for them."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.export.prometheus import MultiKVConnectorPromMetrics
from kvobs.probe.increments import Increments
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.testing import Script, engine_config, transfer_config
from tests.support.rig import child_config

LABELS = {"model_name": "tiny", "engine": "0"}


class Front:
    """The API server's side: kvobs's metrics in a registry of its own."""

    def __init__(
        self,
        *connectors: dict[str, Any],
        engines: int = 1,
        types: Any = None,
        engine_id: str | None = None,
        **kvobs: Any,
    ) -> None:
        self.registry = CollectorRegistry()
        config = engine_config(transfer_config("kvobs", list(connectors), kvobs, engine_id=engine_id))
        cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        chosen: Any = types or {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        values: dict[int, list[object]] = {i: ["tiny", str(i)] for i in range(engines)}
        self.metrics: MultiKVConnectorPromMetrics = cls.build_prom_metrics(config, chosen, list(LABELS), values)
        self.registry.register(self.metrics.collector)

    def value(self, name: str, connector: str | None, **labels: str) -> float | None:
        of_child = {} if connector is None else {"connector": connector}
        return self.registry.get_sample_value(name, {**LABELS, **of_child, **labels})


def metered(tag: str, cls: str = "MeteredConnector", **more: Any) -> dict[str, Any]:
    return child_config(Script(tag), cls, **more)


def own(
    counts: dict[int, int], children: dict[str, str], gauges: dict[int, int] | None = None, opened: Any = None
) -> dict[str, Any]:
    return KvobsStats.of(children, Increments(counts, opened or [], gauges or {})).data
