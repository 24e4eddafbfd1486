"""The options of kvobs: names, types, defaults, and what each does; the README's table is made of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise PydanticCustomError("relative_path", "Input should be an absolute path")
    return path


def _who_is_answered(report: Any) -> Any:
    if not isinstance(report, bool) and report != "always":
        raise PydanticCustomError("report", "Input should be true, false or 'always'")
    return report


def _log_output(name: str) -> str:
    if name != "stderr" and (not name.startswith("/") or "\0" in name):
        raise PydanticCustomError("log_output", "Input should be 'stderr', or an absolute path")
    return name


Milliseconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, strict=True)]


class TracingOptions(BaseModel):
    """The options under ``tracing``; they need an OTLP endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["off", "requests", "calls"] | None = Field(
        default=None,
        description="`requests`: spans of each sampled request, and of everything slow or failed; `calls`: also every "
        "call into every connector; default: `requests` if there is an OTLP endpoint",
    )
    propagate: StrictBool = Field(
        default=False,
        description="run calls about a request in its trace context, for connectors that create spans of their own",
    )


class TimelineOptions(BaseModel):
    """The options of the flight recorder, which keeps the last calls of each process in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: Annotated[StrictStr, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="folder of the recordings, on each machine; created if missing; `null`: nothing is recorded",
    )


class ExporterOptions(BaseModel):
    """The options of the exporter, a process of kvobs's own beside each engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = Field(
        default=9464,
        description="where `/metrics` and `/healthz` are served; engine i of a data-parallel group on one host uses "
        "port + i; `null`: nowhere, which needs `otlp_metrics`",
    )
    host: Annotated[StrictStr, Field(min_length=1)] = Field(
        default="127.0.0.1", description="address to listen on; `0.0.0.0`: all of this machine"
    )
    otlp_metrics: StrictBool = Field(
        default=False, description="also send the metrics by OTLP, as the OTEL_EXPORTER_OTLP_* variables say"
    )

    @model_validator(mode="after")
    def _exports(self) -> "ExporterOptions":
        if self.port is None and not self.otlp_metrics:
            raise PydanticCustomError("no_export", "Input should be a port, or null with otlp_metrics true")
        return self


class Options(BaseModel):
    """The options of kvobs. All have defaults: an empty configuration is valid."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[StrictStr, ...] = Field(
        default=(), description="names of the connectors, in the order of `connectors`; default: their `kv_connector`"
    )
    load_policy: Literal["first", "longest", "fastest"] = Field(
        default="first",
        description="which connector loads a request: the first with a hit; the one with the longest hit; or the one "
        "with which the request is predicted to resume first, none if computing is quicker",
    )
    min_tokens: Mapping[StrictStr, Tokens] = Field(
        default={},
        description="by connector's name: it loads a request only if it offers at least so many tokens, beyond those "
        "in vLLM's own prefix cache",
    )
    wait_for: Literal["all", "earlier"] = Field(
        default="all",
        description="whose answers a lookup waits for: `all` connectors', as in vLLM's own MultiConnector; or only "
        "those of connectors before the first with a hit (one that answers later does not save that request)",
    )
    lookup_timeout_ms: Milliseconds | None = Field(
        default=None,
        description="how long a connector may answer 'not yet' before another one may load instead (it then does not "
        "save that request)",
    )
    slow_call_ms: Milliseconds = Field(
        default=100,
        description="a longer call into a connector is counted as slow and traced; the first is logged",
    )
    slow_load_ms: Milliseconds = Field(
        default=1000, description="a longer load is traced even if its request is not sampled"
    )
    stuck_after_s: Seconds = Field(
        default=60,
        description="a load or promised save that one rank has not reported this long after another rank is logged and "
        "counted as stuck",
    )
    isolate: tuple[StrictStr, ...] = Field(
        default=(),
        description="names of best-effort connectors: one that fails goes into quarantine (it gets no new requests for "
        "a while) instead of ending the engine; needs `kv_load_failure_policy` `recompute` at the top level. Their "
        "synchronous loads are used only if no other connector saves",
    )
    isolate_slow_ms: Milliseconds = Field(
        default=1000,
        description="a longer call into an isolated connector within the scheduler's step counts as a failure",
    )
    reset_after_failed_sync_load: tuple[StrictStr, ...] = Field(
        default=(),
        description="names of connectors whose `reset_cache` is called after a failed synchronous load of another one. "
        "It deletes their cache; that of a shared store (MooncakeStore, LMCache) for all engines that use it",
    )
    tracing: TracingOptions = Field(default=TracingOptions(), description="OpenTelemetry spans")
    report: Annotated[Literal[False, True, "always"], BeforeValidator(_who_is_answered)] = Field(
        default=False,
        description="report in the response's `kv_transfer_params.kvobs` which connector loaded how many tokens: to "
        'clients that ask by `{"kvobs": {"report": true}}` there, or `always`',
    )
    request_log: Annotated[StrictStr, AfterValidator(_log_output)] | None = Field(
        default=None, description="file, or `stderr`, that gets the same as a JSON line for each finished request"
    )
    timeline: TimelineOptions = Field(default=TimelineOptions(), description="the flight recorder")
    exporter: ExporterOptions | None = Field(
        default=None,
        description="a process beside the engine that serves metrics and exports spans in the place of vLLM's API "
        "server; `{}`: with its defaults",
    )

    @property
    def compares_answers(self) -> bool:
        """Whether the load policy compares the answers of all connectors, and so waits for all."""
        return self.load_policy != "first"
