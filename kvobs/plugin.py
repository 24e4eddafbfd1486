"""Enable kvobs with ``KVOBS_ENABLE=1``, without a configuration key.

Its class is registered as ``MultiConnector``, and is the router of a single connector, too. If another plugin registers
a class under that name (vllm-ascend does), that class is kept, in whichever order they run, and a warning is logged.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from logging import INFO, WARNING
from typing import Any

from kvobs.connectors.known import OURS, PD_ROUTER, ROUTER
from kvobs.connectors.wrap import wrap
from kvobs.log import log, once
from kvobs.schema.config import ENABLE_VARIABLE, is_enabled

_STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector"
_INSTEAD = 'To enable kvobs, set "kv_connector_module_path": "kvobs" beside "kv_connector"'


class Loader:
    """The loader of kvobs's class in vLLM's registry."""

    def __call__(self) -> type:
        from kvobs.connector import MultiConnector

        return MultiConnector


def register() -> None:
    """Register kvobs's class under vLLM's name, if the environment variable is set.

    vLLM calls this in every process, some of them more than once.
    """
    if not is_enabled():
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registered = KVConnectorFactory._registry.get(ROUTER)
    if isinstance(registered, Loader):
        return
    if registered is not None and (theirs := _class_path(registered)) != _STOCK:
        _warn(f"registered {theirs}")
        return
    loader = Loader()
    # Plugins run in any order, and the registry does not announce replaced entries.
    weakref.finalize(loader, _warn, "replaced its class").atexit = False
    KVConnectorFactory._registry[ROUTER] = loader
    _wrap_single_connectors()


def _wrap_single_connectors() -> None:
    """Have each configuration that vLLM makes from now on route its single connector by kvobs."""
    from vllm.config import VllmConfig

    # It resolves ``--kv-offloading-size``; vLLM's own checks by the connector's name are before it.
    if (resolve := getattr(VllmConfig, "_post_init_kv_transfer_config", None)) is None:
        return

    @wraps(resolve)
    def resolve_and_wrap(self: Any) -> None:
        if getattr(self.kv_transfer_config, "kv_connector_module_path", None) in OURS:
            return  # a copy of a configuration: vLLM would put its connector's name in again
        resolve(self)
        try:
            self.kv_transfer_config = _wrapped(self.kv_transfer_config)
        except Exception as error:
            once("wrap", WARNING, "kvobs is not enabled: the connector can't be routed by it: %r. %s", error, _INSTEAD)

    VllmConfig._post_init_kv_transfer_config = resolve_and_wrap


def _wrapped(config: Any) -> Any:
    """Return vLLM's configuration with kvobs as the router of its single connector; else the same one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = getattr(config, "kv_connector", None)
    if name in (None, ROUTER, PD_ROUTER) or not isinstance(KVConnectorFactory._registry.get(ROUTER), Loader):
        return config
    if "dynamo" in sys.modules:  # it compares the connector's name
        once("wrap", WARNING, "kvobs is not enabled: NVIDIA Dynamo has to know %s. %s", name, _INSTEAD)
        return config
    usual = asdict(type(config)())
    given = {key: value for key, value in asdict(config).items() if key == "engine_id" or value != usual[key]}
    new = type(config)(**wrap(given))
    once("wrapped", INFO, "%s is set: kvobs routes to %s, the only connector", ENABLE_VARIABLE, name)
    return new


def _class_path(loader: Callable[[], Any]) -> str:
    """Return the path of the class that vLLM's registry would load, without importing it."""
    if not inspect.isfunction(loader):
        return repr(loader)
    names = inspect.getclosurevars(loader).nonlocals
    if {"module_path", "class_name"} <= names.keys():
        return f"{names['module_path']}.{names['class_name']}"
    return f"what {loader.__module__}.{loader.__qualname__} loads"


def _warn(deed: str) -> None:
    text = "%s is set, but kvobs is not enabled: another plugin has %s as %s. %s"
    log.warning(text, ENABLE_VARIABLE, deed, ROUTER, _INSTEAD)
