"""Check the connectors' entries by their text: libraries, the connectors' own options, misplaced keys, and roles.

A connector's own option is checked if vLLM (0.32 here) ignores an error in it, or reports it without naming the option
or a way to correct it.
"""

import difflib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from kvobs.cli.check import vllm_source
from kvobs.cli.check.flags import MEMORY, SHARED, Flags, is_on
from kvobs.cli.check.vllm_options import options_of, parameters_of
from kvobs.connectors.known import OURS, ROUTER, missing_libraries
from kvobs.connectors.specs import STATED_BYTES, stated_bytes, too_small
from kvobs.connectors.validation import misplaced
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding
from kvobs.vllm_api.versions import TransferConfig

_OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)", re.IGNORECASE)  # of Kubernetes
_DEEPEST = 8  # routers within routers
_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_MQ_TIMEOUT, _LONG_S = "lmcache.mp.mq_timeout", 10


def check_entries(whole: Mapping[str, Any], *, is_stock: bool) -> Iterator[Finding]:
    """Yield what is wrong in the entries of a configuration, given as kvobs would get it.

    ``is_stock``: vLLM's own router is in the configuration as it is.
    """
    yield from misplaced(whole, "")
    for path, entry in entries(whole):
        module = entry.get("kv_connector_module_path")
        if module is None or str(module).startswith("lmcache."):
            yield from _check_own_options(entry, f"{path}.{PATH}.")
        yield from misplaced(entry, path)
        yield from _nesting(entry, path)
    yield from _roles(whole)
    if is_stock:
        yield from _same_class(whole)


