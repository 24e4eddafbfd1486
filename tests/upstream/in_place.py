"""A pytest plugin for vLLM's own tests: it puts kvobs's classes where the tests import vLLM's from.

pytest imports it by this file's name (``-p in_place``), as ``tests`` is the name of vLLM's package there. What is put
in place is in ``REPLACED``; without ``KVOBS_IN_PLACE=1`` nothing is, which gives the baseline.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"

REPLACED: dict[str, dict[str, str]] = {
    f"{_CONNECTORS}.v1.multi_connector": {
        "MultiConnector": "kvobs.connector",
        "MultiKVConnectorMetadata": "kvobs.routing.metadata",
        "MultiKVConnectorWorkerMetadata": "kvobs.routing.metadata",
        "MultiKVConnectorStats": "kvobs.telemetry.payload.stats",
        "MultiKVConnectorPromMetrics": "kvobs.export.prometheus",
    },
    f"{_CONNECTORS}.utils": {
        "KVOutputAggregator": "kvobs.aggregation",
        "TransferTopology": "kvobs.topology",
        "get_kv_connector_cache_layout": "kvobs.connector",
    },
}
"""vLLM's module -> name in it -> kvobs's module that has its replacement."""


def pytest_configure(config: pytest.Config) -> None:
    """Replace vLLM's classes before any test module imports them; what kvobs needs of vLLM's is bound first."""
    if os.environ.get("KVOBS_IN_PLACE") == "1":
        replaced = [
            (importlib.import_module(module), name, getattr(importlib.import_module(ours), name))
            for module, names in REPLACED.items()
            for name, ours in names.items()
        ]
        for module, name, replacement in replaced:
            setattr(module, name, replacement)
