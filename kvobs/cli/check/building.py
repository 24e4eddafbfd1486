"""Find what vLLM's own connectors refuse, or ignore, only when they are built: sizes, kinds and their libraries.

The authority is vLLM 0.32's source; names that it registers are read from the installed one. This needs no vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from kvobs.children.known import missing_libraries
from kvobs.cli.check import vllm_source
from kvobs.config import PATH
from kvobs.findings import Finding


class Problem(NamedTuple):
    """One problem with a key of a connector's own options; ``is_fatal``: vLLM refuses it."""

    key: str
    found: str
    allowed: str
    fix: str
    is_fatal: bool = True


Rule = Callable[[Mapping[str, Any]], Iterator[Problem]]

_BYTES = "a whole number of bytes above 0"
_EXAMPLE = "such as 10737418240 for 10 GiB"
_SMALL = 1 << 20
_CPU, _TIERING = "CPUOffloadingSpec", "TieringOffloadingSpec"
_TIER_NEEDS = {"fs": "root_dir", "obj": "store_config"}
_DISK_ONLY = ("disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache")


def _offloading(extra: Mapping[str, Any]) -> Iterator[Problem]:
    spec = extra.get("spec_name", _CPU)
    names = vllm_source.registered(vllm_source.SPECS) or {_CPU, _TIERING}
    if not (isinstance(spec, str) and spec in names):
        if extra.get("spec_module_path") is None:
            yield _unknown("spec_name", spec, names, "set spec_module_path to the module of that class")
        return  # a class of its own has options of its own
    yield from _size(extra)
    if extra.get("block_size") is not None and extra.get("blocks_per_chunk") is not None:
        yield Problem("blocks_per_chunk", "found beside 'block_size'", "one of both", "remove one of them")
    else:
        yield from _number(extra, "block_size", least=1)
        yield from _number(extra, "blocks_per_chunk", least=1)
    yield from _number(extra, "store_threshold", least=0, may_be_null=False)
    yield from _number(extra, "max_tracker_size", least=1, may_be_null=False)
    policies = vllm_source.registered(vllm_source.POLICIES) or {"lru", "arc"}
    policy = extra.get("eviction_policy", "lru")
    if not (isinstance(policy, str) and policy in policies) and extra.get("cache_policy_module_path") is None:
        yield _unknown("eviction_policy", policy, policies, "set cache_policy_module_path to the module of that class")
    yield from _tiers(extra) if spec == _TIERING else _ignored_tiers(extra)


def _size(extra: Mapping[str, Any]) -> Iterator[Problem]:
    if not extra.get("cpu_bytes_to_use"):
        fix = f'add "cpu_bytes_to_use", {_EXAMPLE}'
        if "num_cpu_blocks" in extra:
            fix = f"replace num_cpu_blocks, which older vLLMs had, by cpu_bytes_to_use, {_EXAMPLE}"
        found = "is missing" if "cpu_bytes_to_use" not in extra else _kind(extra["cpu_bytes_to_use"])
        yield Problem("cpu_bytes_to_use", found, _BYTES, fix)
        return
    if "num_cpu_blocks" in extra:
        yield Problem("num_cpu_blocks", "has no effect in this vLLM", "", "remove it", is_fatal=False)
    problems = list(_number(extra, "cpu_bytes_to_use", least=1, allowed=_BYTES))
    yield from problems
    if not problems and int(extra["cpu_bytes_to_use"]) < _SMALL:
        found = "is less than 1 MiB, room for no KV block: nothing will be offloaded"
        yield Problem("cpu_bytes_to_use", found, _BYTES, f"give bytes, {_EXAMPLE}", is_fatal=False)


def _ignored_tiers(extra: Mapping[str, Any]) -> Iterator[Problem]:
    if extra.get("secondary_tiers"):
        found = f"has no effect: only {_TIERING} has tiers, and spec_name is {extra.get('spec_name', _CPU)!r}"
        yield Problem("secondary_tiers", found, "", f'add "spec_name": "{_TIERING}"', is_fatal=False)


def _tiers(extra: Mapping[str, Any]) -> Iterator[Problem]:
    threshold = extra.get("store_threshold", 0)
    if not list(_number(extra, "store_threshold", least=0, may_be_null=False)) and int(threshold) > 1:
        yield Problem("store_threshold", f"is above 1, which {_TIERING} does not support", "0 or 1", "remove it")
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list):
        yield Problem("secondary_tiers", _kind(tiers), "a list of objects", 'write [{"type": "fs", "root_dir": ...}]')
        return
    if not tiers:
        found = f"is missing or empty: {_TIERING} then offloads to the CPU only"
        yield Problem("secondary_tiers", found, "", "add a tier, or remove spec_name", is_fatal=False)
    known = vllm_source.registered(vllm_source.TIERS) or {"example", "fs", "p2p", "obj", "kvcr"}
    for i, tier in enumerate(tiers):
        yield from _tier(f"secondary_tiers[{i}]", tier, known)


def _tier(path: str, tier: Any, known: Collection[str]) -> Iterator[Problem]:
    if not isinstance(tier, Mapping):
        yield Problem(path, _kind(tier), "an object with the key 'type'", 'write {"type": "fs", "root_dir": ...}')
        return
    kind = tier.get("type")
    if not kind or not isinstance(kind, str):
        found = "is missing" if "type" not in tier else _kind(kind)
        yield Problem(f"{path}.type", found, _listed(known), "name the kind of the tier")
    elif kind not in known and tier.get("module_path") is None:
        yield _unknown(f"{path}.type", kind, known, "set module_path to the module of that class")
    elif (needed := _TIER_NEEDS.get(kind)) and needed not in tier:
        yield Problem(f"{path}.{needed}", "is missing", "", f"add it: a tier of type {kind!r} needs it")
    pressure = tier.get("backpressure")
    if isinstance(pressure, Mapping) and pressure and pressure.get("backpressure_cls") is None:
        fix = "name the class, such as 'EMABackpressureDetector'"
        yield Problem(f"{path}.backpressure.backpressure_cls", "is missing", "", fix)


