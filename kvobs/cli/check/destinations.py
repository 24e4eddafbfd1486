"""Say where metrics and spans go, and which of them are lost, for ``kvobs check``."""

import os

from kvobs.export.destinations import Setup, case_of
from kvobs.telemetry.payload.wire import exporter_url
from kvobs.telemetry.tracing.sampling import ENDPOINT, TRACES_ENDPOINT, TracingSettings


def losses(setup: Setup) -> dict[str, str]:
    """Return each thing that is lost, with the reason."""
    case = case_of(setup, None)
    return {} if case is None else dict.fromkeys(case.lost, case.path)


def metrics_go_to(setup: Setup) -> str:
    """Return where the metrics can be had, as text."""
    if (exporter := setup.running) is None:
        reason = losses(setup).get("metrics")
        return "/metrics of vLLM's API server" if reason is None else f"nowhere: {reason}"
    by_otlp = ["by OTLP"] if exporter.otlp_metrics else []
    case = case_of(setup)
    why = f", which starts by itself: {case.path}" if case is not None else ""
    pages = [exporter_url(exporter.host, exporter.port, exporter.web_config)] if exporter.port is not None else []
    return f"{' and '.join(pages + by_otlp)}, from kvobs's exporter{why}"


def spans_go_to(setup: Setup, tracing: TracingSettings | None) -> str:
    """Return where the spans go, as text."""
    if tracing is None:
        return "nowhere: tracing is off"
    if reason := losses(setup).get("tracing"):
        return f"nowhere: {reason}"
    sender = "vLLM's API server" if setup.running is None else "kvobs's exporter"
    endpoint = tracing.endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT, "")
    return f"{_without_secrets(endpoint)}, from {sender}"


def _without_secrets(endpoint: str) -> str:
    address = endpoint.partition("?")[0]  # an endpoint of gRPC may have no scheme
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"
