"""The API server's side: kvobs's metrics in a registry of their own."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.export.prometheus import MultiKVConnectorPromMetrics, Shown
from kvobs.page.description import Identity
from kvobs.schema.options import Options
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import Script, engine_config, transfer_config
from tests.support.rig import entry_for

LABELS = {"model_name": "tiny", "engine": "0"}
REAL: Any = {kind: kind for kind in (Counter, Gauge, Histogram)}
"""Classes with which the metrics are in the registry of the process."""


class Front:
    """The API server's side: kvobs's metrics in a registry of its own."""

    shown: Shown

    def __init__(
        self,
        *connectors: dict[str, Any],
        engines: int = 1,
        types: Any = None,
        engine_id: str | None = None,
        **kvobs: Any,
    ) -> None:
        self.registry = CollectorRegistry()
        self.config = config = engine_config(transfer_config("kvobs", list(connectors), kvobs, engine_id=engine_id))
        cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        chosen: Any = types or {kind: partial(kind, registry=self.registry) for kind in REAL}
        values: dict[int, list[object]] = {i: ["tiny", str(i)] for i in range(engines)}
        self.metrics: MultiKVConnectorPromMetrics = cls.build_prom_metrics(config, chosen, list(LABELS), values)
        if self.metrics._shown:
            self.shown = self.metrics._shown[-1]
        else:
            tracing = TracingSettings.of(Options(**kvobs), config)
            self.shown = Shown(Identity.of(config).server, dict.fromkeys(range(engines), "tiny"), tracing)
        self.registry.register(self.shown.collector)

    def value(self, name: str, connector: str | None, **labels: str) -> float | None:
        of_connector = {} if connector is None else {"connector": connector}
        return self.registry.get_sample_value(name, {**LABELS, **of_connector, **labels})

    def export_spans(self) -> None:
        """Export all spans that were written, and wait until they are with the collector."""
        for totals in self.shown._totals.values():
            totals.engine.find()
        self.shown.export_spans(is_last=True)
        if self.shown._spans is not None:
            self.shown._spans.converter._processor.force_flush()


def metered(tag: str, cls: str = "MeteredConnector", **more: Any) -> dict[str, Any]:
    return entry_for(Script(tag), cls, **more)
