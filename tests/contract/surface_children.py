"""Child connectors that differ in what they say about themselves; each answers one question in its own way."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from .recording import NOTING_HOOKS, RecordingChild


class Plain(RecordingChild):
    """Says what vLLM's base class says, and supports the hybrid memory allocator."""


class Divergent(RecordingChild):
    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True


class CrossLayer(RecordingChild):
    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True


class BestEffort(RecordingChild):
    @property
    def requires_kv_delivery(self) -> bool:
        return False


class Piecewise(RecordingChild):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise", True))


class Sleeper(RecordingChild):
    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return kv_transfer_config.kv_role == "kv_both" and kv_transfer_config.engine_id is not None


class Hnd(RecordingChild):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND"


class Nhd(RecordingChild):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD" if vllm_config.kv_transfer_config.kv_connector == "Nhd" else None


class _Bare(KVConnectorBase_V1):
    """As ``RecordingChild`` is built."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.recorded: list[Any] = []
        super().__init__(vllm_config, role, kv_cache_config)


NoHma: Any = type("NoHma", (_Bare,), {n: hook for n, hook in NOTING_HOOKS.items() if hasattr(KVConnectorBase_V1, n)})
"""Doesn't support the hybrid memory allocator."""

NAMES = ("Plain", "Divergent", "CrossLayer", "BestEffort", "Piecewise", "Sleeper", "Hnd", "Nhd", "NoHma")
