"""Read the options under ``kv_connector_extra_config.kvobs``.

Every mistake is reported at once, each with the JSON path, what was found, and what is allowed.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from kvobs.hooks import HOOKS
from kvobs.signals import is_timed

PATH = "kv_connector_extra_config"
RESERVED_NAME = "kvobs"  # kvobs's own entry in the stats payload
TIMED_HOOKS = tuple(hook.name for hook in HOOKS.values() if is_timed(hook))
_SHOWN_AT_MOST = 80  # characters of a wrong value
_LISTED_AT_MOST = 15  # mistakes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,63}")


class ConfigError(ValueError):
    """Mistakes in the connector configuration: one on the message's only line, or a list with a line for each."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes[:_LISTED_AT_MOST])
        if len(mistakes) > _LISTED_AT_MOST:
            self.mistakes += (f"{PATH}: {len(mistakes) - _LISTED_AT_MOST} mistakes more",)
        mistakes = self.mistakes
        listed = mistakes[0] if len(mistakes) == 1 else "".join(f"\n- {mistake}" for mistake in mistakes)
        super().__init__(f"kvobs can't start with this --kv-transfer-config: {listed}")


def _timed_hook(name: str) -> str:
    if name not in TIMED_HOOKS:
        raise ValueError(f"unknown hook, allowed: {', '.join(TIMED_HOOKS)}")
    return name


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("allowed: an absolute path")
    return path


Milliseconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
HookName = Annotated[str, AfterValidator(_timed_hook)]


class TracingOptions(BaseModel):
    """What is traced, where there is an OTLP endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["off", "requests", "calls"] | None = Field(
        default=None,
        description="`requests`: spans of each sampled request, and of all that is slow or fails; `calls`: every call "
        "into every child too; by default `requests` where there is an OTLP endpoint",
    )
    layers: StrictBool = Field(
        default=False, description="with level `calls`: a span for each layer, not one for all of a step's layers"
    )
    propagate: StrictBool = Field(
        default=False,
        description="run calls about a request with its trace context current, for children with spans of their own",
    )


class TimelineOptions(BaseModel):
    """The flight recorder: the last calls of each process, in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: Annotated[StrictStr, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="folder of the recordings, on each machine; made if it is not there; `null`: nothing is recorded",
    )
    mib: Annotated[int, Field(ge=1, le=1024, strict=True)] = Field(
        default=16, description="size of each process's file in MiB; the oldest records are overwritten"
    )


class Options(BaseModel):
    """The options of kvobs. Every one has a default: no key at all is a valid configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[StrictStr, ...] = Field(
        default=(), description="names of the children, in the order of `connectors`; children without one keep theirs"
    )
    load_policy: Literal["first", "longest"] = Field(
        default="first", description="which child loads a request: the first with a hit, or the one with the longest"
    )
    lookup_timeout_ms: Milliseconds | None = Field(
        default=None, description="how long a child may answer 'not yet' before others may load in its stead"
    )
    slow_call_ms: Milliseconds = Field(
        default=100,
        description="a call into a child that takes longer is counted as slow, traced, and the first logged",
    )
    slow_call_ms_by_hook: Mapping[HookName, Milliseconds] = Field(
        default={}, description="the same for single hooks, by vLLM's names of them"
    )
    slow_load_ms: Milliseconds = Field(
        default=1000, description="a load that takes longer is traced, whatever was sampled"
    )
    stuck_after_s: Seconds = Field(
        default=60,
        description="a load or promised save that one rank reported so long ago and another never did is logged and "
        "counted as stuck",
    )
    isolate: tuple[StrictStr, ...] = Field(
        default=(),
        description="names of best-effort children: one that fails is left out for a while instead of ending the "
        "engine; they load asynchronously only, and need `kv_load_failure_policy` `recompute` at the top level",
    )
    aggregator: Literal["kvobs", "vllm"] = Field(
        default="kvobs", description="whose class puts the outputs of all workers together in each step"
    )
    block_copy: Literal["auto", "kvobs", "vllm"] = Field(
        default="auto",
        description="whose operation copies blocks for children with a host buffer; `auto`: kvobs's where both sides "
        "are in host memory, else vLLM's",
    )
    tracing: TracingOptions = Field(default=TracingOptions(), description="OpenTelemetry spans")
    timeline: TimelineOptions = Field(default=TimelineOptions(), description="the flight recorder")

    def slow_ms(self, hook: str) -> float:
        """Return from which duration on a call of this hook is slow, in ms."""
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
    mistakes: list[str] = []
    configured = _configured_connectors(extra_config, mistakes)
    options = _options(extra_config.get("kvobs", {}), mistakes)
    names = _names(options.names, configured, mistakes)
    for i, name in enumerate(options.isolate):
        if names and name not in names:
            mistakes.append(f"{PATH}.kvobs.isolate[{i}]: found {_show(name)}, allowed: {', '.join(map(repr, names))}")
    if mistakes:
        raise ConfigError(mistakes)
    return Configuration(options=options, names=names)


def _configured_connectors(extra_config: Mapping[str, Any], mistakes: list[str]) -> list[str]:
    """Return each child's configured ``kv_connector``; one that is not usable is reported and left out."""
    path = f"{PATH}.connectors"
    wanted = (
        'a list with at least one connector, such as [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
    )
    connectors = extra_config.get("connectors")
    if not isinstance(connectors, list | tuple) or not connectors:
        found = "nothing" if "connectors" not in extra_config else _kind(connectors)
        mistakes.append(f"{path}: found {found}, needs {wanted}")
        return []
    configured = []
    for i, connector in enumerate(connectors):
        if not isinstance(connector, Mapping):
            mistakes.append(f"{path}[{i}]: found {_kind(connector)}, needs an object with the key 'kv_connector'")
        elif not isinstance(connector.get("kv_connector"), str) or not connector["kv_connector"]:
            found = _show(connector["kv_connector"]) if "kv_connector" in connector else "nothing"
            mistakes.append(f"{path}[{i}].kv_connector: found {found}, needs the name of a connector class")
        else:
            configured.append(connector["kv_connector"])
    return configured


