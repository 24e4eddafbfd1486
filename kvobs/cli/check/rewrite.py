"""Find the router that a configuration has, correct slips in the name of kvobs's, and change one to use kvobs."""

import copy
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from kvobs.connectors.known import OURS, PD_ROUTER, ROUTER
from kvobs.connectors.wrap import ROUTED, wrap
from kvobs.schema.config import PATH, ConfigError
from kvobs.schema.config import read as read_extra
from kvobs.schema.findings import Finding, show

_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")


class Router(Enum):
    """The router that a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()
    DYNAMO = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return the configured router, without looking at the environment."""
    module = config.get("kv_connector_module_path")
    if config.get("kv_connector") == PD_ROUTER and str(module).startswith("kvbm."):
        return Router.DYNAMO
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
    return Router.KVOBS if module in OURS else Router.STOCK if module in _STOCK else Router.NONE


def correct(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the configuration with slips in the name of kvobs's router corrected, and the mistakes that they are."""
    name, module, extra = config.get("kv_connector"), config.get("kv_connector_module_path"), config.get(PATH)
    has_list = isinstance(extra, Mapping) and "connectors" in extra
    if name != ROUTER and (module in OURS or (not name and has_list)):
        key, right = "kv_connector", ROUTER
    elif name == ROUTER and module not in OURS and re.sub("[^a-z]", "", str(module).lower()).startswith("kvob"):
        key, right = "kv_connector_module_path", OURS[0]
    else:
        return dict(config), []
    found = f"found {show(config[key])}" if config.get(key) else "is missing: vLLM would run without a connector"
    return {**config, key: right}, [Finding(key, found, repr(right), f"use {right!r}")]


def rewrite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration changed to use kvobs; unchanged if it uses kvobs already."""
    old = copy.deepcopy(dict(config))
    router = router_of(config)
    if router is Router.KVOBS:
        return old
    new = wrap(old) if router is Router.NONE else ROUTED | {key: old[key] for key in old if key not in ROUTED}
    _fill_in_names(new.get(PATH))
    return new


def _fill_in_names(extra: Any) -> None:
    """Add the connectors' names as kvobs chooses them, if they are valid names."""
    options = extra.get("kvobs", {}) if isinstance(extra, dict) else None
    if isinstance(options, dict):
        with suppress(ConfigError):  # a class name may be an invalid name
            named = {**options, "names": list(read_extra(extra).names)}
            read_extra({**extra, "kvobs": named})
            extra["kvobs"] = named
