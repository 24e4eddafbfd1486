"""Check whether engines can hand KV over to each other: their addresses, and the connectors of one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvobs.cli.check import rules
from kvobs.cli.check.flags import ALONE, HOST_NETWORK, MORE, Flags
from kvobs.cli.check.result import CheckResult
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
            fix = "set it to the pod's or container's address: in Kubernetes by a fieldRef to status.podIP"
            if given in _LOCAL:
                text = f"found {show(given)}, which another engine takes for itself: {name} tells it that"
                yield Finding(f"environment variable {variable}", text, fix=fix)
            elif given is None and ALONE in flags.environment and not (flags.launcher or MORE in flags.environment):
                text = f"is not set: {name} tells another engine 'localhost', which it takes for itself"
                yield Finding(f"environment variable {variable}", text, fix=fix)


def _is_p2p(tier: object) -> bool:
    return isinstance(tier, Mapping) and tier.get("type") == "p2p" and not tier.get("host")


def compare(places: Sequence[str], results: Sequence[CheckResult]) -> None:
    """Warn of engines of one file that can't hand KV over to each other, at the first of them."""
    engines = {
        place: {each.hands_over: each.kv_role for each in result.connectors if each.hands_over}
        for place, result in zip(places, results, strict=True)
    }
    engines = {place: roles for place, roles in engines.items() if roles}
    by_place = dict(zip(places, results, strict=True))
    for place, roles in engines.items():
        others = {kind for other, its in engines.items() if other != place for kind in its}
        if others and others.isdisjoint(roles):
            text = f"found {' and '.join(roles)} here and {' and '.join(sorted(others))} in the others of this file, "
            text += "which can't hand KV over to each other"
            by_place[place].add(warnings=[Finding("kv_connector", text, fix="use one connector in engines of a pair")])
            return
    for kind in {kind: None for roles in engines.values() for kind in roles}:
        its = {place: roles[kind] for place, roles in engines.items() if kind in roles}
        for role, lacks in (("kv_producer", "takes"), ("kv_consumer", "computes")):
            if len(its) > 1 and set(its.values()) == {role}:
                text = f"found {role!r} in all {len(its)} engines with {kind} of this file: none {lacks} their KV"
                fix = "give one of them the other role, unless it is in another file"
                by_place[next(iter(its))].add(warnings=[Finding("kv_role", text, fix=fix)])
