"""Enable kvobs with ``KVOBS_ENABLE=1``, without a configuration key, and refuse wrong options before engines start.

With the variable its class is registered as ``MultiConnector``, and also routes a single connector. If another plugin
registers a class under that name (vllm-ascend does), that class is kept, in whichever order they run, and a warning is
logged.
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
from kvobs.schema import kinds
from kvobs.schema.config import ENABLE_VARIABLE, ConfigError, is_enabled
from kvobs.schema.findings import show

_STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector"
_CHECKS = "_kvobs_checks"  # marks vLLM's patched function
_INSTEAD = 'To enable kvobs, set "kv_connector_module_path": "kvobs" next to "kv_connector"'


class Loader:
    """The loader of kvobs's class in vLLM's registry."""

    def __call__(self) -> type:
        from kvobs.connector import MultiConnector

        return MultiConnector


def register() -> None:
    """Have each configuration checked, and register kvobs's class under vLLM's name if the environment variable is set.

    vLLM calls this in every process, some of them more than once.
    """
    if is_enabled():
        _register_router()
    try:
        _check_configurations()
    except Exception as error:  # vLLM would end, also without kvobs in its configuration
        once("check", WARNING, "kvobs can't check vLLM's configuration before the engine starts: %r", error)


def _register_router() -> None:
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


def _is_registered() -> bool:
    if not is_enabled():
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return isinstance(KVConnectorFactory._registry.get(ROUTER), Loader)


def _check_configurations() -> None:
    """Have vLLM refuse kvobs's wrong options where it makes a configuration, and put single connectors behind kvobs."""
    from vllm.config import VllmConfig

    # It resolves ``--kv-offloading-size``; vLLM's own checks by the connector's name are before it.
    resolve = getattr(VllmConfig, "_post_init_kv_transfer_config", None)
    if resolve is None or hasattr(resolve, _CHECKS):
        return

    @wraps(resolve)
    def resolve_and_check(self: Any) -> None:
        is_enabled_here = _is_registered()
        # A copy of a wrapped configuration: vLLM would put its connector's name in again.
        if not (is_enabled_here and getattr(self.kv_transfer_config, "kv_connector_module_path", None) in OURS):
            resolve(self)
        if is_enabled_here:
            try:
                self.kv_transfer_config = _wrapped(self.kv_transfer_config)
            except Exception as error:
                text = "kvobs is not enabled, because it can't route the connector: %r. %s"
                once("wrap", WARNING, text, error, _INSTEAD)
        try:
            _refuse_mistakes(self.kv_transfer_config, is_enabled=is_enabled_here)
        except ConfigError:
            raise
        except Exception as error:
            once("refuse", WARNING, "kvobs's options are checked later, when the engine starts: %r", error)

    setattr(resolve_and_check, _CHECKS, True)
    VllmConfig._post_init_kv_transfer_config = resolve_and_check


def _refuse_mistakes(config: Any, *, is_enabled: bool) -> None:
    """Raise ``ConfigError`` if a configuration of kvobs has errors that its text shows."""
    name, module = (getattr(config, key, None) for key in ("kv_connector", "kv_connector_module_path"))
    if module not in OURS and not (name == ROUTER and module is None and is_enabled):
        return
    if name != ROUTER:
        fix = "remove --kv-offloading-size if it is set; else use the configuration that kvobs check --rewrite prints"
        found = f"found {show(name)} in the module {module!r}"
        raise ConfigError([kinds.ROUTER_NAME.at("kv_connector", repr(ROUTER), fix, found=found)])
    from kvobs.connectors import validation

    policy = getattr(config, "kv_load_failure_policy", None)
    given = validation.validate(config.kv_connector_extra_config, policy, type(config), engine_id=config.engine_id)
    if given.mistakes:
        raise ConfigError(given.mistakes)


def _wrapped(config: Any) -> Any:
    """Return vLLM's configuration with kvobs as the router of its single connector; else the same one."""
    name = getattr(config, "kv_connector", None)
    if name in (None, ROUTER, PD_ROUTER):
        return config
    if "dynamo" in sys.modules:  # it compares the connector's name
        once(
            "wrap",
            WARNING,
            "kvobs is not enabled, because NVIDIA Dynamo must find %s as the connector. %s",
            name,
            _INSTEAD,
        )
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
