"""Turn a stock ``--kv-transfer-config`` into one of kvobs, keeping all that it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from kvobs.config import ConfigError, read

ROUTER = "MultiConnector"
_OURS = ("kvobs", "kvobs.connector")
_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")

# What a connector reads of its own configuration. It inherits `engine_id`, and vLLM reads `kv_load_failure_policy`
# at the top level only.
_OF_A_CHILD = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
    "enable_permute_local_kv",
    "kv_connector_extra_config",
)


class Router(Enum):
    """What a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return what stands between vLLM and the connectors by the text alone, whatever the environment says."""
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
    module = config.get("kv_connector_module_path")
    if module in _OURS:
        return Router.KVOBS
    return Router.STOCK if module in _STOCK else Router.NONE


def rewrite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same configuration with kvobs in it; one that has it already comes back as it is."""
    old = copy.deepcopy(dict(config))
    router = router_of(config)
    if router is Router.KVOBS:
        return old
    head = {"kv_connector": ROUTER, "kv_connector_module_path": "kvobs"}
    new = head | {key: value for key, value in old.items() if key not in head}
    if router is Router.NONE:
        child = {key: old[key] for key in _OF_A_CHILD if key in old}
        new["kv_connector_extra_config"] = {"connectors": [child]}
    _fill_in_names(new.get("kv_connector_extra_config"))
    return new


def _fill_in_names(extra: Any) -> None:
    """Write down what kvobs calls the children, where these can be given names."""
    options = extra.get("kvobs", {}) if isinstance(extra, dict) else None
    if not isinstance(options, dict):
        return
    try:
        named = {**options, "names": list(read(extra).names)}
        read({**extra, "kvobs": named})  # a class may be called what no child may
    except ConfigError:
        return
    extra["kvobs"] = named
