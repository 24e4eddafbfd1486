"""Check the connectors' entries by their text: libraries, the connectors' own options, misplaced keys, and roles.

A connector's own option is checked if vLLM (0.32 here) ignores a mistake in it, or reports it without naming the option
or a way to correct it.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvobs.cli.check import vllm_source
from kvobs.connectors.known import OURS, ROUTER, missing_libraries
from kvobs.connectors.validation import misplaced
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, unknown

_OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)(i?)")  # of Kubernetes
_DEEPEST = 8  # routers within routers
_MQ_TIMEOUT, _LONG_S = "lmcache.mp.mq_timeout", 10


class Findings(NamedTuple):
    mistakes: list[Finding]
    warnings: list[Finding]


def check_entries(whole: Mapping[str, Any], *, is_stock: bool, has_vllm: bool) -> Findings:
    """Return the mistakes and the warnings about the entries of a configuration, given as kvobs would get it.

    ``is_stock``: vLLM's own router is in the configuration as it is; ``has_vllm``: libraries must be installed here.
    """
    findings = Findings([], misplaced(whole, ""))
    for path, entry in _walk(whole, ""):
        module = entry.get("kv_connector_module_path")
        if module is None and has_vllm:
            findings.mistakes.extend(_libraries(entry, path))
        if module is None or str(module).startswith("lmcache."):
            _check_own_options(findings, entry, path)
        findings.warnings.extend([*misplaced(entry, path), *_nesting(entry, path)])
    findings.warnings.extend(_roles(whole))
    if is_stock:
        findings.warnings.extend(_same_class(whole))
    return findings


def _walk(parent: Mapping[str, Any], path: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and entry of each connector, also of those within a connector."""
    for i, entry in enumerate(_connectors(parent)):
        if isinstance(entry, Mapping):
            place = f"{path}{PATH}.connectors[{i}]"
            yield place, entry
            if entry.get("kv_connector") == ROUTER and depth < _DEEPEST:
                yield from _walk(entry, f"{place}.", depth + 1)


def _connectors(parent: Mapping[str, Any]) -> list[Any]:
    extra = parent.get(PATH)
    connectors = extra.get("connectors") if isinstance(extra, Mapping) else None
    return list(connectors) if isinstance(connectors, list | tuple) else []


def _name(entry: Any) -> str | None:
    name = entry.get("kv_connector") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None


def _libraries(entry: Mapping[str, Any], path: str) -> Iterator[Finding]:
    for need in missing_libraries(name := _name(entry) or ""):
        found = f"found {name!r}, which needs {need.modules[0]!r}, which is not installed here"
        yield Finding(f"{path}.kv_connector", found, fix=need.install)


def _nesting(entry: Mapping[str, Any], path: str) -> list[Finding]:
    """Warn about vLLM's router within another router; kvobs within kvobs is a mistake, found with the classes."""
    extra = entry.get(PATH)
    if entry.get("kv_connector") != ROUTER or entry.get("kv_connector_module_path") in OURS:
        if entry.get("kv_connector") == ROUTER or not isinstance(extra, Mapping) or "kvobs" not in extra:
            return []
        found = "has no effect in a connector: kvobs reads its options beside the list of connectors only"
        return [Finding(f"{path}.{PATH}.kvobs", found, fix=f"move it out, beside {PATH}.connectors")]
    found = f"found vLLM's {ROUTER} within {ROUTER}: kvobs sees it as one connector, and none of those in it"
    return [Finding(f"{path}.kv_connector", found, fix="move its connectors to the list that it is in")]


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


def check_memory(whole: Mapping[str, Any], limit: str) -> Iterator[Finding]:
    """Yield a mistake if connectors keep more in memory than a container's limit, such as 64Gi; empty: not known."""
    extras = [entry.get(PATH) for _, entry in _walk(whole, "") if _name(entry) in _NUMBERS]
    sizes = [extra.get("cpu_bytes_to_use") or 0 for extra in extras if isinstance(extra, Mapping)]
    needed = sum(map(int, filter(_is_number, sizes)))
    found = _QUANTITY.fullmatch(limit)
    if found and needed > float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index((found[2] or " ").upper()):
        text = f"found {limit}, while connectors keep {needed:,} bytes in memory: the kernel would end the engine"
        yield Finding("resources.limits.memory", text, fix="raise the limit, or lower cpu_bytes_to_use")


_NUMBERS = {
    "OffloadingConnector": ("cpu_bytes_to_use", "block_size", "blocks_per_chunk", "store_threshold"),
    "SimpleCPUOffloadConnector":
        ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "disk_capacity_bytes", "disk_buffer_slots"),
}  # fmt: skip
_SMALL = 1 << 20
_EXAMPLE = "such as 10737418240 for 10 GiB"
_CPU, _TIERING = "CPUOffloadingSpec", "TieringOffloadingSpec"


