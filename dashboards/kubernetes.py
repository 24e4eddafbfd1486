"""Make manifests for a cluster with Prometheus's operator: scraping, rules, and a kustomization with the boards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dashboards.alerts import rule_groups
from dashboards.rules import HEADER, to_yaml
from dashboards.site import Site, fill, token

PORTS = {"vllm": "http", "kvobs": "kvobs"}
"""By job, as in docs/quickstart.md: the name of the port of vLLM's API server, and of the exporter's port."""

POD_HEADER = HEADER + (
    "# Change for your site: the labels of vLLM's pods, and the names of their ports (http: 8000, kvobs: 9464).\n"
    "# Pods in other namespaces: `kvobs dashboards export --namespace N`. The operator of kube-prometheus-stack takes\n"
    "# only objects with the label of its release: `--label release=NAME`.\n"
    "# The exporter must listen on the pod's address: KVOBS_EXPORTER=0.0.0.0:9464, or the option exporter.host.\n"
)
APPLY_HEADER = HEADER + "# Apply with: kubectl apply --server-side -k .\n"
LABEL = {"app.kubernetes.io/name": "kvobs"}


LABELS, NAMESPACES = token("labels"), token("namespaces")
"""Lines of templates: an export has none, or further labels and namespaces, in their place."""


def pod_monitor(site: Site | None = None) -> str:
    """Return the PodMonitor of a site, or its template: with the job names that rules and boards expect."""
    ports = {"vllm": PORTS["vllm"], token("job"): PORTS["kvobs"]}
    endpoints = [
        {
            "port": port,
            "path": "/metrics",
            "relabelings": [{"action": "replace", "targetLabel": "job", "replacement": job}],
        }
        for job, port in ports.items()
    ]
    selector = {"matchLabels": {"app.kubernetes.io/name": "vllm"}}
    spec = {**({} if site else {NAMESPACES: ""}), "selector": selector, "podMetricsEndpoints": endpoints}
    content = _object("PodMonitor", is_template=site is None, spec=spec)
    return to_yaml(fill(content, site) if site else content, header=POD_HEADER)


def prometheus_rule(site: Site | None = None) -> str:
    """Return the PrometheusRule of a site, or its template."""
    return to_yaml(_object("PrometheusRule", is_template=site is None, spec=rule_groups(site)))


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


def _object(kind: str, *, is_template: bool, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "kvobs", "labels": LABEL | ({LABELS: ""} if is_template else {})}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": kind, "metadata": metadata, "spec": spec}