def _options(raw: Any, mistakes: list[str]) -> Options:
    path = f"{PATH}.kvobs"
    if not isinstance(raw, Mapping):
        mistakes.append(f"{path}: found {_show(raw)}, needs an object with any of: {_known_options()}")
        return Options()
    try:
        return Options.model_validate(dict(raw))
    except ValidationError as error:
        for detail in error.errors():
            loc = [part if isinstance(part, int) else _cut(part) for part in detail["loc"] if part != "[key]"]
            where = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
            if detail["type"] == "extra_forbidden":
                mistakes.append(f"{where}: unknown option, allowed: {_known_options(loc)}")
            else:
                mistakes.append(f"{where}: found {_show(detail['input'])}, {_allowed(detail['type'], detail['msg'])}")
        return Options()


def _names(given: Sequence[str], configured: Sequence[str], mistakes: list[str]) -> tuple[str, ...]:
    """Name every child: its entry in ``names``, else its configured ``kv_connector``, numbered when repeated."""
    path = f"{PATH}.kvobs.names"
    if configured and len(given) > len(configured):
        mistakes.append(f"{path}: found {len(given)} names, allowed: at most {len(configured)}, one per connector")
    for i, name in enumerate(given):
        if name == RESERVED_NAME:
            mistakes.append(f"{path}[{i}]: found {name!r}, which kvobs keeps for itself; choose another name")
        elif not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits and . _ : / + -, beginning with a letter or digit"
            mistakes.append(f"{path}[{i}]: found {_show(name)}, allowed: {allowed}")
    names = list(given[: len(configured)])
    for connector in configured[len(names) :]:
        candidates = (connector if n == 1 else f"{connector}-{n}" for n in count(1))
        names.append(next(name for name in candidates if name not in names and name != RESERVED_NAME))
    for name, times in Counter(names).items():
        if times > 1:
            mistakes.append(f"{path}: found {name!r} for {times} connectors, needs a different name for each")
    return tuple(names)


def _known_options(loc: Sequence[int | str] = ()) -> str:
    """List the options there are where one was found."""
    found = getattr(Options(), str(loc[0])) if len(loc) > 1 else Options()
    return ", ".join(repr(name) for name in type(found).model_fields)


def _allowed(kind: str, message: str) -> str:
    """Turn pydantic's wording into ours: what is allowed, in lower case."""
    if kind in ("model_type", "mapping_type", "dict_type"):
        return "allowed: an object"
    message = message.replace("Input should be", "allowed:").replace("Input should", "should")
    return message.removeprefix("Value error, ")


def _show(value: Any) -> str:
    return _cut(repr(value))


def _kind(value: Any) -> str:
    """Tell what stands where a child should, and no more: it may hold credentials."""
    return (
        f"a value of type {type(value).__name__}"
        if isinstance(value, Mapping | list | tuple) and value
        else _show(value)
    )


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_AT_MOST else text[:_SHOWN_AT_MOST] + "..."
