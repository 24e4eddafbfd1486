"""Read vLLM's options next to a configuration, and find what they and the engine's variables mean for its check."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from kvobs.connectors.known import OURS, ROUTER
from kvobs.connectors.sync_loads import SAFE, Conditions
from kvobs.schema import kinds
from kvobs.schema.config import PATH, is_enabled
from kvobs.schema.findings import Finding, Kind
from kvobs.vllm_api.versions import V2_RUNNER

LAUNCHER, RAY, DYNAMO_VLLM = "launcher", "engine_kwargs", "dynamo.vllm"
"""The key among the options that names what starts the engine, and its values; without it `vllm serve` does."""
SIZE = "kv-offloading-size"
PORTS, GIB = 1 << 16, 1 << 30
NIXL_PORT, _DYNAMO_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT", "DYN_SYSTEM_PORT"
CONTAINER = "kvobs container"
"""A mark among the variables of an engine whose container has a network without Prometheus."""
IMAGE = "kvobs stock image"  # such a mark, with the image that somebody else publishes
ELSEWHERE = "kvobs image"  # such a mark: the engine runs in an image, which has its own libraries
HOST_NETWORK = "kvobs host network"  # such a mark: the pod or container has no network of its own
ALONE = "kvobs own network"  # such a mark: the container has a network of its own
MORE = "kvobs further variables"  # such a mark: of a Secret or a file, or set by who makes the container
MEMORY = "kvobs memory limit"  # such a mark, with the limit of the container's memory, as Kubernetes writes it
SHARED = "kvobs shared memory limit"  # the same of its /dev/shm
_NUMBERS = {
    *("port", "api-server-count", "data-parallel-size", "data-parallel-size-local", "data-parallel-rpc-port"),
    "pipeline-parallel-size",
}
_SHORT = {
    "asc": "api-server-count", "dp": "data-parallel-size", "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb", "dpl": "data-parallel-size-local", "dpn": "data-parallel-rank",
    "dpm": "data-parallel-multi-port-external-lb", "dpp": "data-parallel-rpc-port", "dpr": "data-parallel-start-rank",
    "pp": "pipeline-parallel-size", "tp": "tensor-parallel-size",
}  # fmt: skip


class UnreadableError(ValueError):
    """Raised for a text that is not a configuration, or can't be read here: the finding has the reason."""

    def __init__(self, kind: Kind, **values: Any) -> None:
        self.finding = kind.at("CONFIG", **values)
        super().__init__(self.finding.found)


