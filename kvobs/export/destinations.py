"""Describe where an engine's metrics and spans go, as far as it is known before it runs."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvobs.schema import kinds
from kvobs.schema.findings import Finding
from kvobs.schema.options import ExporterOption, ExporterOptions
from kvobs.telemetry.tracing.sampling import ENDPOINT, TRACES_ENDPOINT, TracingSettings

API_SERVER = "vLLM's API server"
LOST = ("metrics", "tracing")


class Hidden(NamedTuple):
    """What keeps vLLM's API server from showing a collector's metrics; there the engine starts the exporter."""

    path: str
    found: str
    instead: str
    """Another remedy than the exporter."""


STATS_OFF = Hidden("--disable-log-stats", "vLLM's stat logging is off", "turn stat logging on")
RUST = Hidden(
    "environment variable VLLM_USE_RUST_FRONTEND", "vLLM's Rust front end exposes no metrics of connectors", "unset it"
)
SEVERAL = Hidden(
    "--api-server-count", "several API servers only expose prometheus_client's multiprocess files", "use 1"
)
MULTIPROCESS = Hidden(
    "environment variable PROMETHEUS_MULTIPROC_DIR",
    "the API server only exposes prometheus_client's multiprocess files",
    "unset it",
)
RAY = Hidden("Ray Serve", "a Ray actor only exposes metrics of Ray's own classes", "serve with `vllm serve`")


def exporter_of(option: ExporterOption, hidden: Hidden | None) -> ExporterOptions | None:
    """Return the options of the exporter, if one runs; ``hidden`` is why the API server shows no metrics, if known."""
    if option == "auto":
        return ExporterOptions() if hidden is not None else None
    return option


def findings(option: ExporterOption, hidden: Hidden | None) -> list[Finding]:
    """Return a warning if metrics and spans are lost."""
    if option is not None or hidden is None:
        return []
    return [kinds.LOST.at(hidden.path, why=hidden.found, instead=hidden.instead)]


def losses(option: ExporterOption, hidden: Hidden | None) -> dict[str, str]:
    """Return each thing that is lost, with the reason."""
    return dict.fromkeys(LOST, hidden.path) if option is None and hidden is not None else {}


def metrics_go_to(option: ExporterOption, hidden: Hidden | None) -> str:
    """Return where the metrics are, as text."""
    if (exporter := exporter_of(option, hidden)) is None:
        return f"/metrics of {API_SERVER}" if hidden is None else f"nowhere: {hidden.path}"
    pages = [] if exporter.port is None else [exporter_url(exporter.host, exporter.port, exporter.web_config)]
    by_otlp = ["by OTLP"] if exporter.otlp_metrics else []
    why = f", which the engine starts: {hidden.path}" if option == "auto" and hidden is not None else ""
    return f"{' and '.join(pages + by_otlp)}, from kvobs's exporter{why}"


def spans_go_to(option: ExporterOption, hidden: Hidden | None, tracing: TracingSettings) -> str:
    """Return where the spans go, as text."""
    if not tracing.is_on:
        return "nowhere: tracing is off"
    if reason := losses(option, hidden).get("tracing"):
        return f"nowhere: {reason}"
    sender = API_SERVER if exporter_of(option, hidden) is None else "kvobs's exporter"
    return f"{endpoint_shown(tracing.endpoint)}, from {sender}"


def described_at_start(option: ExporterOption, tracing: TracingSettings) -> str:
    """Return the same as the end of a line of the log: what an engine knows at its start."""
    metrics = metrics_go_to(option, None)
    if option == "auto":
        metrics += ", or to kvobs's exporter if that server does not expose them"
    spans = f"spans go to {spans_go_to(option, None, tracing)}" if tracing.is_on else "tracing is off"
    return f"; metrics go to {metrics}; {spans}"


def exporter_url(host: str, port: int, tls: str | None) -> str:
    """Return the URL of an exporter's metrics; ``tls`` is its ``web_config``."""
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def endpoint_shown(endpoint: str | None) -> str:
    """Return the endpoint of spans, vLLM's option or the environment's, without what may be secret."""
    endpoint = endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT, "")
    address = endpoint.partition("?")[0]  # an endpoint of gRPC may have no scheme
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"
