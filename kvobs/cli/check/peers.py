"""Check whether engines can hand KV over to each other: their addresses, and the connectors of one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from kvobs.cli.check import rules
from kvobs.cli.check.flags import ALONE, HOST_NETWORK, MORE, Flags
from kvobs.cli.check.result import CheckResult
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, show

_NIXL, _P2P = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_HOST"
_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
_OF_BLOCKS = {"model": None, "block-size": None, "dtype": "auto", "kv-cache-dtype": "auto"}
"""Options of vLLM -> their defaults, where these are not the platform's."""
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


def side_channels(result: CheckResult, flags: Flags) -> Iterator[Finding]:
    """Warn of the address at which another engine would find this one: in another container it finds itself."""
    if HOST_NETWORK in flags.environment or not flags.is_elsewhere:
        return
    for _, entry in rules.entries(result.config):
        extra = entry.get(PATH)
        tiers = extra.get("secondary_tiers") if isinstance(extra, Mapping) else None
        p2p = [i for i, tier in enumerate(tiers if isinstance(tiers, list) else ()) if _is_p2p(tier)]
        name = str(entry.get("kv_connector"))
        for variable in [_NIXL] * name.startswith("Nixl") + [_P2P] * bool(p2p):
            given = flags.environment.get(variable)
            if given in _LOCAL:
                yield kinds.ADDRESS.at(f"environment variable {variable}", given=show(given), name=name)
            elif given is None and ALONE in flags.environment and not (flags.launcher or MORE in flags.environment):
                yield kinds.NO_ADDRESS.at(f"environment variable {variable}", name=name)


def _is_p2p(tier: object) -> bool:
    return isinstance(tier, Mapping) and tier.get("type") == "p2p" and not tier.get("host")


def of_blocks(flags: Flags) -> dict[str, str]:
    """Return the options on which the bytes of an engine's KV blocks depend, and its model, if they are known."""
    given = {f"--{name}": flags.options.get(name, default) for name, default in _OF_BLOCKS.items()}
    given[_LAYOUT] = flags.environment.get(_LAYOUT)
    return {name: str(value) for name, value in given.items() if value is not None and "$" not in f"{value}"}


def compare(results: Mapping[str, CheckResult]) -> None:
    """Warn of engines of one file, by their locations, that can't hand KV over to each other, at the first of them."""
    engines = {
        location: roles
        for location, result in results.items()
        if (roles := {each.hands_over: each.kv_role for each in result.connectors if each.hands_over})
    }
    for location, roles in engines.items():
        others = {kind for other, its in engines.items() if other != location for kind in its}
        if others and others.isdisjoint(roles):
            here, there = " and ".join(roles), " and ".join(sorted(others))
            results[location].add(kinds.PAIR.at("kv_connector", here=here, others=there))
            return
    _compare_blocks(results, engines)
    for kind in {kind: None for roles in engines.values() for kind in roles}:
        its = {location: roles[kind] for location, roles in engines.items() if kind in roles}
        for role, lacks in (("kv_producer", "takes"), ("kv_consumer", "computes")):
            if len(its) > 1 and set(its.values()) == {role}:
                found = kinds.PAIR_ROLES.at("kv_role", role=role, number=len(its), kind=kind, lacks=lacks)
                results[next(iter(its))].add(found)


def _compare_blocks(results: Mapping[str, CheckResult], engines: Mapping[str, Mapping[str, str | None]]) -> None:
    """Warn of options that differ between an engine that gives KV and one that takes it, each at the first pair."""
    warned = set[str]()
    for (location, roles), (other, its) in combinations(engines.items(), 2):
        here, there = results[location].of_blocks, results[other].of_blocks
        fitting = (kind for kind in roles if kind in its and (roles[kind] != its[kind] or its[kind] == "kv_both"))
        if (kind := next(fitting, None)) is None or here.get("--model") != there.get("--model"):
            continue
        for name in here:
            if name in there and here[name] != there[name] and name not in warned:
                warned.add(name)
                path = f"environment variable {name}" if name == _LAYOUT else name
                found = kinds.PAIR_BLOCKS.at(path, here=here[name], there=there[name], location=other, kind=kind)
                results[location].add(found)