@dataclass(frozen=True, slots=True)
class Flags:
    """Further options of vLLM's start, and ports that others on the host have; ``launcher`` is empty if not known.

    ``conditions`` decide what a failed synchronous load does.
    """

    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None
    api_server_count: int = 1
    has_chunked_prefill: bool = False
    launcher: str = ""
    conditions: Conditions = SAFE
    taken: Mapping[int, str] = field(default_factory=dict)
    nixl: range = range(0)  # its ports
    nixl_taken: Mapping[int, str] = field(default_factory=dict)  # those that another engine has, and whose they are
    options: Mapping[str, Any] = field(default_factory=dict)  # of vLLM, by name, as they are
    environment: Mapping[str, str] = field(default_factory=dict)  # the engine's variables, and the marks above

    @property
    def ranks(self) -> int:
        """How many ranks an engine has, as far as its options are known."""
        sizes = (self.options.get(name, 1) for name in ("tensor-parallel-size", "pipeline-parallel-size"))
        return prod(int(size) for size in sizes if str(size).isdecimal())

    @property
    def is_elsewhere(self) -> bool:
        """Whether the engine runs in an image: what is installed here has no meaning."""
        return ELSEWHERE in self.environment


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option of a command line, by its long name without dashes, with its value; None if it has none."""
    for i, word in enumerate(words):
        name, is_one_word, value = word.partition("=")
        key, dot, rest = name.lstrip("-").partition(".")
        key = key.replace("_", "-")
        following = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else None
        if word.startswith("-"):
            yield _SHORT.get(key, key) + dot + rest, value if is_one_word else following


def require_numbers(options: Mapping[str, Any]) -> None:
    for name in _NUMBERS & options.keys():
        if not str(options[name]).isdecimal():
            value = json.dumps(options[name], default=str)
            raise UnreadableError(kinds.NUMBER, name=name, value=value, form="a whole number")
    if (size := options.get(SIZE)) is not None and not _is_size(size):
        value = json.dumps(size, default=str)
        raise UnreadableError(kinds.NUMBER, name=SIZE, value=value, form="a number of GiB above 0")


def _is_size(value: Any) -> bool:
    """Return whether a value is one that vLLM takes as a size; True stands for an option without a value."""
    try:
        return value is not True and 0 < float(value) * GIB < inf
    except (TypeError, ValueError, OverflowError):
        return False


_ROLES = ("kv_producer", "kv_consumer", "kv_both")  # vLLM refuses others before it reads the size


def with_offloading(
    config: Mapping[str, Any], options: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[Mapping[str, Any], list[Finding]]:
    """Return the configuration that vLLM makes of --kv-offloading-size, if it is given, and what is wrong with it."""
    if (size := options.get(SIZE)) is None:
        return config, []
    name = "LMCacheMPConnector"
    extra = dict(config[PATH]) if isinstance(config.get(PATH), dict) else {}
    if options.get("kv-offloading-backend") != "lmcache":
        is_simple = environment.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("0", "")
        name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
        extra["cpu_bytes_to_use"] = int(float(size) * GIB)
    path, by_variable = f"--{SIZE}", is_enabled({**os.environ, **environment})
    if config.get("kv_connector") == ROUTER and config.get("kv_connector_module_path") in OURS:
        if by_variable:
            return config, [kinds.SIZE_WITHIN.at(path)]
        return config, [kinds.SIZE_REPLACES.at(path, name=name)]
    fix = "remove the flag, or that kv_connector" if by_variable else None
    found = [kinds.SIZE_MAKES.at(path, fix=fix, name=name)] if config.get("kv_connector") or not by_variable else []
    role = {} if config.get("kv_connector") and config.get("kv_role") not in _ROLES else {"kv_role": "kv_both"}
    return {**config, "kv_connector": name, **role, PATH: extra}, found


DEFAULTS = Flags()


def flags_of(
    config: Mapping[str, Any],
    beside: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    given: Mapping[str, Any],
    taken: Mapping[int, str],
) -> Flags:
    """Return what the options ``beside`` a configuration mean; those that are ``given`` replace them."""
    options = {**beside, **given}
    is_one = _is_one_of_several(beside)
    engines = 1 if is_one else max(1, int(beside.get("data-parallel-size-local", beside.get("data-parallel-size", 1))))
    ports = {int(beside.get("port", 8000)): "--port of vLLM's API server"} if beside else {}
    if (of_dynamo := environment.get(_DYNAMO_PORT, "")).isdecimal():
        ports[int(of_dynamo)] = f"{_DYNAMO_PORT} of NVIDIA Dynamo"
    if engines > 1:
        ports[int(beside.get("data-parallel-rpc-port", 29550))] = "--data-parallel-rpc-port"
    first = environment.get(NIXL_PORT, os.environ.get(NIXL_PORT, "5600"))
    has_nixl = first.isdecimal() and "Nixl" in str(config)
    nixl = range(int(first), min(int(first) + engines, PORTS)) if has_nixl else range(0)
    ports |= dict.fromkeys(nixl, f"{NIXL_PORT} of NixlConnector")
    return Flags(
        is_on(options, "disable-log-stats"),
        str(endpoint) if (endpoint := options.get("otlp-traces-endpoint")) else None,
        int(options.get("api-server-count", api_servers(beside))),
        _is_left_on(beside, "enable-chunked-prefill"),
        beside.get(LAUNCHER, ""),
        _conditions(beside, environment),
        {**taken, **ports},
        nixl,
        {port: taken[port] for port in nixl if port in taken},
        options,
        {SHARED: of_docker(beside.get("shm-size", "")), **environment},
    )


def of_docker(size: Any) -> str:
    """Return a size such as 16gb as Kubernetes writes it."""
    return re.sub(r"([kmgt])b?$", r"\1i", str(size).strip(), flags=re.IGNORECASE)


def _conditions(options: Mapping[str, Any], environment: Mapping[str, str]) -> Conditions:
    """Return what is known of the engine's scheduling and runner; else vLLM's defaults on GPUs."""
    is_async = not options or _is_left_on(options, "async-scheduling")
    runner = environment.get(V2_RUNNER, os.environ.get(V2_RUNNER, "1"))
    steps = max(2 if is_async else 1, int(options.get("pipeline-parallel-size", 1)))
    return Conditions(steps=steps, has_v2_runner=runner.lower() not in ("0", "false"))


def api_servers(options: Mapping[str, Any]) -> int:
    """Return how many API servers there are by default: `vllm serve` starts one for each engine that it balances."""
    if options.get(LAUNCHER) or _is_one_of_several(options) or is_on(options, "enable-elastic-ep"):
        return 1
    is_hybrid = "data-parallel-start-rank" in options or is_on(options, "data-parallel-hybrid-lb")
    return int(options.get("data-parallel-size-local" if is_hybrid else "data-parallel-size", 1)) or 1


def _is_one_of_several(options: Mapping[str, Any]) -> bool:
    """Return whether each engine of the group has a command and an API server, behind an external load balancer."""
    others = ("data-parallel-external-lb", "data-parallel-multi-port-external-lb")
    return "data-parallel-rank" in options or any(is_on(options, other) for other in others)


def _is_left_on(options: Mapping[str, Any], name: str) -> bool:
    """Return whether vLLM's options are known, and leave on what is on by default."""
    return bool(options) and not options.get(f"no-{name}") and is_on(options, name, "on")


def is_on(options: Mapping[str, Any], name: str, default: str = "0") -> bool:
    return str(options.get(name, default)).lower() not in ("false", "0", "none")
