"""Make manifests for a cluster with Prometheus's operator: what to scrape, the rules, the boards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dashboards.alerts import rule_groups
from dashboards.rules import HEADER, to_yaml

SCRAPES = {"vllm": ("/metrics", "drop"), "kvobs": ("/metrics/", "keep")}
"""By job: the path, and what becomes of ``kvobs_*`` there, as in the README."""

POD_HEADER = HEADER + "# Yours to change: the labels of the pods of vLLM, and the name of their port.\n"


def pod_monitor() -> str:
    """Return what has the pods scraped, in two jobs of the same names as elsewhere: rules and boards ask for them."""
    endpoints = [
        {
            "port": "http",
            "path": path,
            "relabelings": [{"action": "replace", "targetLabel": "job", "replacement": job}],
            "metricRelabelings": [{"action": action, "sourceLabels": ["__name__"], "regex": "kvobs_.*"}],
        }
        for job, (path, action) in SCRAPES.items()
    ]
    selector = {"matchLabels": {"app.kubernetes.io/name": "vllm"}}
    spec = {"selector": selector, "podMetricsEndpoints": endpoints}
    return to_yaml(_object("monitoring.coreos.com/v1", "PodMonitor", "kvobs", spec=spec), header=POD_HEADER)


def prometheus_rule() -> str:
    """Return the rules."""
    return to_yaml(_object("monitoring.coreos.com/v1", "PrometheusRule", "kvobs", spec=rule_groups()))


def config_maps(boards: Mapping[str, Callable[[], str]]) -> str:
    """Return one ConfigMap a board, as Grafana's sidecar looks for them."""
    return to_yaml(*(_config_map(uid, text()) for uid, text in boards.items()))


def _config_map(uid: str, text: str) -> dict[str, Any]:
    content = _object("v1", "ConfigMap", uid, data={f"{uid}.json": text})
    content["metadata"]["labels"]["grafana_dashboard"] = "1"
    content["metadata"]["annotations"] = {"grafana_folder": "kvobs"}
    return content


def _object(version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": "kvobs"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}
