"""Check the connectors' entries by their text: libraries, the connectors' own options, misplaced keys, and roles.

A connector's own option is checked if vLLM (0.32 here) ignores a mistake in it, or reports it without naming the option
or a way to correct it.
"""

import difflib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.cli.check import vllm_source
from kvobs.cli.check.flags import MEMORY, SHARED, Flags, is_on
from kvobs.cli.check.vllm_options import options_of, parameters_of
from kvobs.connectors.known import OURS, ROUTER, missing_libraries
from kvobs.connectors.specs import too_small
from kvobs.connectors.validation import misplaced
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, unknown
from kvobs.vllm_api.versions import TransferConfig

_OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)", re.IGNORECASE)  # of Kubernetes
_DEEPEST = 8  # routers within routers
_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_MQ_TIMEOUT, _LONG_S = "lmcache.mp.mq_timeout", 10


class Findings(NamedTuple):
    mistakes: list[Finding]
    warnings: list[Finding]


def check_entries(whole: Mapping[str, Any], *, is_stock: bool, is_elsewhere: bool = False) -> Findings:
    """Return the mistakes and the warnings about the entries of a configuration, given as kvobs would get it.

    ``is_stock``: vLLM's own router is in the configuration as it is. ``is_elsewhere``: another vLLM may read it.
    """
    findings = Findings([], [*misplaced(whole, "")])
    for path, entry in entries(whole):
        module = entry.get("kv_connector_module_path")
        if module is None or str(module).startswith("lmcache."):
            _check_own_options(findings, entry, path, is_elsewhere)
        findings.warnings.extend([*misplaced(entry, path), *_nesting(entry, path)])
    findings.warnings.extend(_roles(whole))
    if is_stock:
        findings.warnings.extend(_same_class(whole))
    return findings


