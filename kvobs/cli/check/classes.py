"""Read the properties of connectors' classes, without building connectors. Importing this module imports vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.plugins import load_general_plugins

from kvobs.connectors.configured import class_of, named
from kvobs.connectors.fanout import own_methods
from kvobs.connectors.validation import NotUsableError
from kvobs.schema.findings import show
from kvobs.vllm_api import versions

__all__ = ["Facts", "KVTransferConfig", "class_of", "facts_of", "load_general_plugins"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a connector class with the connector's configuration; None: known only after building.

    ``layouts`` are the KV cache layouts that it needs, for models without and with MLA.
    """

    class_path: str
    supports_hma: bool
    supports_sleep_mode: bool | None
    requires_piecewise: bool
    layouts: tuple[str | None, str | None]
    other_methods: tuple[str, ...] = ()
    """Public methods that are no hooks of vLLM."""


def facts_of(cls: Any, transfer: KVTransferConfig, *, has_hisparse: bool) -> Facts:
    """Read the properties of a connector class; ``NotUsableError`` if it can't be used, or one of its methods raises.

    ``has_hisparse`` is whether a HiSparseConnector is beside it.
    """
    if not issubclass(cls, KVConnectorBase_V1):
        found = f"found {show(transfer.kv_connector)}, which is not a KVConnectorBase_V1"
        raise NotUsableError(found, fix="name the class of a KV connector")
    sleep, extra = versions.sleep_mode_hook(cls), transfer.kv_connector_extra_config
    return Facts(
        class_path=f"{cls.__module__}.{cls.__qualname__}",
        supports_hma=_answer("supports_hma", lambda: KVConnectorFactory.supports_hma_config(transfer)),
        supports_sleep_mode=None if sleep is None else _answer("supports_sleep_mode", lambda: sleep(transfer)),
        requires_piecewise=_answer(
            "requires_piecewise_for_cudagraph", lambda: cls.requires_piecewise_for_cudagraph(extra)
        ),
        layouts=(_layout(cls, transfer, has_hisparse, False), _layout(cls, transfer, has_hisparse, True)),
        other_methods=tuple(own_methods(cls)),
    )


def _answer(hook: str, call: Callable[[], object]) -> bool:
    try:
        return bool(call())
    except Exception as error:
        raise NotUsableError(f"its {hook} raises {named(error)}", fix="correct what the error names") from error


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
