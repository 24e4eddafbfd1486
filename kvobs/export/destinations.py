"""Where an engine's metrics and spans go, and the set-ups of vLLM in which its API server can't show them.

There the exporter starts by itself. One table, for vLLM's start and for `kvobs check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvobs.log import log
from kvobs.schema.config import EXPORTER_VARIABLE, PATH
from kvobs.schema.findings import Finding
from kvobs.schema.options import ExporterOption, ExporterOptions, Options
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.telemetry.payload.wire import EngineInfo

NOWHERE = ("metrics", "tracing")
METRICS = ("metrics", "exemplars")


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that decide where metrics and spans go.

    Args:
        exporter: kvobs's option.
        has_stats: whether vLLM's stat logging is on; None if unknown.
        has_rust_frontend: whether vLLM's Rust front end serves.
        api_servers: how many API servers vLLM starts.
        has_multiprocess_metrics: whether they read the metrics from files.
        is_in_ray_actor: whether the metrics are Ray's.
        has_traces: whether anything is traced.
    """

    exporter: ExporterOption = "auto"
    has_stats: bool | None = None
    has_rust_frontend: bool = False
    api_servers: int = 1
    has_multiprocess_metrics: bool = False
    is_in_ray_actor: bool = False
    has_traces: bool = False

    @classmethod
    def of_engine(cls, options: Options, vllm_config: VllmConfig, *, has_traces: bool) -> Setup:
        """Return the set-up of the engine whose scheduler is being built."""
        return cls(
            options.exporter,
            versions.has_stats(),
            versions.has_rust_frontend(),
            versions.api_servers(vllm_config),
            versions.has_multiprocess_metrics(),
            versions.is_in_ray_actor(),
            has_traces,
        )

    @property
    def running(self) -> ExporterOptions | None:
        """Return the options of the exporter, if it runs."""
        if self.exporter == "auto":
            return None if _case(self) is None else ExporterOptions()
        return self.exporter


class Case(NamedTuple):
    """A set-up in which vLLM's API server can't show everything."""

    applies: Callable[[Setup], bool]
    path: str
    found: str
    lost: tuple[str, ...]
    """What is lost without the exporter."""
    instead: str
    """Another remedy than the exporter."""


CASES = (
    Case(
        lambda setup: setup.has_stats is False,
        "--disable-log-stats",
        "vLLM's stat logging is off (offline LLM(...) has it off by default)",
        NOWHERE,
        "turn stat logging on",
    ),
    Case(
        lambda setup: setup.has_rust_frontend,
        f"environment variable {versions.RUST_FRONTEND}",
        "vLLM's Rust front end takes no metrics or spans of kvobs",
        NOWHERE,
        "unset the variable",
    ),
    Case(
        lambda setup: setup.api_servers > 1,
        "--api-server-count",
        "several API servers share the numbers, and each shows files of prometheus_client only",
        METRICS,
        "use 1",
    ),
    Case(
        lambda setup: setup.has_multiprocess_metrics,
        f"environment variable {versions.MULTIPROCESS}",
        "it makes the API server show files of prometheus_client only",
        METRICS,
        "unset the variable",
    ),
    Case(
        lambda setup: setup.is_in_ray_actor,
        "Ray Serve",
        "an actor of Ray runs the engine, and shows metrics of Ray's own classes only",
        METRICS,
        "serve with `vllm serve`",
    ),
)
"""The first that applies is reported."""


def _case(setup: Setup) -> Case | None:
    """Return why the API server can't show everything; None if it can."""
    return next((case for case in CASES if case.applies(setup)), None)


def _loss(setup: Setup) -> Case | None:
    """Return why something is lost; None if nothing is."""
    return _case(setup) if setup.exporter is None else None


def _start(setup: Setup) -> Case | None:
    """Return why the exporter starts by itself; None if it does not."""
    return _case(setup) if setup.exporter == "auto" else None


def findings(setup: Setup) -> list[Finding]:
    """Return a warning if something is lost; one is enough, since the exporter helps in every case."""
    case = _loss(setup)
    if case is None:
        return []
    found = f"{case.found}, and kvobs.exporter is null: {' and '.join(case.lost)} are lost"
    return [
        Finding(case.path, found, fix=f"remove {PATH}.kvobs.exporter, which then starts by itself; or {case.instead}")
    ]


def lost(setup: Setup) -> dict[str, str]:
    """Return each thing that is lost, with the reason."""
    case = _loss(setup)
    return {} if case is None else dict.fromkeys(case.lost, case.path)


def metrics_go_to(setup: Setup) -> str:
    """Return where the metrics can be had, as text."""
    exporter = setup.running
    if exporter is None:
        reason = lost(setup).get("metrics")
        return "/metrics of vLLM's API server" if reason is None else f"nowhere: {reason}"
    by_otlp = ["by OTLP"] if exporter.otlp_metrics else []
    case = _start(setup)
    why = f", which starts by itself: {case.path}" if case is not None else ""
    places = [*([url(exporter.host, exporter.port)] if exporter.port is not None else []), *by_otlp]
    return f"{' and '.join(places)}, from kvobs's exporter{why}"


def spans_go_to(setup: Setup, endpoint: str | None) -> str:
    """Return where the spans go, as text; ``endpoint`` is that of traces."""
    if not setup.has_traces:
        return "nowhere: tracing is off"
    if reason := lost(setup).get("tracing"):
        return f"nowhere: {reason}"
    sender = "vLLM's API server" if setup.running is None else "kvobs's exporter"
    return f"{_without_secrets(endpoint or '')}, from {sender}"


def _without_secrets(endpoint: str) -> str:
    """Return an endpoint without user, password and query."""
    address = endpoint.partition("?")[0]
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def url(host_name: str, port: int) -> str:
    """Return the URL of an exporter's metrics."""
    return f"http://{f'[{host_name}]' if ':' in host_name else host_name}:{port}/metrics"


def announce(setup: Setup, engine: EngineInfo | None) -> None:
    """Log what is lost, or where the exporter that starts by itself can be reached, in one line."""
    for finding in findings(setup):
        log.warning("%s", finding)
    case = _start(setup)
    if case is not None and engine is not None and engine.port is not None:
        log.info(
            "kvobs's exporter starts by itself (%s: %s): metrics are at %s. To reach them from other machines set "
            "kvobs.exporter.host, or %s=0.0.0.0:%d in the environment",
            case.path,
            case.found,
            url(engine.host, engine.port),
            EXPORTER_VARIABLE,
            setup.running.port if setup.running is not None else engine.port,
        )
