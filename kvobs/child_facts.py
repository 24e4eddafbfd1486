"""What the configured classes say about themselves: asked of the classes, nothing is built."""

from __future__ import annotations

import difflib
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

from kvobs.children import ChildSpec
from kvobs.hooks import HOOKS, is_empty
from kvobs.notices import line
from kvobs.signals import is_timed

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_VLLMS = "vllm.distributed.kv_transfer.kv_connector.v1."
# What vLLM's own classes import only when they are built: any of these.
_LIBRARIES = {"nixl": ("nixl", "nixl_rocm"), "mooncake": ("mooncake",), "lmcache_connector": ("lmcache",)}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a child's class says, given the child's configuration; None stands for what only a built child can tell.

    ``layouts`` is the KV cache layout that it needs: of models without MLA, and of those with it.
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


class NotUsableError(ValueError):
    """Why a child's class can't be used, and what would help."""

    def __init__(self, says: str, fix: str) -> None:
        super().__init__(says)
        self.says, self.fix = says, fix


def facts_of(spec: ChildSpec, siblings: Sequence[Mapping[str, Any]]) -> Facts:
    """Ask a child's class.

    Raises:
        NotUsableError: when the class does not answer.
    """
    cls: Any = spec.connector_class
    transfer = spec.transfer_config
    known = [hook.name for hook in HOOKS.values() if is_timed(hook) and hasattr(cls, hook.name)]
    empty = tuple(name for name in known if _is_empty(cls, name))
    sleep = getattr(cls, "supports_sleep_mode", None)  # vLLM asks for it since 0.33
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
    )


def class_of(name: str, module: Any) -> type[KVConnectorBase_V1]:
    """Return a child's class, as vLLM finds it.

    Raises:
        NotUsableError: when there is none, or it is no connector.
    """
    asked: Any = SimpleNamespace(kv_connector=name, kv_connector_module_path=module)
    try:
        cls = KVConnectorFactory.get_connector_class(asked)
    except (Exception, SystemExit) as error:
        registered = sorted(getattr(KVConnectorFactory, "_registry", ()))
        if module is None and name not in registered:
            close = difflib.get_close_matches(name, registered, 1)
            raise NotUsableError(
                f"found {name!r}, which this vLLM does not know, allowed: {', '.join(registered)}",
                f"write {close[0]!r}" if close else "give the module of its class as kv_connector_module_path",
            ) from error
        fix = "correct kv_connector_module_path, or install what it needs into this environment"
        raise NotUsableError(f"found {name!r}, whose class can't be had: {_told(error)}", fix) from error
    if not (inspect.isclass(cls) and issubclass(cls, KVConnectorBase_V1)):
        raise NotUsableError(f"found {name!r}, which is no KVConnectorBase_V1", "name the class of a KV connector")
    return cls


def _ask(hook: str, call: Callable[[], bool]) -> bool:
    try:
        return call()
    except Exception as error:
        raise NotUsableError(f"its {hook} raises {_told(error)}", "correct what it says") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {line(error, 400)}"


def _is_empty(cls: Any, hook: str) -> bool:
    """Return what ``Child.does`` will deny, without an object to ask."""
    member = inspect.getattr_static(cls, hook)
    return inspect.isfunction(member) and is_empty(MethodType(member, cls))


def _layout(spec: ChildSpec, siblings: Sequence[Mapping[str, Any]], *, is_mla: bool) -> str | None:
    """Return the layout that the class needs, shown as much of vLLM's configuration as those of vLLM look at."""
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
        raise NotUsableError(f"its class needs {names[0]!r}, which is not installed here", f"install {names[0]}")
    return _package_of(name) or name