def _simple_offload(extra: Mapping[str, Any]) -> Iterator[Problem]:
    for key in ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"):
        yield from _number(extra, key, least=1, allowed=_BYTES)
    for key in ("disk_capacity_bytes", "disk_buffer_slots"):
        yield from _number(extra, key, least=1)
    backend = str(extra.get("kv_offload_backend", "cpu"))
    if backend not in ("cpu", "disk"):
        yield _unknown("kv_offload_backend", backend, ("cpu", "disk"), "use one of them")
    elif backend == "disk" and not extra.get("disk_path"):
        yield Problem("disk_path", "is missing", "", "add it: kv_offload_backend 'disk' needs it")
    elif backend == "cpu":
        for key in _DISK_ONLY:
            if key in extra:
                fix = 'add "kv_offload_backend": "disk"'
                yield Problem(key, "has no effect: kv_offload_backend is 'cpu'", "", fix, is_fatal=False)


def _moriio(extra: Mapping[str, Any]) -> Iterator[Problem]:
    if "http_port" not in extra:
        yield Problem("http_port", "is missing", "", "add it: the port of this server")
    for key in ("http_port", "proxy_ping_port", "handshake_port", "notify_port"):
        yield from _number(extra, key, least=0)
    backend = str(extra.get("backend", "rdma")).lower()
    if backend not in ("rdma", "xgmi"):
        yield _unknown("backend", backend, ("rdma", "xgmi"), "use one of them")


def _hisparse(extra: Mapping[str, Any]) -> Iterator[Problem]:
    pool = extra.get("host_pool_gib")
    try:
        is_positive = pool is not None and float(pool) > 0
    except (TypeError, ValueError):
        is_positive = False
    if not is_positive:
        found = "is missing" if "host_pool_gib" not in extra else _kind(pool)
        yield Problem("host_pool_gib", found, "a number above 0", "give the size of the host's pool in GiB")


def _nixl(extra: Mapping[str, Any]) -> Iterator[Problem]:
    backends = extra.get("backends", [])
    if not isinstance(backends, list) or not all(isinstance(name, str) for name in backends):
        yield Problem("backends", _kind(backends), 'a list of names, such as ["UCX"]', "write a list")
    yield from _number(extra, "num_threads", least=1)


RULES: dict[str, Rule] = {
    "OffloadingConnector": _offloading,
    "SimpleCPUOffloadConnector": _simple_offload,
    "MoRIIOConnector": _moriio,
    "HiSparseConnector": _hisparse,
    "NixlConnector": _nixl,
    "NixlPullConnector": _nixl,
    "NixlPushConnector": _nixl,
}
"""Connectors of vLLM -> the rule for their own options."""


def findings(entry: Mapping[str, Any], path: str, *, has_vllm: bool) -> tuple[list[Finding], list[Finding]]:
    """Return the mistakes and the warnings about an entry at a path; none for a class that is not vLLM's own.

    Args:
        entry: the configuration of one connector.
        path: its place, empty for the top level.
        has_vllm: whether this is the environment of an engine, so that libraries must be here.
    """
    connector = entry.get("kv_connector")
    if not isinstance(connector, str) or entry.get("kv_connector_module_path") is not None:
        return [], []
    own = f"{path}." if path else ""
    mistakes = [
        Finding(
            f"{own}kv_connector",
            f"found {connector!r}, which needs {need.modules[0]!r}, which is not installed here",
            fix=need.install,
        )
        for need in (missing_libraries(connector) if has_vllm else ())
    ]
    extra = entry.get(PATH) or {}
    warnings: list[Finding] = []
    if isinstance(extra, Mapping) and connector in RULES:
        for problem in RULES[connector](extra):
            finding = Finding(f"{own}{PATH}.{problem.key}", problem.found, problem.allowed, problem.fix)
            (mistakes if problem.is_fatal else warnings).append(finding)
    return mistakes, warnings


def _number(
    extra: Mapping[str, Any], key: str, *, least: int, allowed: str | None = None, may_be_null: bool = True
) -> Iterator[Problem]:
    """Yield the problem of a value that ``int()`` refuses, as vLLM would, or that is too small."""
    if key not in extra or (may_be_null and extra[key] is None):
        return
    value = extra[key]
    allowed = allowed or f"a whole number, at least {least}"
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        yield Problem(key, _kind(value), allowed, "write the number alone, without a unit")
    else:
        if number < least:
            yield Problem(key, f"is less than {least}", allowed, "use an allowed value")


def _unknown(key: str, value: Any, known: Collection[str], otherwise: str) -> Problem:
    """Return the problem of a name that vLLM does not know; only names are shown, other values may be secrets."""
    found = f"found {value[:80]!r}" if isinstance(value, str) and value.isidentifier() else _kind(value)
    close = difflib.get_close_matches(value, known, 1, cutoff=0.6) if isinstance(value, str) else []
    return Problem(key, found, _listed(known), f"use {close[0]!r}" if close else otherwise)


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _kind(value: Any) -> str:
    return f"found a value of type {type(value).__name__}" if value is not None else "found null"
