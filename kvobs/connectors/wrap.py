"""Put a configuration's single connector behind kvobs's router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvobs.connectors.known import ROUTER
from kvobs.schema.config import PATH
from kvobs.vllm_api.versions import TransferConfig

ROUTED = {"kv_connector": ROUTER, "kv_connector_module_path": "kvobs"}
"""The keys that make vLLM load kvobs's router."""
_AT_THE_TOP = ("engine_id", "kv_load_failure_policy")  # inherited by connectors; read at the top level only


def wrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its connector as the only one of kvobs's router, which gets kvobs's options."""
    one = {key: config[key] for key in TransferConfig.model_fields if key in config and key not in _AT_THE_TOP}
    extra: dict[str, Any] = {"connectors": [one]}
    if isinstance(inner := one.get(PATH), Mapping) and "kvobs" in inner:
        one[PATH] = {key: value for key, value in inner.items() if key != "kvobs"}
        extra["kvobs"] = inner["kvobs"]
    return ROUTED | {key: value for key, value in config.items() if key not in ROUTED} | {PATH: extra}
