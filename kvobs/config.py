"""Read the options under ``kv_connector_extra_config.kvobs``.

Every mistake is reported at once, each with the JSON path, what was found, and what is allowed.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvobs.findings import Finding, cut, show, unknown
from kvobs.hooks import HOOKS
from kvobs.signals import is_timed

__all__ = ["ConfigError", "Configuration", "ExporterOptions", "Options", "TimelineOptions", "TracingOptions", "read"]

PATH = "kv_connector_extra_config"
EXPORTER_VARIABLE = "KVOBS_EXPORTER"
"""Switches the exporter on without the option; the option counts where both are set."""
RESERVED_NAME = "kvobs"  # kvobs's entry in the stats payload
TIMED_HOOKS = tuple(hook.name for hook in HOOKS.values() if is_timed(hook))
_LISTED_AT_MOST = 15  # mistakes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,63}")


class ConfigError(ValueError):
    """The connector configuration has mistakes; the message lists them, one per line."""

    def __init__(self, mistakes: Iterable[Finding]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        listed = [str(mistake) for mistake in self.mistakes[:_LISTED_AT_MOST]]
        if len(self.mistakes) > _LISTED_AT_MOST:
            listed.append(f"{len(self.mistakes) - _LISTED_AT_MOST} more mistakes; kvobs check lists all")
        text = listed[0] if len(listed) == 1 else "".join(f"\n- {mistake}" for mistake in listed)
        return f"kvobs can't start with this --kv-transfer-config: {text}"


def _timed_hook(name: str) -> str:
    if name not in TIMED_HOOKS:
        raise PydanticCustomError("unknown_hook", "Input should be {hooks}", {"hooks": ", ".join(TIMED_HOOKS)})
    return name


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
HookName = Annotated[str, AfterValidator(_timed_hook)]


class TracingOptions(BaseModel):
    """The options under ``tracing``; they need an OTLP endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["off", "requests", "calls"] | None = Field(
        default=None,
        description="`requests`: spans of each sampled request, and of everything slow or failed; `calls`: also every "
        "call into every connector; default: `requests` if there is an OTLP endpoint",
    )
    layers: StrictBool = Field(
        default=False, description="with level `calls`: one span per layer instead of one for all layers of a step"
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
    mib: Annotated[int, Field(ge=1, le=1024, strict=True)] = Field(
        default=16, description="size of each process's file in MiB; the oldest records are overwritten"
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
    linger_s: Annotated[float, Field(ge=0, le=600, strict=True, allow_inf_nan=False)] = Field(
        default=15, description="how long the last numbers are served after an engine that was killed or crashed"
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
    slow_call_ms_by_hook: Mapping[HookName, Milliseconds] = Field(
        default={}, description="`slow_call_ms` for single hooks, by vLLM's name of the hook"
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
    aggregator: Literal["kvobs", "vllm"] = Field(
        default="kvobs", description="whose class combines the outputs of all workers in each step"
    )
    block_copy: Literal["auto", "kvobs", "vllm"] = Field(
        default="auto",
        description="whose operation copies blocks for connectors with a host buffer; `auto`: kvobs's if both sides "
        "are in host memory, else vLLM's",
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
    request_log_ratio: Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)] = Field(
        default=1, description="share of the requests that are in this log, by their ids"
    )
    timeline: TimelineOptions = Field(default=TimelineOptions(), description="the flight recorder")
    exporter: ExporterOptions | None = Field(
        default=None,
        description="a process beside the engine that serves metrics and exports spans in the place of vLLM's API "
        "server; `{}`: with its defaults",
    )

    def slow_ms(self, hook: str) -> float:
        """Return the duration above which a call of this hook is slow, in ms."""
        return self.slow_call_ms_by_hook.get(hook, self.slow_call_ms)


class Configuration(BaseModel):
    """A checked configuration: the options, and the children's names in the order of ``connectors``."""

    model_config = ConfigDict(frozen=True)

    options: Options
    names: tuple[str, ...]


def read(extra_config: Mapping[str, Any]) -> Configuration:
    """Check ``kv_connector_extra_config`` and return the options and the children's names.

    Raises:
        ConfigError: with every mistake found, each with its JSON path.
    """
    configuration, mistakes = validate(extra_config)
    if mistakes:
        raise ConfigError(mistakes)
    return configuration


def validate(extra_config: Mapping[str, Any]) -> tuple[Configuration, list[Finding]]:
    """Return the options and the children's names, and the mistakes; with mistakes, all options are the defaults."""
    mistakes: list[Finding] = []
    configured = _configured_connectors(extra_config, mistakes)
    is_complete = not mistakes
    options = _options(extra_config.get("kvobs", {}), mistakes)
    raw = extra_config.get("kvobs")
    if options.exporter is None and not (isinstance(raw, Mapping) and "exporter" in raw):
        options = options.model_copy(update={"exporter": _exporter_of_environment(mistakes)})
    names = _names(options.names, configured, mistakes)
    for option in ("isolate", "reset_after_failed_sync_load"):
        for i, name in enumerate(getattr(options, option)):
            if names and name not in names:
                allowed = ", ".join(map(repr, names))
                mistakes.append(Finding(f"{PATH}.kvobs.{option}[{i}]", f"found {show(name)}", allowed, _CORRECT))
    mistakes += [
        unknown("connector", f"{PATH}.kvobs.min_tokens.{cut(name)}", name, names, "remove it")
        for name in options.min_tokens
        if names and name not in names
    ]
    if options.wait_for == "earlier" and options.load_policy != "first":
        found = f"found 'earlier' with load_policy {options.load_policy!r}, which compares all answers"
        mistakes.append(Finding(f"{PATH}.kvobs.wait_for", found, "'all', or load_policy 'first'", _CORRECT))
    if not mistakes:
        return Configuration(options=options, names=names), mistakes
    names = _names((), configured, []) if is_complete else _any_names(extra_config.get("connectors"))
    return Configuration(options=Options(), names=names), mistakes


_CORRECT = "use an allowed value, or remove the option"
_UNSET = "use an allowed value, or unset the variable"


def _configured_connectors(extra_config: Mapping[str, Any], mistakes: list[Finding]) -> list[str]:
    """Return each child's configured ``kv_connector``; invalid ones are reported and omitted."""
    path = f"{PATH}.connectors"
    connectors = extra_config.get("connectors")
    if not isinstance(connectors, list | tuple) or not connectors:
        found = "is missing" if "connectors" not in extra_config else f"found {_kind(connectors)}"
        example = '[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]'
        allowed = f"a list with at least one connector, such as {example}"
        mistakes.append(Finding(path, found, allowed, "list the connectors as objects"))
        return []
    configured = []
    for i, connector in enumerate(connectors):
        if not isinstance(connector, Mapping):
            found, allowed = f"found {_kind(connector)}", "an object with the key 'kv_connector'"
            mistakes.append(Finding(f"{path}[{i}]", found, allowed, "list the connectors as objects"))
        elif not isinstance(connector.get("kv_connector"), str) or not connector["kv_connector"]:
            found = f"found {show(connector['kv_connector'])}" if "kv_connector" in connector else "is missing"
            allowed, fix = "the name of a connector class", "name the class of the connector"
            mistakes.append(Finding(f"{path}[{i}].kv_connector", found, allowed, fix))
        else:
            configured.append(connector["kv_connector"])
    return configured


def _options(raw: Any, mistakes: list[Finding]) -> Options:
    path = f"{PATH}.kvobs"
    if not isinstance(raw, Mapping):
        allowed = f"an object with any of: {', '.join(map(repr, _known_options()))}"
        mistakes.append(Finding(path, f"found {show(raw)}", allowed, _CORRECT))
        return Options()
    try:
        return Options.model_validate(dict(raw))
    except ValidationError as error:
        for detail in error.errors():
            loc = [part if isinstance(part, int) else cut(part) for part in detail["loc"] if part != "[key]"]
            where = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
            if detail["type"] == "extra_forbidden":
                mistakes.append(unknown("option", where, str(loc[-1]), _known_options(loc), "remove it"))
            else:
                problem, allowed = explain(detail["type"], detail["msg"])
                mistakes.append(Finding(where, f"found {show(detail['input'])}{problem}", allowed, _CORRECT))
        return Options()


def _exporter_of_environment(mistakes: list[Finding]) -> ExporterOptions | None:
    """Return the exporter that the environment asks for, if any: HOST:PORT."""
    value = os.environ.get(EXPORTER_VARIABLE, "")
    if not value:
        return None
    host, _, port = value.rpartition(":")
    try:
        return ExporterOptions(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    except ValueError:
        allowed = "HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:9464"
        mistakes.append(Finding(f"environment variable {EXPORTER_VARIABLE}", f"found {show(value)}", allowed, _UNSET))
        return None


def _names(given: Sequence[str], configured: Sequence[str], mistakes: list[Finding]) -> tuple[str, ...]:
    """Name every child: by its entry in ``names``, otherwise its ``kv_connector``, numbered if repeated."""
    path = f"{PATH}.kvobs.names"
    if configured and len(given) > len(configured):
        allowed = f"at most {len(configured)}, one per connector"
        mistakes.append(Finding(path, f"found {len(given)} names", allowed, "remove the others"))
    for i, name in enumerate(given):
        if name == RESERVED_NAME:
            mistakes.append(Finding(f"{path}[{i}]", f"found {name!r}, which is reserved", fix="choose another name"))
        elif not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits and . _ : / + -, beginning with a letter or digit"
            mistakes.append(Finding(f"{path}[{i}]", f"found {show(name)}", allowed, "choose another name"))
    names = list(given[: len(configured)])
    for connector in configured[len(names) :]:
        candidates = (connector if n == 1 else f"{connector}-{n}" for n in count(1))
        names.append(next(name for name in candidates if name not in names and name != RESERVED_NAME))
    for name, times in Counter(names).items():
        if times > 1:
            found = f"found {show(name)} for {times} connectors"
            mistakes.append(Finding(path, found, "a distinct name for each", "choose other names"))
    return tuple(names)


def _any_names(connectors: Any) -> tuple[str, ...]:
    """Return a name for each entry of ``connectors``, some of which are invalid."""
    entries = connectors if isinstance(connectors, list | tuple) else ()
    return tuple(
        str(entry.get("kv_connector", i)) if isinstance(entry, Mapping) else str(i) for i, entry in enumerate(entries)
    )


def _known_options(loc: Sequence[int | str] = ()) -> list[str]:
    """Return the valid options at the place of an unknown one."""
    return list((_NESTED[str(loc[0])] if len(loc) > 1 else Options).model_fields)


_NESTED: dict[str, type[BaseModel]] = {
    "tracing": TracingOptions,
    "timeline": TimelineOptions,
    "exporter": ExporterOptions,
}


def explain(kind: str, message: str) -> tuple[str, str]:
    """Return the problem (beginning with a comma, or empty) and the allowed values of one of pydantic's errors."""
    if kind in ("model_type", "mapping_type", "dict_type"):
        return "", "an object"
    before, should_be, allowed = message.removeprefix("Value error, ").partition("Input should be ")
    return (f", {before}" if before else ""), allowed if should_be else ""


def _kind(value: Any) -> str:
    """Describe a value at a child's place by its type only if it may hold credentials."""
    return (
        f"a value of type {type(value).__name__}"
        if isinstance(value, Mapping | list | tuple) and value
        else show(value)
    )
