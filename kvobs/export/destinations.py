"""Where an engine's metrics and spans go, and the set-ups of vLLM in which its API server can't show them.

There the exporter starts by itself. One table, for vLLM's start and for `kvobs check`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvobs.log import log
from kvobs.schema.config import EXPORTER_VARIABLE, PATH
from kvobs.schema.findings import Finding
from kvobs.schema.options import ExporterOption, ExporterOptions, Options
from kvobs.telemetry.payload.wire import exporter_url
from kvobs.telemetry.tracing.sampling import ENDPOINT, TRACES_ENDPOINT, TracingSettings
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.telemetry.payload.wire import EngineInfo

NOWHERE = ("metrics", "tracing")
METRICS = ("metrics", "exemplars")


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that decide where metrics and spans go."""

    exporter: ExporterOption = "auto"
    has_stats: bool | None = None  # whether vLLM's stat logging is on; None if unknown
    has_rust_frontend: bool = False
    api_servers: int = 1
    has_multiprocess_metrics: bool = False  # whether the API servers read the metrics from files
    is_in_ray_actor: bool = False  # whether the metrics are Ray's
    has_core: bool = True  # whether EngineCore is on this host

    @classmethod
    def of_engine(cls, options: Options, vllm_config: VllmConfig) -> Setup:
        """Return the set-up of the engine whose scheduler is being built."""
        return cls(
            options.exporter,
            versions.has_stats(),
            versions.has_rust_frontend(),
            versions.api_servers(vllm_config),
            versions.has_multiprocess_metrics(),
            versions.is_in_ray_actor(),
        )

    @property
    def running(self) -> ExporterOptions | None:
        """Return the options of the exporter, if it runs."""
        if self.exporter == "auto":
            return None if case_of(self) is None else ExporterOptions()
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
    Case(lambda setup: not setup.has_core, "ranks on several hosts",
         "EngineCore is on another host, where nothing sees the calls and the end of the ranks here",
         ("calls that hang", "ends"), "run all ranks on one host"),
    Case(lambda setup: setup.has_stats is False, "--disable-log-stats",
         "vLLM's stat logging is off (offline LLM(...) has it off by default)", NOWHERE, "turn stat logging on"),
    Case(lambda setup: setup.has_rust_frontend, f"environment variable {versions.RUST_FRONTEND}",
         "vLLM's Rust front end takes no metrics or spans of kvobs", NOWHERE, "unset the variable"),
    Case(lambda setup: setup.api_servers > 1, "--api-server-count",
         "several API servers share the numbers, and each shows files of prometheus_client only", METRICS, "use 1"),
    Case(lambda setup: setup.has_multiprocess_metrics, f"environment variable {versions.MULTIPROCESS}",
         "it makes the API server show files of prometheus_client only", METRICS, "unset the variable"),
    Case(lambda setup: setup.is_in_ray_actor, "Ray Serve",
         "an actor of Ray runs the engine, and shows metrics of Ray's own classes only", METRICS,
         "serve with `vllm serve`"),
)  # fmt: skip
"""The first that applies is reported."""


def case_of(setup: Setup, exporter: ExporterOption = "auto") -> Case | None:
    """Return why the API server can't show everything; None if it can, or if the option is another."""
    return next((case for case in CASES if setup.exporter == exporter and case.applies(setup)), None)


def findings(setup: Setup) -> list[Finding]:
    """Return a warning if something is lost; one is enough, since the exporter helps in every case."""
    case = case_of(setup, None)
    if case is None:
        return []
    found = f"{case.found}, and kvobs.exporter is null: {' and '.join(case.lost)} are lost"
    return [
        Finding(case.path, found, fix=f"remove {PATH}.kvobs.exporter, which then starts by itself; or {case.instead}")
    ]


def losses(setup: Setup) -> dict[str, str]:
    """Return each thing that is lost, with the reason."""
    case = case_of(setup, None)
    return {} if case is None else dict.fromkeys(case.lost, case.path)


def metrics_go_to(setup: Setup, engine: int = 0) -> str:
    """Return where the metrics of this engine of the host are, as text."""
    if (exporter := setup.running) is None:
        reason = losses(setup).get("metrics")
        return "/metrics of vLLM's API server" if reason is None else f"nowhere: {reason}"
    by_otlp = ["by OTLP"] if exporter.otlp_metrics else []
    case = case_of(setup)
    why = f", which starts by itself: {case.path}" if case is not None else ""
    port = exporter.port
    pages = [exporter_url(exporter.host, port + engine, exporter.web_config)] if port is not None else []
    return f"{' and '.join(pages + by_otlp)}, from kvobs's exporter{why}"


def spans_go_to(setup: Setup, tracing: TracingSettings | None) -> str:
    """Return where the spans go, as text."""
    if tracing is None:
        return "nowhere: tracing is off"
    if reason := losses(setup).get("tracing"):
        return f"nowhere: {reason}"
    sender = "vLLM's API server" if setup.running is None else "kvobs's exporter"
    return f"{endpoint_shown(tracing.endpoint)}, from {sender}"


def endpoint_shown(endpoint: str | None) -> str:
    """Return the endpoint of spans, vLLM's option or the environment's, without what may be secret."""
    endpoint = endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT, "")
    address = endpoint.partition("?")[0]  # an endpoint of gRPC may have no scheme
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def announce(setup: Setup, engine: EngineInfo | None) -> None:
    """Log what is lost, or where the exporter that starts by itself can be reached, in one line."""
    for finding in findings(setup):
        log.warning("%s", finding)
    case = case_of(setup)
    if case is not None and engine is not None and engine.port is not None:
        page = exporter_url(engine.host, engine.port, engine.web_config)
        port = setup.running.port if setup.running is not None else engine.port
        text = (
            "kvobs's exporter starts by itself (%s: %s): metrics are at %s. To reach them from other machines set "
            "kvobs.exporter.host, or %s=0.0.0.0:%d in the environment"
        )
        log.info(text, case.path, case.found, page, EXPORTER_VARIABLE, port)
