"""A connector connector that does nothing, and the stats of those that count their hook calls."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Takes part in everything and does nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


@dataclass
class CallStats(KVConnectorStats):
    """Hook calls: ``data`` is ``{"calls": {"<role>.<hook>": count}}``, the role being scheduler or worker<rank>."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {"calls": {}}

    def is_empty(self) -> bool:
        return not self.data.get("calls")

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        mine = self.data.setdefault("calls", {})
        for call, count in other.data.get("calls", {}).items():
            mine[call] = mine.get(call, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data.get("calls", {}))


class CallMetrics(KVConnectorPromMetrics):
    """Exports the counts as ``vllm:stats_connector_calls_total`` with the extra label ``call``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        documentation, labels = "Hook calls that a connector counted.", [*labelnames, "call"]
        self._calls = self._counter_cls("vllm:stats_connector_calls", documentation, labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for call, count in transfer_stats_data.get("calls", {}).items():
            self._calls.labels(*self.per_engine_labelvalues[engine_idx], call).inc(count)


class ExportsCalls:
    """Part of a connector: counts its calls, and returns them as stats of its own class, with metrics of its own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        on_worker = role.name == "WORKER"
        self._who = f"worker{vllm_config.parallel_config.rank}" if on_worker else "scheduler"
        self._stats = CallStats()
        self._stats.reset()

    def _count(self, hook: str) -> None:
        self._stats.aggregate(CallStats({"calls": {f"{self._who}.{hook}": 1}}))

    def get_kv_connector_stats(self) -> CallStats | None:
        if self._stats.is_empty():
            return None
        taken = CallStats(self._stats.data)
        self._stats.reset()
        return taken

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CallStats:
        return CallStats(data or {"calls": {}})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return CallMetrics(*args)