def entries(parent: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and entry of each connector of a configuration, as kvobs would get it, also of inner ones."""
    for i, entry in enumerate(_connectors(parent)):
        if isinstance(entry, Mapping):
            place = f"{path}{PATH}.connectors[{i}]"
            yield place, entry
            if entry.get("kv_connector") == ROUTER and depth < _DEEPEST:
                yield from entries(entry, f"{place}.", depth + 1)


def _connectors(parent: Mapping[str, Any]) -> list[Any]:
    extra = parent.get(PATH)
    connectors = extra.get("connectors") if isinstance(extra, Mapping) else None
    return list(connectors) if isinstance(connectors, list | tuple) else []


def _name(entry: Any) -> str | None:
    name = entry.get("kv_connector") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None


def missing_libraries_of(whole: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the libraries that vLLM's connectors need, and that are missing here."""
    for path, entry in entries(whole):
        name = _name(entry) or ""
        for need in missing_libraries(name) if entry.get("kv_connector_module_path") is None else ():
            found = f"found {name!r}, which needs {need.modules[0]!r}, which is not installed here"
            yield Finding(f"{path}.kv_connector", found, fix=need.install)


def ignored_variables(whole: Mapping[str, Any], environment: Iterable[str]) -> Iterator[Finding]:
    """Warn of the engine's variables that a connector of the installed vLLM reads no more."""
    for _, entry in entries(whole):
        options = options_of(_name(entry) or "") if entry.get("kv_connector_module_path") is None else None
        for variable in sorted(options.ignored.keys() & environment) if options else ():
            text = f"has no effect: {_name(entry)} of vLLM {vllm_source.vllm_version()} ignores it"
            fix = f"set {options.ignored[variable]!r} in {PATH}" if options else ""
            yield Finding(f"environment variable {variable}", text, fix=fix)


def _nesting(entry: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Warn about vLLM's router within another router; kvobs within kvobs is a mistake, found with the classes."""
    is_router, extra = entry.get("kv_connector") == ROUTER, entry.get(PATH)
    if is_router and entry.get("kv_connector_module_path") not in OURS:
        found = f"found vLLM's {ROUTER} within {ROUTER}: kvobs sees it as one connector, and none of those in it"
        yield Finding(f"{path}.kv_connector", found, fix="move its connectors to the list that it is in")
    elif not is_router and isinstance(extra, Mapping) and "kvobs" in extra:
        found = "has no effect in a connector: kvobs reads its options beside the list of connectors only"
        yield Finding(f"{path}.{PATH}.kvobs", found, fix=f"move it out, beside {PATH}.connectors")


def _roles(whole: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn about connectors that only receive beside, or in an engine of, those that only send; or the other way."""
    entries = {i: entry for i, entry in enumerate(_connectors(whole)) if isinstance(entry, Mapping)}
    role, where = whole.get("kv_role"), "kv_role at the top level"
    if role == "kv_both":
        one_way = ((entry.get("kv_role"), f"that of connectors[{i}]") for i, entry in entries.items())
        role, where = next((first for first in one_way if first[0] in [*_OPPOSITE]), (None, ""))
    for i, entry in entries.items():
        if isinstance(role, str) and role in _OPPOSITE and entry.get("kv_role") == _OPPOSITE[role]:
            found = f"found {entry['kv_role']!r}, while {where} is {role!r}"
            fix = "use the role that this engine has, unless it is meant to do both"
            yield Finding(f"{PATH}.connectors[{i}].kv_role", found, f"{role!r} or 'kv_both'", fix)


def _same_class(whole: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn about connectors of one class under vLLM's own router, which keeps one set of metrics for each class."""
    names = [_name(entry) for entry in _connectors(whole)]
    for i, name in enumerate(names):
        if name is not None and name in names[:i]:
            found = f"found a second {name}: vLLM's own MultiConnector keeps one set of metrics for a class, so that "
            found += "the numbers of both are mixed, or the server fails where their metrics differ"
            yield Finding(f"{PATH}.connectors[{i}].kv_connector", found, fix="route with kvobs, see --rewrite")


def check_memory(whole: Mapping[str, Any], flags: Flags) -> Findings:
    """Compare what connectors keep in memory with limits of the container, such as 64Gi, and with the longest prompt.

    vLLM refuses a /dev/shm that is too small: the blocks of tiers are there, and on NVIDIA's and Intel's GPUs all.
    """
    findings, kept = Findings([], []), {"": 0, _CPU: 0, _TIERING: 0}
    limit, shared_limit = (flags.environment.get(mark, "") for mark in (MEMORY, SHARED))
    needed = bytes_of_prompt(flags.options)
    for path, entry in entries(whole):
        extra, name = entry.get(PATH), _name(entry)
        if name in _NUMBERS and isinstance(extra, Mapping):
            each = extra.get("cpu_bytes_to_use_per_rank") if name == _SIMPLE else None
            size = extra.get("cpu_bytes_to_use") if each is None else each
            size = int(size or 0) * (1 if each is None else flags.ranks) if _is_number(size) else 0
            spec = str(extra.get("spec_name", _CPU)) if name == "OffloadingConnector" else ""
            kept[spec] = kept.get(spec, 0) + size
            place = f"{path}.{PATH}.cpu_bytes_to_use"
            if needed and _SMALL <= size < needed[0]:
                text = too_small(size, size * needed[1] // needed[0], needed[1])
                findings.warnings.append(Finding(place, text, fix="give it more, or lower --max-model-len"))
            is_off = flags.options.get(f"no-{_PREFIXES}") or not is_on(flags.options, _PREFIXES, "on")
            if name == _SIMPLE and is_off:
                text = f"{_SIMPLE} does nothing with --no-enable-prefix-caching"
                findings.warnings.append(
                    Finding(f"{path}.kv_connector", text, fix="remove that flag, or the connector")
                )
    total, shared, room = sum(kept.values()), kept[_CPU] + kept[_TIERING], _bytes(shared_limit)
    fix = "raise the limit, or lower cpu_bytes_to_use"
    if total > _bytes(limit):
        text = f"found {limit}, while connectors keep {total:,} bytes in memory: the kernel would end the engine"
        findings.mistakes.append(Finding("resources.limits.memory", text, fix=fix))
    text = f"found {shared_limit}, while OffloadingConnector keeps {shared:,} bytes there: vLLM refuses that"
    if kept[_TIERING] > 2 * room:  # the file has a whole number of chunks
        findings.mistakes.append(Finding("/dev/shm", text, fix=fix))
    elif shared > room:
        findings.warnings.append(Finding("/dev/shm", f"{text} on most GPUs", fix=fix))
    return findings


def bytes_of_prompt(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bytes and the tokens of the longest prompt, by the model's file on this machine; None if not known.

    Not known are they of a model with layers of several kinds.
    """
    try:
        model = json.loads((Path(str(options["model"])) / "config.json").read_text(encoding="utf-8"))
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        of_token = model.get("kv_lora_rank", 0) + model.get("qk_rope_head_dim", 0) or 2 * heads * size
        tokens = int(options.get("max-model-len") or model["max_position_embeddings"])
        width = 1 if str(options.get("kv-cache-dtype", "auto")).startswith("fp8") else 2
        is_plain = not any(
            model.get(key) for key in ("layer_types", "sliding_window", "text_config", "layers_block_type")
        )
        return (model["num_hidden_layers"] * of_token * width * tokens, tokens) if is_plain else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def _bytes(limit: str) -> float:
    found = _QUANTITY.fullmatch(limit)
    return float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ") if found else inf


_SIMPLE = "SimpleCPUOffloadConnector"
_NUMBERS = {
    "OffloadingConnector": ("cpu_bytes_to_use", "block_size", "blocks_per_chunk", "store_threshold"),
    _SIMPLE: ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "disk_capacity_bytes", "disk_buffer_slots"),
}
_ANY_VERSION = {*_NUMBERS["OffloadingConnector"], *_NUMBERS[_SIMPLE], "backends", "secondary_tiers"}
_SMALL, _PREFIXES = 1 << 20, "enable-prefix-caching"
_EXAMPLE = "such as 10737418240 for 10 GiB"
_CPU, _TIERING = "CPUOffloadingSpec", "TieringOffloadingSpec"
_BY_VLLM = {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
_OF_TIERS = {"type", "module_path", "backpressure"}  # read before a tier is made
_Wrong = tuple[bool, Finding]
"""Whether it is a mistake, and the finding at an option's name."""


def _check_own_options(findings: Findings, entry: Mapping[str, Any], path: str, is_elsewhere: bool) -> None:
    extra, name = entry.get(PATH) or {}, _name(entry)
    if name is not None and isinstance(extra, Mapping):
        numbers = [key for key in _NUMBERS.get(name, ()) if not _is_number(extra.get(key))]
        found = [_wrong_type(key, extra[key], "a whole number", "write it without a unit") for key in numbers]
        found += _of_offloading(extra) if name == "OffloadingConnector" else _of_others(name, extra)
        found += _of_source(name, extra, {each.path for _, each in found}) if name != ROUTER else ()
        for is_mistake, each in found:
            at = replace(each, path=f"{path}.{PATH}.{each.path}")
            is_certain = not is_elsewhere or (each.path in _ANY_VERSION and "num_cpu_blocks" not in extra)
            (findings.mistakes if is_mistake and is_certain else findings.warnings).append(at)


def _of_source(name: str, extra: Mapping[str, Any], found: Container[str]) -> Iterator[_Wrong]:
    """Yield what the installed vLLM's source shows: options not read, or missing, and values not allowed."""
    options = options_of(name)
    if options is None or extra.get("spec_module_path"):
        return
    names = sorted(options.known | options.needed)
    others = {*names, *TransferConfig.model_fields, "kvobs", "connectors", "num_cpu_blocks"}
    for key in (key for key in extra if key not in others):
        near = difflib.get_close_matches(key, names, 1, 0.75)
        if near != ["cpu_bytes_to_use"] or near[0] not in found:  # that is missing, with this one in its place
            text = f"has no effect: {name} of vLLM {vllm_source.vllm_version()} does not read it"
            fix = f"use {near[0]!r}" if near else "remove it"
            yield False, Finding(key, text, ", ".join(map(repr, names)), fix)
    for key in sorted(options.required - extra.keys()):
        yield True, Finding(key, f"is missing, and {name} needs it", fix="add it")
    for key, values in options.allowed.items():
        if extra.get(key) and str(extra[key]).lower() not in map(str.lower, values):
            yield True, unknown("value", key, str(extra[key]), values, "use one of them")


def _wrong_type(key: str, value: Any, allowed: str, fix: str) -> _Wrong:
    return True, Finding(key, f"found a value of type {type(value).__name__}", allowed, fix)


def _is_number(value: Any) -> bool:
    """Return whether vLLM's ``int(value)`` succeeds; None stands for the default."""
    try:
        int(0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _of_offloading(extra: Mapping[str, Any]) -> Iterator[_Wrong]:
    spec, tiers = extra.get("spec_name", _CPU), extra.get("secondary_tiers", [])
    specs = sorted(vllm_source.registered("v1/kv_offload/factory.py") or {_CPU, _TIERING})
    if spec not in specs:
        if extra.get("spec_module_path") is None:
            otherwise = "set spec_module_path to the module of that class"
            yield True, unknown("spec", "spec_name", str(spec), specs, otherwise)
        return  # a class from elsewhere has other options
    yield from _size(extra, extra.get("cpu_bytes_to_use"))
    policies = sorted(vllm_source.registered("v1/kv_offload/cpu/policies/factory.py"))
    policy = extra.get("eviction_policy", "lru")
    if policies and policy not in policies and not extra.get("cache_policy_module_path"):
        yield True, unknown("policy", "eviction_policy", str(policy), policies, "use one of them")
    if spec == _TIERING:
        yield from _unknown_tiers(tiers)
    elif tiers:
        text = f"has no effect: only {_TIERING} has tiers, and spec_name is {spec!r}"
        yield False, Finding("secondary_tiers", text, fix=f'add "spec_name": "{_TIERING}"')


def _size(extra: Mapping[str, Any], size: Any) -> Iterator[_Wrong]:
    if not size:
        fix = f'add "cpu_bytes_to_use", {_EXAMPLE}'
        if "num_cpu_blocks" in extra:
            fix = f"replace num_cpu_blocks, which older vLLMs had, by cpu_bytes_to_use, {_EXAMPLE}"
        elif misspelt := difflib.get_close_matches("cpu_bytes_to_use", extra, 1, 0.9):
            fix = f"rename {misspelt[0]!r}, which has no effect"
        yield True, Finding("cpu_bytes_to_use", "is missing", fix=fix)
    elif _is_number(size) and int(size) < _SMALL:
        text = "is less than 1 MiB, room for no KV block: nothing will be offloaded"
        yield False, Finding("cpu_bytes_to_use", text, fix=f"give bytes, {_EXAMPLE}")


def _unknown_tiers(tiers: Any) -> Iterator[_Wrong]:
    known = vllm_source.registered("v1/kv_offload/tiering/factory.py")
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        yield _wrong_type("secondary_tiers", tiers, "a list of objects", "write a list of objects")
        return
    for i, tier in enumerate(tiers):
        kind, otherwise = tier.get("type"), "use one of them, or set module_path to the module of that class"
        if known and kind not in known and not (kind and tier.get("module_path")):
            yield True, unknown("tier", f"secondary_tiers[{i}].type", str(kind), sorted(known), otherwise)
        elif parameters := parameters_of(*known.get(str(kind), ("", ""))):
            names, required, takes_all = parameters
            for key in sorted(required - _BY_VLLM - tier.keys()):
                text = f"is missing, and the tier {kind!r} needs it"
                yield True, Finding(f"secondary_tiers[{i}].{key}", text, fix="add it")
            for key in [] if takes_all else [key for key in tier if key not in names | _OF_TIERS]:
                options = sorted(names - _BY_VLLM)
                yield True, unknown("option", f"secondary_tiers[{i}].{key}", key, options, "remove it")


def _of_others(name: str, extra: Mapping[str, Any]) -> Iterator[_Wrong]:
    """Yield what is ignored, refused without a name, or may block the scheduler for long, isolated or not."""
    if name == _SIMPLE and "disk_path" in extra and extra.get("kv_offload_backend", "cpu") == "cpu":
        text = "has no effect: kv_offload_backend is 'cpu'"
        yield False, Finding("disk_path", text, fix='add "kv_offload_backend": "disk"')
    if name in _NIXL and isinstance(backends := extra.get("backends"), str):
        yield _wrong_type("backends", backends, 'a list of names, such as ["UCX"]', "write a list")
    seconds = extra.get(_MQ_TIMEOUT, 300)
    if name == "LMCacheMPConnector" and _is_number(seconds) and int(seconds or 0) > _LONG_S:
        text = f"is {seconds} s: a call to a server that hangs blocks the engine as long, isolated or not"
        yield False, Finding(_MQ_TIMEOUT, text, fix=f"set it to {_LONG_S} or less")
    if name == "MooncakeStoreConnector" and extra.get("enable_lookup", True) and not extra.get("lookup_async"):
        text = "is false: a lookup waits for the store without a limit, and the engine with it, isolated or not"
        yield False, Finding("lookup_async", text, fix="set it to true, and limit it by kvobs.lookup_timeout_ms")