def entries(parent: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and entry of each connector of a configuration, as kvobs would get it, also of inner ones."""
    for i, entry in enumerate(_connectors(parent)):
        if isinstance(entry, Mapping):
            location = f"{path}{PATH}.connectors[{i}]"
            yield location, entry
            if entry.get("kv_connector") == ROUTER and depth < _DEEPEST:
                yield from entries(entry, f"{location}.", depth + 1)


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
            where = f"{path}.kv_connector"
            yield kinds.LIBRARY.at(where, name=name, module=need.modules[0], install=need.install)


def ignored_variables(whole: Mapping[str, Any], environment: Iterable[str]) -> Iterator[Finding]:
    """Warn of the engine's variables that a connector of the installed vLLM reads no more."""
    for _, entry in entries(whole):
        name, version = _name(entry) or "", vllm_source.vllm_version()
        options = options_of(name) if entry.get("kv_connector_module_path") is None else None
        for variable in sorted(options.ignored.keys() & environment) if options else ():
            where, instead = f"environment variable {variable}", options.ignored[variable] if options else ""
            yield kinds.IGNORED_VARIABLE.at(where, name=name, version=version, option=instead)


def _nesting(entry: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Warn about vLLM's router within another router; kvobs within kvobs is an error, found with the classes."""
    is_router, extra = entry.get("kv_connector") == ROUTER, entry.get(PATH)
    if is_router and entry.get("kv_connector_module_path") not in OURS:
        yield kinds.ROUTER_WITHIN.at(f"{path}.kv_connector")
    elif not is_router and isinstance(extra, Mapping) and "kvobs" in extra:
        yield kinds.OPTIONS_WITHIN.at(f"{path}.{PATH}.kvobs")


def _roles(whole: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn if one engine has connectors that only receive and connectors, or a role, that only send; or vice versa."""
    entries = {i: entry for i, entry in enumerate(_connectors(whole)) if isinstance(entry, Mapping)}
    role, where = whole.get("kv_role"), "kv_role at the top level"
    if role == "kv_both":
        one_way = ((entry.get("kv_role"), f"that of connectors[{i}]") for i, entry in entries.items())
        role, where = next((first for first in one_way if first[0] in [*_OPPOSITE]), (None, ""))
    for i, entry in entries.items():
        if isinstance(role, str) and role in _OPPOSITE and entry.get("kv_role") == _OPPOSITE[role]:
            location, allowed = f"{PATH}.connectors[{i}].kv_role", f"{role!r} or 'kv_both'"
            yield kinds.ROLES.at(location, allowed, found=entry["kv_role"], where=where, role=role)


def _same_class(whole: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn about connectors of one class under vLLM's own router, which keeps one set of metrics for each class."""
    names = [_name(entry) for entry in _connectors(whole)]
    for i, name in enumerate(names):
        if name is not None and name in names[:i]:
            yield kinds.SAME_CLASS.at(f"{PATH}.connectors[{i}].kv_connector", name=name)


def check_memory(whole: Mapping[str, Any], flags: Flags) -> Iterator[Finding]:
    """Compare what connectors keep in memory with limits of the container, such as 64Gi, and with the longest prompt.

    vLLM refuses a /dev/shm that is too small: the blocks of tiers are there, and on NVIDIA's and Intel's GPUs all.
    """
    kept = {"": 0, _CPU: 0, _TIERING: 0}
    needed = bytes_of_prompt(flags.options)
    for path, entry in entries(whole):
        extra, name = entry.get(PATH), _name(entry)
        if name not in _NUMBERS or not isinstance(extra, Mapping):
            continue
        is_stated = all(_is_number(extra.get(key)) for key in STATED_BYTES[name])
        size = stated_bytes(name, extra, flags.ranks) if is_stated else 0
        spec = str(extra.get("spec_name", _CPU)) if name != _SIMPLE else ""
        kept[spec] = kept.get(spec, 0) + size
        if needed and _SMALL <= size < needed[0]:
            text = too_small(size, size * needed[1] // needed[0], needed[1])
            yield kinds.PROMPT.at(f"{path}.{PATH}.cpu_bytes_to_use", text=text)
        is_off = flags.options.get(f"no-{_PREFIXES}") or not is_on(flags.options, _PREFIXES, "on")
        if name == _SIMPLE and is_off:
            yield kinds.NO_PREFIXES.at(f"{path}.kv_connector")
    limit, shared_limit = (flags.environment.get(mark, "") for mark in (MEMORY, SHARED))
    total, shared, room = sum(kept.values()), kept[_CPU] + kept[_TIERING], _bytes(shared_limit)
    if total > _bytes(limit):
        yield kinds.MEMORY.at("resources.limits.memory", limit=limit, total=total)
    if shared > room or kept[_TIERING] > 2 * room:  # the file has a whole number of chunks
        kind = kinds.SHARED if kept[_TIERING] > 2 * room else kinds.SHARED_PERHAPS
        yield kind.at("/dev/shm", limit=shared_limit, shared=shared)


def bytes_of_prompt(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bytes and the tokens of the longest prompt, by the model's file on this machine; None if not known.

    They are not known of a model with layers of several kinds.
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
_SMALL, _PREFIXES = 1 << 20, "enable-prefix-caching"
_CPU, _TIERING = "CPUOffloadingSpec", "TieringOffloadingSpec"
_BY_VLLM = {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
_OF_TIERS = {"type", "module_path", "backpressure"}  # read before a tier is made


def _check_own_options(entry: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Yield what is wrong with a connector's options, which are at a path."""
    extra, name = entry.get(PATH) or {}, _name(entry)
    if name is not None and isinstance(extra, Mapping):
        numbers = [key for key in _NUMBERS.get(name, ()) if not _is_number(extra.get(key))]
        found = [_wrong_type(key, extra[key], "a whole number", "it without a unit") for key in numbers]
        found += _of_offloading(extra) if name == "OffloadingConnector" else _of_others(name, extra)
        found += _of_source(name, extra, {each.path for each in found}) if name != ROUTER else ()
        yield from (replace(each, path=path + each.path) for each in found)


def _of_source(name: str, extra: Mapping[str, Any], found: Container[str]) -> Iterator[Finding]:
    """Yield what the installed vLLM's source shows: options not read, or missing, and values not allowed."""
    options = options_of(name)
    if options is None or extra.get("spec_module_path"):
        return
    names = sorted(options.known | options.needed)
    others = {*names, *TransferConfig.model_fields, "kvobs", "connectors", "num_cpu_blocks"}
    for key in (key for key in extra if key not in others):
        if "cpu_bytes_to_use" not in found or not difflib.get_close_matches(key, ["cpu_bytes_to_use"], 1, 0.75):
            yield kinds.OPTION.near(key, key, names, name=name, version=vllm_source.vllm_version())
    for key in sorted(options.required - extra.keys()):
        yield kinds.OPTION_MISSING.at(key, name=name)
    for key, values in options.allowed.items():
        if extra.get(key) and str(extra[key]).lower() not in map(str.lower, values):
            yield kinds.OPTION_VALUE.near(key, str(extra[key]), values, what="value")


def _wrong_type(key: str, value: Any, allowed: str, form: str) -> Finding:
    return kinds.OPTION_TYPE.at(key, allowed, type=type(value).__name__, form=form)


def _is_number(value: Any) -> bool:
    """Return whether vLLM's ``int(value)`` succeeds; None stands for the default."""
    try:
        int(0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _of_offloading(extra: Mapping[str, Any]) -> Iterator[Finding]:
    spec, tiers = extra.get("spec_name", _CPU), extra.get("secondary_tiers", [])
    specs = sorted(vllm_source.registered("v1/kv_offload/factory.py") or {_CPU, _TIERING})
    if spec not in specs:
        if extra.get("spec_module_path") is None:
            yield kinds.SPEC.near("spec_name", str(spec), specs)
        return  # a class from elsewhere has other options
    yield from _of_size(extra)
    policies = sorted(vllm_source.registered("v1/kv_offload/cpu/policies/factory.py"))
    policy = extra.get("eviction_policy", "lru")
    if policies and policy not in policies and not extra.get("cache_policy_module_path"):
        yield kinds.OPTION_VALUE.near("eviction_policy", str(policy), policies, what="policy")
    if spec == _TIERING:
        yield from _unknown_tiers(tiers)
    elif tiers:
        yield kinds.UNUSED_TIERS.at("secondary_tiers", spec=spec)


def _of_size(extra: Mapping[str, Any]) -> Iterator[Finding]:
    size = extra.get("cpu_bytes_to_use")
    if not size and "num_cpu_blocks" in extra:
        yield kinds.SIZE_OF_OLD.at("cpu_bytes_to_use")
    elif "cpu_bytes_to_use" not in extra:
        misspelt = difflib.get_close_matches("cpu_bytes_to_use", extra, 1, 0.9)
        fix = f"rename {misspelt[0]!r}, which has no effect" if misspelt else None
        yield kinds.SIZE_MISSING.at("cpu_bytes_to_use", fix=fix, found="is missing")
    elif _is_number(size):
        if not size:
            allowed = "a whole number above 0"
            yield kinds.SIZE_MISSING.at("cpu_bytes_to_use", allowed, kinds.SMALL.fix, found=f"found {size}")
        elif int(size) < _SMALL:
            yield kinds.SMALL.at("cpu_bytes_to_use")


def _unknown_tiers(tiers: Any) -> Iterator[Finding]:
    known = vllm_source.registered("v1/kv_offload/tiering/factory.py")
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        yield _wrong_type("secondary_tiers", tiers, "a list of objects", "a list of objects")
        return
    for i, tier in enumerate(tiers):
        kind, location = tier.get("type"), f"secondary_tiers[{i}]."
        if known and str(kind) not in known and not (kind and tier.get("module_path")):
            yield kinds.TIER.near(f"{location}type", str(kind), sorted(known))
        elif parameters := parameters_of(*known.get(str(kind), ("", ""))):
            names, required, takes_all = parameters
            for key in sorted(required - _BY_VLLM - tier.keys()):
                yield kinds.TIER_OPTION_MISSING.at(f"{location}{key}", tier=kind)
            for key in () if takes_all else tier.keys() - names - _OF_TIERS:
                yield kinds.TIER_OPTION.near(f"{location}{key}", key, sorted(names - _BY_VLLM))


def _of_others(name: str, extra: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is ignored, refused without a name, or may block the scheduler for long, isolated or not."""
    if name == _SIMPLE and "disk_path" in extra and extra.get("kv_offload_backend", "cpu") == "cpu":
        yield kinds.UNUSED_DISK.at("disk_path")
    if name in _NIXL and isinstance(backends := extra.get("backends"), str):
        yield _wrong_type("backends", backends, 'a list of names, such as ["UCX"]', "a list")
    seconds = extra.get(_MQ_TIMEOUT, 300)
    if name == "LMCacheMPConnector" and _is_number(seconds) and int(seconds or 0) > _LONG_S:
        yield kinds.LONG_CALLS.at(_MQ_TIMEOUT, seconds=seconds, limit=_LONG_S)
    if name == "MooncakeStoreConnector" and extra.get("enable_lookup", True) and not extra.get("lookup_async"):
        yield kinds.BLOCKING.at("lookup_async")
