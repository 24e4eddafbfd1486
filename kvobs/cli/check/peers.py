"""Check whether engines can hand KV over to each other: their addresses, and the connectors of one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvobs.cli.check import rules
from kvobs.cli.check.flags import ALONE, HOST_NETWORK, MORE, Flags
from kvobs.cli.check.result import CheckResult
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, show

_NIXL, _P2P = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_HOST"
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
    for kind in {kind: None for roles in engines.values() for kind in roles}:
        its = {location: roles[kind] for location, roles in engines.items() if kind in roles}
        for role, lacks in (("kv_producer", "takes"), ("kv_consumer", "computes")):
            if len(its) > 1 and set(its.values()) == {role}:
                found = kinds.PAIR_ROLES.at("kv_role", role=role, number=len(its), kind=kind, lacks=lacks)
                results[next(iter(its))].add(found)
