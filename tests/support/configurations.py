"""Configurations, and what vLLM builds of them."""

import copy
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvobs.cli.check.check import check_text
from kvobs.cli.check.classes import check_classes
from kvobs.cli.check.flags import Flags
from kvobs.cli.check.result import CheckResult
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.schema.config import PATH
from kvobs.testing import Script, cache_config, engine_config
from tests.support.rig import entry_for

TWO = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("DecodeBenchConnector", "ExampleConnector")]


def config_of(connectors: Any = TWO, kvobs: Any = None, **more: Any) -> dict[str, Any]:
    extra = {"connectors": connectors} | ({} if kvobs is None else {"kvobs": kvobs})
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvobs",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **more,
    }


def start(config: Mapping[str, Any]) -> list[Any]:
    """Build what vLLM builds of a configuration, in its order; return both sides."""
    transfer = KVTransferConfig(**copy.deepcopy(dict(config)))
    cls = KVConnectorFactory.get_connector_class(transfer)
    vllm = engine_config(transfer)
    vllm.scheduler_config.disable_hybrid_kv_cache_manager = not KVConnectorFactory.supports_hma_config(transfer)
    get_kv_connector_cache_layout(vllm)
    return [cls(vllm, role, cache_config()) for role in KVConnectorRole]


def starts(config: Mapping[str, Any]) -> bool:
    try:
        start(config)
    except Exception:
        return False
    return True


def scripted(cls: str = "ScriptedConnector", **more: Any) -> dict[str, Any]:
    return entry_for(Script(cls), cls, **more)


def check(config: Mapping[str, Any], *flags: Flags) -> CheckResult:
    """Check a configuration's text, and the classes of its connectors."""
    checked = check_text(config, *flags)
    check_classes(checked, is_deep=True)
    return checked


def paths(checked: CheckResult) -> list[str]:
    return [finding.path.removeprefix(f"{PATH}.") for finding in checked.mistakes]


def layerwise(role: str, **more: Any) -> dict[str, Any]:
    return scripted("LayerwiseConnector", kv_role=role, **more)
