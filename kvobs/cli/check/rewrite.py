"""Find the router that a configuration has, correct slips in the name of kvobs's, and change one to use kvobs."""

import copy
import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum, auto
from typing import Any

from kvobs.connectors.known import OURS, PD_ROUTER, ROUTER
from kvobs.connectors.wrap import ROUTED, wrap
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, show

_KEY = "kv_connector_module_path"
_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")


class Router(Enum):
    """The router that a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()
    DYNAMO = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return the configured router, without looking at the environment."""
    module = config.get(_KEY)
    if config.get("kv_connector") == PD_ROUTER and str(module).startswith("kvbm."):
        return Router.DYNAMO
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
    return Router.KVOBS if module in OURS else Router.STOCK if module in _STOCK else Router.NONE


def correct(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the configuration with slips in the name of kvobs's router corrected, and a finding for each."""
    name, module, has_list = config.get("kv_connector"), config.get(_KEY), _has_list(config)
    bare = without_key(config)
    if bare != config:
        return bare, [kinds.NO_ROUTER.at(_KEY, module=show(module), name=show(name))]
    if name != ROUTER and (module in OURS or (not name and has_list)):
        key, right = "kv_connector", ROUTER
    elif name == ROUTER and module not in OURS and re.sub("[^a-z]", "", str(module).lower()).startswith("kvob"):
        key, right = _KEY, OURS[0]
    else:
        return dict(config), []
    found = f"found {show(config[key])}" if config.get(key) else "is missing: vLLM would run without a connector"
    return {**config, key: right}, [kinds.ROUTER_NAME.at(key, repr(right), found=found, right=right)]


def without_key(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a single connector without the key that belongs to a router; others as they are."""
    name = config.get("kv_connector")
    is_router = not name or get_close_matches(str(name).lower(), [ROUTER.lower()], cutoff=0.85) or _has_list(config)
    return {key: config[key] for key in config if is_router or key != _KEY or config[key] not in OURS}


def _has_list(config: Mapping[str, Any]) -> bool:
    extra = config.get(PATH)
    return isinstance(extra, Mapping) and "connectors" in extra


def rewrite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration changed to use kvobs; unchanged if it uses kvobs already."""
    old = copy.deepcopy(dict(config))
    router = router_of(config)
    if router is Router.KVOBS:
        return old
    return wrap(old) if router is Router.NONE else ROUTED | {key: old[key] for key in old if key not in ROUTED}
