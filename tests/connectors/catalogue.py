"""All connectors by name."""

from __future__ import annotations

from typing import Any

from tests.connectors.files import DecodeBench, Example
from tests.connectors.flexkv import FlexKV
from tests.connectors.hf3fs import HF3FS
from tests.connectors.lmcache_mp import LMCacheMP
from tests.connectors.lmcache_v1 import LMCacheV1
from tests.connectors.mooncake_store import AsyncMooncakeStore, MooncakeStore
from tests.connectors.offloading import Offloading, Tiering
from tests.connectors.plug import Plug
from tests.connectors.simple_cpu import LazySimpleCPU, SimpleCPU

PLUGS: dict[str, type[Plug]] = {
    "offloading": Offloading,
    "offloading-tiering": Tiering,
    "lmcache-mp": LMCacheMP,
    "lmcache-v1": LMCacheV1,
    "flexkv": FlexKV,
    "hf3fs": HF3FS,
    "example": Example,
    "decode-bench": DecodeBench,
    "mooncake-store": MooncakeStore,
    "mooncake-store-async": AsyncMooncakeStore,
    "simple-cpu": SimpleCPU,
    "simple-cpu-lazy": LazySimpleCPU,
}


SETTINGS: dict[str, dict[str, Any]] = {
    "hf3fs": {"blocks": 70},  # no preemption: see test_stock_faults.py
    "example": {"blocks": 70, "budget": 1024},  # it takes a prompt for computed when its first chunk is
}
"""What of an engine must be different for a connector."""


def make(name: str, seed: int = 0, **options: Any) -> Plug:
    """Return a fresh plug; ``name+x`` is the same class once more under another name."""
    return PLUGS[name.partition("+")[0]](name, seed, **options)
