"""The public members of vLLM's connector classes: what a connector may be asked."""

import inspect
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


def public_members() -> dict[str, Any]:
    """Return the public members of vLLM's connector classes, each as it stands in its class body."""
    members = vars(KVConnectorBase_V1) | vars(SupportsHMA)
    return {name: member for name, member in members.items() if not name.startswith("_")}


def hooks() -> dict[str, Any]:
    """Return each public hook of vLLM's connector classes: its kind and its parameters."""
    members = public_members().items()
    return {name: {"kind": _kind(member), "parameters": parameters(member)} for name, member in members}


def _kind(member: Any) -> str:
    for kind, types in (("classmethod", classmethod), ("property", property)):
        if isinstance(member, types):
            return kind
    return "method" if inspect.isfunction(member) else "attribute"


def parameters(member: Any) -> list[list[Any]] | None:
    """Return [name, kind, has a default] per parameter, without self and cls; None for what is not called."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not callable(function):
        return None
    found = list(inspect.signature(function).parameters.values())
    own = found if inspect.ismethod(function) or found[:1] == [] or found[0].name not in ("self", "cls") else found[1:]
    return [[each.name, each.kind.name, each.default is not each.empty] for each in own]
