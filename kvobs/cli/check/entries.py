"""Check each configured connector by its text alone: its own options, misplaced keys, and how it fits beside others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvobs.children.known import OURS, ROUTER
from kvobs.children.validation import misplaced
from kvobs.cli.check import building
from kvobs.cli.check.rewrite import Router
from kvobs.config import PATH
from kvobs.findings import Finding

_OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_DEEPEST = 8


def findings(whole: Mapping[str, Any], router: Router, *, has_vllm: bool) -> tuple[list[Finding], list[Finding]]:
    """Return the mistakes and the warnings about the entries of a configuration with a router.

    Args:
        whole: the configuration as kvobs would get it.
        router: what routes in the configuration as it is.
        has_vllm: whether this is the environment of an engine.
    """
    mistakes: list[Finding] = []
    warnings = misplaced(whole, "")
    for path, entry in _walk(whole, ""):
        refused, ignored = building.findings(entry, path, has_vllm=has_vllm)
        mistakes += refused
        warnings += [*misplaced(entry, path), *_nested(entry, path), *ignored]
    warnings += _roles(whole)
    mistakes += _hisparses(whole)
    if router is Router.STOCK:
        warnings += _same_class(whole)
    return mistakes, warnings


def _walk(parent: Mapping[str, Any], path: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and entry of each connector, those within others too."""
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


def _nested(entry: Mapping[str, Any], path: str) -> list[Finding]:
    """Warn about vLLM's router within another one; kvobs within kvobs is a mistake found elsewhere."""
    if entry.get("kv_connector") != ROUTER or entry.get("kv_connector_module_path") in OURS:
        return []
    found = f"found vLLM's {ROUTER} within {ROUTER}: kvobs sees it as one connector, and none of those in it"
    return [Finding(f"{path}.kv_connector", found, fix="move its connectors to the list that it is in")]


def _roles(whole: Mapping[str, Any]) -> list[Finding]:
    """Warn about connectors that only receive what the engine only sends, or the other way round."""
    role = whole.get("kv_role")
    opposite = _OPPOSITE.get(role) if isinstance(role, str) else None
    return [
        Finding(
            f"{PATH}.connectors[{i}].kv_role",
            f"found {opposite!r}, while kv_role at the top level is {role!r}",
            f"{role!r} or 'kv_both'",
            "use the role that this engine has, unless it is meant to do both",
        )
        for i, entry in enumerate(_connectors(whole))
        if opposite is not None and isinstance(entry, Mapping) and entry.get("kv_role") == opposite
    ]


def _hisparses(whole: Mapping[str, Any]) -> list[Finding]:
    """Return the mistake of several HiSparseConnectors, which vLLM refuses."""
    places = [i for i, entry in enumerate(_connectors(whole)) if _name(entry) == "HiSparseConnector"]
    found = "found a second HiSparseConnector, and vLLM allows one"
    return [Finding(f"{PATH}.connectors[{i}].kv_connector", found, fix="remove it") for i in places[1:]]


def _same_class(whole: Mapping[str, Any]) -> list[Finding]:
    """Warn about connectors of one class under vLLM's own router, which keeps one set of metrics for each class."""
    seen: set[str] = set()
    found = []
    for i, entry in enumerate(_connectors(whole)):
        name = _name(entry)
        if name in seen:
            text = (
                f"found a second {name}: vLLM's own MultiConnector keeps one set of metrics for a class, so that the "
                "numbers of both are mixed, or the server fails where their metrics differ"
            )
            found.append(Finding(f"{PATH}.connectors[{i}].kv_connector", text, fix="route with kvobs, see --rewrite"))
        elif name is not None:
            seen.add(name)
    return found


def _name(entry: Any) -> str | None:
    name = entry.get("kv_connector") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None
