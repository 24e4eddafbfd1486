"""Where an engine's metrics and spans go, and the set-ups of vLLM in which they get nowhere without the exporter.

One table, for vLLM's start and for `kvobs check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvobs.log import log
from kvobs.schema.config import EXPORTER_VARIABLE, PATH
from kvobs.schema.findings import Finding
from kvobs.schema.options import ExporterOptions, Options
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOWHERE = ("metrics", "tracing")
EXEMPLARS = ("exemplars",)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that decide where metrics and spans go.

    Args:
        exporter: kvobs's own exporter; None: they go through vLLM's stat logging to its API server.
        has_stats: whether vLLM's stat logging is on; None if unknown.
        has_rust_frontend: whether vLLM's Rust front end serves.
        api_servers: how many API servers vLLM starts.
        has_traces: whether anything is traced.
    """

    exporter: ExporterOptions | None = None
    has_stats: bool | None = None
    has_rust_frontend: bool = False
    api_servers: int = 1
    has_traces: bool = False

    @classmethod
    def of_engine(cls, options: Options, vllm_config: VllmConfig, *, has_traces: bool) -> Setup:
        """Return the set-up of the engine whose scheduler is being built."""
        parallel = vllm_config.parallel_config
        servers = getattr(parallel, "_api_process_count", 1)
        return cls(options.exporter, versions.has_stats(), versions.has_rust_frontend(), servers, has_traces)


class Case(NamedTuple):
    """A set-up in which something is lost without the exporter. ``found`` is formatted with the ``Setup``."""

    applies: Callable[[Setup], bool]
    path: str
    found: str
    lost: tuple[str, ...]
    instead: str
    """Another remedy than the exporter."""


CASES = (
    Case(
        lambda setup: setup.has_stats is False,
        "--disable-log-stats",
        "vLLM's stat logging is off (offline LLM(...) has it off by default): kvobs routes, but exports no metrics or "
        "spans",
        NOWHERE,
        "turn stat logging on",
    ),
    Case(
        lambda setup: setup.has_rust_frontend,
        f"environment variable {versions.RUST_FRONTEND}",
        "vLLM's Rust front end takes no metrics or spans of kvobs: kvobs routes, but exports none",
        NOWHERE,
        "unset the variable",
    ),
    Case(
        lambda setup: setup.api_servers > 1 and setup.has_traces,
        "--api-server-count",
        "found {0.api_servers}: no exemplars, since Prometheus's multiprocess mode has none",
        EXEMPLARS,
        "use 1",
    ),
)
"""The first that applies is reported."""


def findings(setup: Setup) -> list[Finding]:
    """Return a warning if something is lost; one is enough, since the exporter helps in every case."""
    case = _case(setup)
    if case is None:
        return []
    fix = f"set {PATH}.kvobs.exporter to {{}}, or {EXPORTER_VARIABLE}=127.0.0.1:9464 in the environment; or "
    return [Finding(case.path, case.found.format(setup), fix=fix + case.instead)]


def lost(setup: Setup) -> dict[str, str]:
    """Return each thing that is lost, with the reason."""
    case = _case(setup)
    return {} if case is None else dict.fromkeys(case.lost, case.path)


def metrics_go_to(setup: Setup) -> str:
    """Return where the metrics can be had, as text."""
    exporter = setup.exporter
    if exporter is None:
        reason = lost(setup).get("metrics")
        return "/metrics of vLLM's API server" if reason is None else f"nowhere: {reason}"
    by_otlp = ["by OTLP"] if exporter.otlp_metrics else []
    return " and ".join([*([url(exporter)] if exporter.port is not None else []), *by_otlp]) + ", from kvobs's exporter"


def spans_go_to(setup: Setup, endpoint: str | None) -> str:
    """Return where the spans go, as text; ``endpoint`` is that of traces."""
    if not setup.has_traces:
        return "nowhere: tracing is off"
    if setup.exporter is None and (reason := lost(setup).get("tracing")):
        return f"nowhere: {reason}"
    sender = "vLLM's API server" if setup.exporter is None else "kvobs's exporter"
    return f"{_without_secrets(endpoint or '')}, from {sender}"


def _without_secrets(endpoint: str) -> str:
    """Return an endpoint without user, password and query."""
    address = endpoint.partition("?")[0]
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def url(exporter: ExporterOptions) -> str:
    """Return the URL of an exporter's metrics, for the first engine of a host."""
    address = f"[{exporter.host}]" if ":" in exporter.host else exporter.host
    return f"http://{address}:{exporter.port}/metrics"


def warn_about(setup: Setup) -> None:
    """Log in one line which numbers are lost."""
    for finding in findings(setup):
        log.warning("%s", finding)


def _case(setup: Setup) -> Case | None:
    return None if setup.exporter is not None else next((case for case in CASES if case.applies(setup)), None)
