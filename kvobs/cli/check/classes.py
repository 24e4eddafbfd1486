"""Read the properties of connectors' classes, without building connectors. Importing this module imports vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import MethodType, SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.plugins import load_general_plugins

from kvobs.children.configured import class_of, named
from kvobs.children.known import LIBRARIES, is_installed
from kvobs.children.validation import NotUsableError
from kvobs.schema.findings import show
from kvobs.schema.signals import is_timed
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, is_empty

__all__ = ["Facts", "KVTransferConfig", "class_of", "facts_of", "load_general_plugins"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a connector class with the connector's configuration; None: known only after building.

    ``layouts`` are the KV cache layouts that it needs, for models without and with MLA.
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


def facts_of(cls: Any, transfer: KVTransferConfig, *, has_hisparse: bool) -> Facts:
    """Read the properties of a connector class; ``has_hisparse``: whether a HiSparseConnector is beside it.

    Raises:
        NotUsableError: the class can't be used, or one of its methods raises.
    """
    if not issubclass(cls, KVConnectorBase_V1):
        found = f"found {show(transfer.kv_connector)}, which is not a KVConnectorBase_V1"
        raise NotUsableError(found, fix="name the class of a KV connector")
    known = [hook.name for hook in HOOKS.values() if is_timed(hook) and hasattr(cls, hook.name)]
    empty = tuple(name for name in known if _is_empty(cls, name))
    sleep, extra = versions.sleep_mode_hook(cls), transfer.kv_connector_extra_config
    return Facts(
        class_path=f"{cls.__module__}.{cls.__qualname__}",
        package=_package_of(cls.__module__),
        library=_library_of(transfer),
        empty_hooks=empty,
        busy_hooks=tuple(name for name in known if name not in empty),
        supports_hma=_answer("supports_hma", lambda: KVConnectorFactory.supports_hma_config(transfer)),
        supports_sleep_mode=None if sleep is None else _answer("supports_sleep_mode", lambda: sleep(transfer)),
        requires_piecewise=_answer(
            "requires_piecewise_for_cudagraph", lambda: cls.requires_piecewise_for_cudagraph(extra)
        ),
        layouts=(_layout(cls, transfer, has_hisparse, False), _layout(cls, transfer, has_hisparse, True)),
        has_handshake="get_handshake_metadata" not in empty,
        must_deliver=_must_deliver(cls, transfer),
    )


def _answer(hook: str, call: Callable[[], object]) -> bool:
    try:
        return bool(call())
    except Exception as error:
        raise NotUsableError(f"its {hook} raises {named(error)}", fix="correct what the error names") from error


def _is_empty(cls: Any, hook: str) -> bool:
    """Return whether the class does not implement a hook, as ``Child.does`` determines for an object."""
    member = inspect.getattr_static(cls, hook)
    return inspect.isfunction(member) and is_empty(MethodType(member, cls))


def _layout(cls: Any, transfer: KVTransferConfig, has_hisparse: bool, is_mla: bool) -> str | None:
    """Return the layout that the class needs, given the parts of vLLM's configuration that vLLM's classes read."""
    vllm_config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=is_mla),
        attention_config=SimpleNamespace(hisparse_config=object() if has_hisparse else None),
    )
    try:
        layout = cls.get_required_kvcache_layout(vllm_config)
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


def _library_of(transfer: KVTransferConfig) -> str | None:
    """Return the libraries behind a connector of vLLM that are installed here, with their versions."""
    if transfer.kv_connector_module_path is not None:
        return None
    needs = LIBRARIES.get(transfer.kv_connector or "", ())
    modules = [module for need in needs for module in need.modules if is_installed(module)]
    return ", ".join(_package_of(module) or module for module in modules) or None


def _package_of(module: str) -> str | None:
    """Return the distribution that a module belongs to, with its version."""
    name = module.partition(".")[0]
    for distribution in (name, *_distributions().get(name, ())):
        with suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"
    return None


_distributions = cache(packages_distributions)
