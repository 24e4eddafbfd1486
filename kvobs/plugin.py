"""Register kvobs's class as ``MultiConnector`` in vLLM with ``KVOBS_ENABLE=1``, without a configuration key.

If another plugin registers its own class under that name (vllm-ascend does), that class is kept, in whichever order the
plugins run, and a warning is logged.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from kvobs.log import log
from kvobs.schema.config import ENABLE_VARIABLE, is_enabled

_NAME = "MultiConnector"
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

    registered = KVConnectorFactory._registry.get(_NAME)
    if isinstance(registered, Loader):
        return
    if registered is not None and (theirs := _class_path(registered)) != _STOCK:
        _warn(f"registered {theirs}")
        return
    loader = Loader()
    # Plugins run in any order, and the registry does not announce replaced entries.
    weakref.finalize(loader, _warn, "replaced its class").atexit = False
    KVConnectorFactory._registry[_NAME] = loader


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
    log.warning(text, ENABLE_VARIABLE, deed, _NAME, _INSTEAD)
