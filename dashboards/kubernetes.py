"""Make manifests for a cluster with Prometheus's operator: scraping, rules, and a kustomization with the boards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dashboards.alerts import rule_groups
from dashboards.rules import HEADER, to_yaml

PORTS = {"vllm": "http", "kvobs": "kvobs"}
"""By job, as in the README: the name of the port, that of vLLM's API server and that of the exporter."""

POD_HEADER = HEADER + (
    "# Change for your site: the labels of vLLM's pods, and the names of their ports (http: 8000, kvobs: 9464).\n"
    "# The exporter must listen on the pod's address: KVOBS_EXPORTER=0.0.0.0:9464, or the option exporter.host.\n"
)
APPLY_HEADER = HEADER + "# Apply with: kubectl apply --server-side -k .\n"
LABEL = {"app.kubernetes.io/name": "kvobs"}


def pod_monitor() -> str:
    """Return the PodMonitor: vLLM and the exporter, with the job names that rules and boards expect."""
    endpoints = [
        {
            "port": port,
            "path": "/metrics",
            "relabelings": [{"action": "replace", "targetLabel": "job", "replacement": job}],
        }
        for job, port in PORTS.items()
    ]
    selector = {"matchLabels": {"app.kubernetes.io/name": "vllm"}}
    spec = {"selector": selector, "podMetricsEndpoints": endpoints}
    return to_yaml(_object("monitoring.coreos.com/v1", "PodMonitor", "kvobs", spec=spec), header=POD_HEADER)


def prometheus_rule() -> str:
    """Return the PrometheusRule."""
    return to_yaml(_object("monitoring.coreos.com/v1", "PrometheusRule", "kvobs", spec=rule_groups()))


def kustomization(boards: Iterable[str]) -> str:
    """Return the kustomization of all manifests: one ConfigMap per board, labelled for Grafana's sidecar.

    It belongs above ``boards`` and ``kubernetes``: kustomize loads no file from outside its own folder.
    """
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"kubernetes/{name}.yaml" for name in ("podmonitor", "prometheusrule")],
        "configMapGenerator": [{"name": uid, "files": [f"boards/{uid}.json"]} for uid in boards],
        "generatorOptions": {
            "disableNameSuffixHash": True,
            "labels": LABEL | {"grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "kvobs"},
        },
    }
    return to_yaml(content, header=APPLY_HEADER)


def _object(version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": dict(LABEL)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}
