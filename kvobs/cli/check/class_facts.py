"""Read the properties of the configured connector classes, without building connectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from types import MethodType, SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvobs import host
from kvobs.children.configured import class_of, named
from kvobs.children.specs import ChildSpec, offers_sync_only, why_not_isolated
from kvobs.children.validation import NotUsableError, transfer_config
from kvobs.cli.check.facts import Answer, Facts, Refused
from kvobs.findings import show
from kvobs.hooks import HOOKS, is_empty
from kvobs.signals import is_timed


def answer(entry: Mapping[str, Any], *, has_hisparse: bool) -> Answer:
    """Return what vLLM says of one entry; ``has_hisparse``: whether a HiSparseConnector is beside it."""
    try:
        cls = class_of(entry["kv_connector"], entry.get("kv_connector_module_path"))
    except NotUsableError as error:
        return Answer(refused=_refused(error))
    bases = tuple((base.__module__, base.__name__) for base in cls.__mro__)
    transfer, _ = transfer_config(entry, "", KVTransferConfig)
    if transfer is None:
        return Answer(bases)
    try:
        facts = facts_of(ChildSpec(0, entry["kv_connector"], cls, transfer), has_hisparse=has_hisparse)
    except NotUsableError as error:
        return Answer(bases, refused=_refused(error))
    return Answer(bases, facts)


def _refused(error: NotUsableError) -> Refused:
    return Refused(error.found, error.allowed, error.fix)


def facts_of(spec: ChildSpec, *, has_hisparse: bool) -> Facts:
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
        empty_hooks=empty,
        busy_hooks=tuple(name for name in known if name not in empty),
        supports_hma=_ask("supports_hma", lambda: bool(KVConnectorFactory.supports_hma_config(transfer))),
        supports_sleep_mode=None if sleep is None else _ask("supports_sleep_mode", lambda: bool(sleep(transfer))),
        requires_piecewise=_ask(
            "requires_piecewise_for_cudagraph",
            lambda: bool(cls.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)),
        ),
        layouts=(
            _layout(spec, has_hisparse=has_hisparse, is_mla=False),
            _layout(spec, has_hisparse=has_hisparse, is_mla=True),
        ),
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


def _layout(spec: ChildSpec, *, has_hisparse: bool, is_mla: bool) -> str | None:
    """Return the layout that the class needs, given the parts of vLLM's configuration that vLLM's classes read."""
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
