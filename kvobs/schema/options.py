"""List the options of kvobs with names, types, defaults and descriptions; docs/options.md shows them as a table."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvobs.schema.verdicts import RUNBOOK


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise PydanticCustomError("relative_path", "Input should be an absolute path")
    return path


def _log_output(name: str) -> str:
    if name != "stderr" and (not name.startswith("/") or "\0" in name):
        raise PydanticCustomError("log_output", "Input should be 'stderr', or an absolute path")
    return name


def _web_address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise PydanticCustomError("web_address", "Input should be an address with http:// or https://")
    return url


Positive = Annotated[float, Field(gt=0, le=10**9, strict=True, allow_inf_nan=False)]
"""The limit keeps times in nanoseconds within 64 bits."""
Tokens = Annotated[int, Field(ge=1, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TracingOptions(_Strict):
    """The options under ``tracing``; they need an OTLP endpoint."""

    level: Literal["off", "requests", "calls"] | None = Field(
        default=None,
        description="`requests`: writes spans for sampled requests, and for everything slow or failed; `calls`: also "
        "for every call; `off`: no spans; default: `requests` if an OTLP endpoint is configured",
    )
    propagate: StrictBool = Field(
        default=False,
        description="runs calls about a request in its trace context, for connectors that create spans themselves",
    )


class VerifyOptions(_Strict):
    """The options under ``verify``."""

    sample_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] | None = Field(
        default=None,
        description="compares this share of the loaded blocks with the bytes that vLLM computed for "
        "the same tokens; 0.01 costs little, 1 compares every block",
    )
    on_mismatch: Literal["report", "recompute"] = Field(
        default="report",
        description="`report`: only reports a wrong block; `recompute`: fails the asynchronous load, so that vLLM "
        "(0.30 and newer) recomputes its tokens. It needs `sample_ratio`, and `kv_load_failure_policy` `recompute` at "
        "the top level",
    )

    @property
    def recomputes(self) -> bool:
        """Whether an asynchronous load with a wrong block fails."""
        return self.on_mismatch == "recompute"


class ExporterOptions(_Strict):
    """The options of the exporter, a separate process next to the engines of a server."""

    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = Field(
        default=9464,
        description="serves `/metrics`, `/healthz` and a status page of all engines of a server on one host at this "
        "port; `null`: serves nothing, and needs `otlp_metrics`",
    )
    host: Annotated[StrictStr, Field(min_length=1)] = Field(
        default="127.0.0.1", description="listens on this address; `0.0.0.0`: on all addresses of this machine"
    )
    web_config: Annotated[StrictStr, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="serves HTTPS with the `tls_server_config` of this file, in the format of Prometheus exporters; "
        "it can require client certificates",
    )
    otlp_metrics: StrictBool = Field(
        default=False, description="also sends the metrics by OTLP, configured by the OTEL_EXPORTER_OTLP_* variables"
    )
    request_ids: StrictBool = Field(
        default=False,
        description="shows request ids on the [status page](exporter.md#status-page) to every client; by default only "
        "to clients of a loopback address without a proxy",
    )
    runbook: Annotated[StrictStr, AfterValidator(_web_address)] = Field(
        default=RUNBOOK, description="links the status page to this copy of the runbook"
    )

    @model_validator(mode="after")
    def _exports(self) -> "ExporterOptions":
        if self.port is None and not self.otlp_metrics:
            raise PydanticCustomError("no_export", "Input should be a port, or null with otlp_metrics true")
        return self


def _kind(exporter: Any) -> str | None:
    if isinstance(exporter, Mapping | ExporterOptions):
        return "[options]"
    return "[never]" if exporter is None else "[auto]" if exporter == "auto" else None


ExporterOption = Annotated[
    Annotated[Literal["auto"], Tag("[auto]")]
    | Annotated[ExporterOptions, Tag("[options]")]
    | Annotated[None, Tag("[never]")],
    Discriminator(
        _kind, custom_error_type="exporter", custom_error_message="Input should be 'auto', an object, or null"
    ),
]
"""The option ``exporter``; the tags keep errors of the other kinds out of the messages."""


class Options(_Strict):
    """The options of kvobs. All have defaults: an empty configuration is valid."""

    names: tuple[StrictStr, ...] = Field(
        default=(), description="names the connectors, in the order of `connectors`; default: their `kv_connector`"
    )
    load_policy: Literal["first", "longest"] = Field(
        default="first",
        description="chooses the connector that loads a request: `first`, the first with a hit; `longest`, the one "
        "with the longest hit",
    )
    min_tokens: Mapping[StrictStr, Tokens] = Field(
        default={},
        description="sets how many tokens a connector must offer to load a request, by its name; tokens in vLLM's "
        "own prefix cache do not count",
    )
    wait_for: Literal["all", "earlier"] = Field(
        default="all",
        description="`all`: a lookup waits for the answers of all connectors, as in vLLM's own MultiConnector; "
        "`earlier`: it waits only for connectors listed before the first one with a hit. A connector that "
        "answers later neither saves that request nor loads it within a step",
    )
    lookup_timeout_ms: Positive | None = Field(
        default=None,
        description="limits how long a connector may answer 'not yet'; after that another connector may load the "
        "request, and this one neither saves it nor loads it within a step",
    )
    slow_call_ms: Positive = Field(
        default=100, description="counts and traces longer calls into a connector as slow, and logs the first one"
    )
    slow_load_ms: Positive = Field(
        default=1000,
        description="traces longer loads, even if their request is not sampled; logs the first one, and a warning "
        "when there are many",
    )
    stuck_after_s: Positive = Field(
        default=60,
        description="logs and counts a load or promised save as stuck if a rank has not reported it this long "
        "after another rank",
    )
    link_gbps: Mapping[StrictStr, Positive] = Field(
        default={},
        description="sets the speed of a connector's links, by its name: in Gbit/s, like a NIC, for all ranks of an "
        "engine together. Dashboards and an alert compare loads with it",
    )
    best_effort: tuple[StrictStr, ...] = Field(
        default=(),
        description="names best-effort connectors: one that fails gets no new requests for a while, instead of "
        "crashing the engine. A request whose load it may have started waits up to 10 s, then another connector loads "
        "it, or vLLM computes it. Needs `kv_load_failure_policy` `recompute` at the top level. Synchronous loads of "
        "these connectors are used only if no other connector saves",
    )
    best_effort_slow_ms: Positive = Field(
        default=1000,
        description="counts a longer call of the scheduler's step into a best-effort connector as a failure",
    )
    tracing: TracingOptions = Field(default=TracingOptions(), description="OpenTelemetry spans")
    verify: VerifyOptions = Field(default=VerifyOptions(), description="comparison of loaded bytes")
    request_report: StrictBool = Field(
        default=False,
        description="writes into the response's `kv_transfer_params.kvobs` which connector loaded how many tokens, "
        'for clients that request it with `{"kvobs": {"report": true}}` there',
    )
    request_log: Annotated[StrictStr, AfterValidator(_log_output)] | None = Field(
        default=None,
        description="appends the same report as a JSON line for each finished request to this file, or to `stderr`",
    )
    exporter: ExporterOption = Field(
        default="auto",
        description="a separate process that serves metrics and exports spans instead of vLLM's API server; `auto`: "
        "starts it if no such server exposes them 20 s after the engine's start; `{}`: always starts it, with "
        "its defaults; `null`: never starts it",
    )

    @property
    def compares_answers(self) -> bool:
        """Whether the load policy compares, and so waits for, all connectors' answers."""
        return self.load_policy != "first"


GONE = {
    "isolate": "use best_effort",
    "isolate_slow_ms": "use best_effort_slow_ms",
    "report": "use request_report",
    "verify.share": "use verify.sample_ratio",
    "verify.fail": 'use verify.on_mismatch: "recompute" for true, "report" for false',
    "reset_after_failed_sync_load": "remove it. After a failed synchronous load, clear the caches of the connectors "
    "that the log names; kv_load_failure_policy 'fail' at the top level prevents a wrong answer of its request",
}
"""Options of earlier versions -> what to do instead."""