def _check_own_options(findings: Findings, entry: Mapping[str, Any], path: str) -> None:
    extra = entry.get(PATH) or {}
    name = _name(entry)
    if name is None or not isinstance(extra, Mapping):
        return
    place = f"{path}.{PATH}"
    for key in _NUMBERS.get(name, ()):
        if not _is_number(extra.get(key, 0)):
            kind = f"found a value of type {type(extra[key]).__name__}"
            fix = "write the number alone, without a unit"
            findings.mistakes.append(Finding(f"{place}.{key}", kind, "a whole number", fix))
    if check := CHECKS.get(name):
        check(findings, extra, place)


def _is_number(value: Any) -> bool:
    """Return whether vLLM's ``int(value)`` succeeds; None stands for the default."""
    try:
        int(0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _check_offloading(findings: Findings, extra: Mapping[str, Any], place: str) -> None:
    spec, size = extra.get("spec_name", _CPU), extra.get("cpu_bytes_to_use")
    specs = sorted(vllm_source.offloading_specs() or {_CPU, _TIERING})
    if spec not in specs:
        if extra.get("spec_module_path") is None:
            otherwise = "set spec_module_path to the module of that class"
            findings.mistakes.append(unknown("spec", f"{place}.spec_name", str(spec), specs, otherwise))
        return  # a class from elsewhere has other options
    if not size:
        fix = f'add "cpu_bytes_to_use", {_EXAMPLE}'
        if "num_cpu_blocks" in extra:
            fix = f"replace num_cpu_blocks, which older vLLMs had, by cpu_bytes_to_use, {_EXAMPLE}"
        elif misspelt := difflib.get_close_matches("cpu_bytes_to_use", extra, 1, 0.9):
            fix = f"rename {misspelt[0]!r}, which has no effect"
        findings.mistakes.append(Finding(f"{place}.cpu_bytes_to_use", "is missing", fix=fix))
    elif _is_number(size) and int(size) < _SMALL:
        text = "is less than 1 MiB, room for no KV block: nothing will be offloaded"
        findings.warnings.append(Finding(f"{place}.cpu_bytes_to_use", text, fix=f"give bytes, {_EXAMPLE}"))
    if spec != _TIERING and extra.get("secondary_tiers"):
        text = f"has no effect: only {_TIERING} has tiers, and spec_name is {spec!r}"
        findings.warnings.append(Finding(f"{place}.secondary_tiers", text, fix=f'add "spec_name": "{_TIERING}"'))


def _check_simple_offload(findings: Findings, extra: Mapping[str, Any], place: str) -> None:
    if "disk_path" in extra and extra.get("kv_offload_backend", "cpu") == "cpu":
        text = "has no effect: kv_offload_backend is 'cpu'"
        findings.warnings.append(Finding(f"{place}.disk_path", text, fix='add "kv_offload_backend": "disk"'))


def _check_nixl(findings: Findings, extra: Mapping[str, Any], place: str) -> None:
    if isinstance(extra.get("backends"), str):
        text = "found a value of type str"
        findings.mistakes.append(Finding(f"{place}.backends", text, 'a list of names, such as ["UCX"]', "write a list"))


def _check_lmcache(findings: Findings, extra: Mapping[str, Any], place: str) -> None:
    """Warn about a setting by which one call may block the scheduler for long, whether or not it is isolated."""
    seconds = extra.get(_MQ_TIMEOUT, 300)
    if _is_number(seconds) and int(seconds or 0) > _LONG_S:
        text = f"is {seconds} s: a call to a server that hangs blocks the engine as long, isolated or not"
        findings.warnings.append(Finding(f"{place}.{_MQ_TIMEOUT}", text, fix=f"set it to {_LONG_S} or less"))


def _check_mooncake_store(findings: Findings, extra: Mapping[str, Any], place: str) -> None:
    if extra.get("enable_lookup", True) and not extra.get("lookup_async"):
        text = "is false: a lookup waits for the store without a limit, and the engine with it, isolated or not"
        fix = "set it to true, and limit it by kvobs.lookup_timeout_ms"
        findings.warnings.append(Finding(f"{place}.lookup_async", text, fix=fix))


CHECKS: Mapping[str, Callable[[Findings, Mapping[str, Any], str], None]] = {
    "OffloadingConnector": _check_offloading,
    "SimpleCPUOffloadConnector": _check_simple_offload,
    "LMCacheMPConnector": _check_lmcache,
    "MooncakeStoreConnector": _check_mooncake_store,
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", "NixlPushConnector"), _check_nixl),
}
