"""Read the properties of the configured connector classes, without building connectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvobs import host
from kvobs.children.configured import named
from kvobs.children.specs import ChildSpec, offers_sync_only, why_not_isolated
from kvobs.children.validation import NotUsableError
from kvobs.findings import show
from kvobs.hooks import HOOKS, is_empty
from kvobs.signals import is_timed

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_VLLMS = "vllm.distributed.kv_transfer.kv_connector.v1."
# Libraries that vLLM's own classes import only when they are built: any of these.
_LIBRARIES = {"nixl": ("nixl", "nixl_rocm"), "mooncake": ("mooncake",), "lmcache_connector": ("lmcache",)}


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a child's class with the child's configuration; None: known only after building.

    ``not_isolated`` is the reason if it can't be isolated. ``layouts`` are the KV cache layouts that it needs, for
    models without and with MLA.
    """

    class_path: str
    package: str | None
    library: str | None
    empty_hooks: tuple[str, ...]
    busy_hooks: tuple[str, ...]
    supports_hma: bool
    supports_sleep_mode: bool | None
    requires_piecewise: bool
    layouts: tuple[str | None, str | None]
    has_handshake: bool
    must_deliver: bool | None
    not_isolated: str | None
    sync_only: bool


def facts_of(spec: ChildSpec, siblings: Sequence[Mapping[str, Any]]) -> Facts:
    """Read the properties of a child's class.

    Raises:
        NotUsableError: the class can't be used, or one of its methods raises.
    """
    cls: Any = spec.connector_class
    transfer = spec.transfer_config
    if not issubclass(cls, KVConnectorBase_V1):
        found = f"found {show(transfer.kv_connector)}, which is not a KVConnectorBase_V1"
        raise NotUsableError(found, fix="name the class of a KV connector")
    known = [hook.name for hook in HOOKS.values() if is_timed(hook) and hasattr(cls, hook.name)]
    empty = tuple(name for name in known if _is_empty(cls, name))
    sleep = host.sleep_mode_hook(cls)
    return Facts(
        class_path=f"{cls.__module__}.{cls.__qualname__}",
        package=_package_of(cls.__module__),
        library=_library_of(cls.__module__),
        empty_hooks=empty,
        busy_hooks=tuple(name for name in known if name not in empty),
        supports_hma=_ask("supports_hma", lambda: bool(KVConnectorFactory.supports_hma_config(transfer))),
        supports_sleep_mode=None if sleep is None else _ask("supports_sleep_mode", lambda: bool(sleep(transfer))),
        requires_piecewise=_ask(
            "requires_piecewise_for_cudagraph",
            lambda: bool(cls.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)),
        ),
        layouts=(_layout(spec, siblings, is_mla=False), _layout(spec, siblings, is_mla=True)),
        has_handshake="get_handshake_metadata" not in empty,
        must_deliver=_must_deliver(cls, transfer),
        not_isolated=why_not_isolated(spec),
        sync_only=offers_sync_only(spec),
    )


def _ask(hook: str, call: Callable[[], bool]) -> bool:
    try:
        return call()
    except Exception as error:
        raise NotUsableError(f"its {hook} raises {named(error)}", fix="correct what the error names") from error


def _is_empty(cls: Any, hook: str) -> bool:
    """Return whether the class does not implement a hook, as ``Child.does`` determines for an object."""
    member = inspect.getattr_static(cls, hook)
    return inspect.isfunction(member) and is_empty(MethodType(member, cls))


def _layout(spec: ChildSpec, siblings: Sequence[Mapping[str, Any]], *, is_mla: bool) -> str | None:
    """Return the layout that the class needs, given the parts of vLLM's configuration that vLLM's classes read."""
    has_hisparse = any(sibling.get("kv_connector") == "HiSparseConnector" for sibling in siblings)
    shown: Any = SimpleNamespace(
        kv_transfer_config=spec.transfer_config,
        model_config=SimpleNamespace(use_mla=is_mla),
        attention_config=SimpleNamespace(hisparse_config=object() if has_hisparse else None),
    )
    try:
        layout = spec.connector_class.get_required_kvcache_layout(shown)
    except Exception:
        return "unknown"
    return layout if layout is None else str(layout)


def _must_deliver(cls: Any, transfer: KVTransferConfig) -> bool | None:
    member = inspect.getattr_static(cls, "requires_kv_delivery", False)
    if not isinstance(member, property):
        return bool(member)
    assert member.fget is not None
    try:
        return bool(member.fget(SimpleNamespace(_kv_transfer_config=transfer)))
    except Exception:
        return None


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _package_of(module: str) -> str | None:
    found = _distributions().get(module.partition(".")[0])
    return f"{found[0]} {version(found[0])}" if found else None


def _library_of(module: str) -> str | None:
    names = _LIBRARIES.get(module.removeprefix(_VLLMS).partition(".")[0], ()) if module.startswith(_VLLMS) else ()
    if not names:
        return None
    name = next((name for name in names if find_spec(name) is not None), None)
    if name is None:
        raise NotUsableError(f"its class requires {names[0]!r}, which is not installed here", fix=f"install {names[0]}")
    return _package_of(name) or name
