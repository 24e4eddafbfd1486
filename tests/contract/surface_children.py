"""Child connectors that differ in what they say about themselves; each answers one question in its own way."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

_NEEDED = dict.fromkeys(KVConnectorBase_V1.__abstractmethods__, lambda *_, **__: None)

NoHma: Any = type("NoHma", (KVConnectorBase_V1,), _NEEDED)
"""Says what vLLM's base class says, and doesn't support the hybrid memory allocator."""

Plain: Any = type("Plain", (NoHma, SupportsHMA), {"request_finished_all_groups": lambda *_: (False, None)})
"""The same with support for it."""


class Divergent(Plain):
    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True


class CrossLayer(Plain):
    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True


class BestEffort(Plain):
    @property
    def requires_kv_delivery(self) -> bool:
        return False


class Piecewise(Plain):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise", True))


class Sleeper(Plain):
    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return kv_transfer_config.kv_role == "kv_both" and kv_transfer_config.engine_id is not None


class Hnd(Plain):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND"


class Nhd(Plain):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD" if vllm_config.kv_transfer_config.kv_connector == "Nhd" else None


NAMES = ("Plain", "Divergent", "CrossLayer", "BestEffort", "Piecewise", "Sleeper", "Hnd", "Nhd", "NoHma")
