"""Change a ``--kv-transfer-config`` to use kvobs, keeping everything else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from kvobs.children.known import OURS, ROUTER
from kvobs.schema.config import ConfigError, read
from kvobs.vllm_api.versions import TransferConfig

_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
_AT_THE_TOP = ("engine_id", "kv_load_failure_policy")  # inherited by connectors; read at the top level only


class Router(Enum):
    """The router that a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return the configured router, without looking at the environment."""
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
    module = config.get("kv_connector_module_path")
    if module in OURS:
        return Router.KVOBS
    return Router.STOCK if module in _STOCK else Router.NONE


def rewrite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration changed to use kvobs; unchanged if it uses kvobs already."""
    old = copy.deepcopy(dict(config))
    router = router_of(config)
    if router is Router.KVOBS:
        return old
    head = {"kv_connector": ROUTER, "kv_connector_module_path": "kvobs"}
    new = head | {key: value for key, value in old.items() if key not in head}
    if router is Router.NONE:
        keys = [key for key in TransferConfig.model_fields if key in old and key not in _AT_THE_TOP]
        new["kv_connector_extra_config"] = {"connectors": [{key: old[key] for key in keys}]}
    _fill_in_names(new.get("kv_connector_extra_config"))
    return new


def _fill_in_names(extra: Any) -> None:
    """Add the connectors' names as kvobs chooses them, if they are valid names."""
    options = extra.get("kvobs", {}) if isinstance(extra, dict) else None
    if isinstance(options, dict):
        with suppress(ConfigError):  # a class name may be an invalid name
            named = {**options, "names": list(read(extra).names)}
            read({**extra, "kvobs": named})
            extra["kvobs"] = named
