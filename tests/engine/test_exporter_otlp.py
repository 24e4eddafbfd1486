"""On a real engine the metrics that the exporter sends by OTLP are those that are scraped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.demo.server import parse_metrics
from kvobs.schema.signals import LOADS, SIGNALS, Kind, Scope
from tests.engine.exported import Exported, with_exporter
from tests.engine.metered import ask_in_turn, configuration, counting_child
from tests.engine.serving import eventually, serve
from tests.support.otlp_metrics import Labels, MetricsReceiver, Received

pytestmark = pytest.mark.engine


def scraped(server: Any) -> dict[str, dict[Labels, Received]]:
    """Return counters and histograms of connectors, in the form in which they are received."""
    counts: dict[tuple[str, Labels], list[tuple[float, float]]] = {}
    plain: dict[tuple[str, Labels], float] = {}
    for sample in parse_metrics(server.get("/metrics")):
        labels = frozenset((key, value) for key, value in sample.labels.items() if key != "le")
        plain[sample.name, labels] = sample.value
        if "le" in sample.labels:
            name = sample.name.removesuffix("_bucket")
            counts.setdefault((name, labels), []).append((float(sample.labels["le"]), sample.value))
    found: dict[str, dict[Labels, Received]] = {}
    for signal in SIGNALS:
        if signal.scope is not Scope.CHILD or signal.kind is Kind.GAUGE:
            continue
        if signal.kind is Kind.COUNTER:
            found[signal.name] = {
                labels: Received(value) for (name, labels), value in plain.items() if name == signal.name
            }
        else:
            found[signal.name] = {}
            for (name, labels), bounds in counts.items():
                if name == signal.name:
                    upto = [count for _, count in sorted(bounds)]
                    buckets = [int(b - a) for a, b in zip([0.0, *upto], upto, strict=False)]
                    found[name][labels] = Received(plain[f"{name}_sum", labels], tuple(buckets))
    return found


def test_what_is_sent_by_otlp_is_what_is_scraped(model: Path, tmp_path: Path) -> None:
    config = configuration(counting_child(tmp_path), host_memory(), names=["steered", "cpu"])
    config, port = with_exporter(config, otlp_metrics=True)
    with MetricsReceiver() as receiver:
        env = {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        with serve(model, tmp_path, config, env=env, timeout=360) as plain:
            server: Any = Exported(plain, port)
            server.until_up()
            ask_in_turn(server, 24)

            def are_equal() -> bool:
                wanted = scraped(server)
                return all(
                    receiver.series(name).keys() == series.keys()
                    and all(
                        receiver.series(name)[labels].value == pytest.approx(one.value, rel=1e-9)
                        and receiver.series(name)[labels].buckets == one.buckets
                        for labels, one in series.items()
                    )
                    for name, series in wanted.items()
                )

            assert eventually(are_equal, 20)
            wanted = scraped(server)
            assert sum(one.value for one in wanted[LOADS.name].values()) >= 12
            assert sum(bool(series) for series in wanted.values()) >= 12
