"""Scripted connectors with more than authors need: of other kinds, with stats, metrics, handshakes and events."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvobs.testing import ScriptedConnector

_NOT_NOTED = (
    *("get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
    *("get_kv_connector_stats", "get_finished_count", "clear_connector_metadata", "finish_forward"),
)
"""Hooks whose calls a scripted connector does not note, and in which it does not raise."""


def _noting(name: str) -> Any:
    def hook(self: Any, *arguments: Any) -> Any:
        self._note(name)
        return getattr(ScriptedConnector, name)(self, *arguments)

    return hook


class BestEffortConnector(ScriptedConnector):
    """A cache that may be left out, and that can be made to fail in any hook."""

    requires_kv_delivery = False

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self.has_connector_metadata(), "as OffloadingConnector insists"
        return super().get_transfer_results(finished_req_ids)

    vars().update({hook: _noting(hook) for hook in _NOT_NOTED})


ODD_HOOKS = (
    *("get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"),
    *("build_connector_meta", "request_finished_all_groups", "take_events", "get_kv_connector_stats"),
    *("has_pending_push_work", "has_pending_block_frees", "register_finished_partial_tail", "reset_cache"),
    *("get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events"),
    *("build_connector_worker_meta", "get_handshake_metadata", "get_mem_pool_context", "get_finished_count"),
)
"""The hooks in which an ``OddConnector`` can answer anything."""


def _odd(name: str) -> Any:
    def hook(self: Any, *arguments: Any) -> Any:
        answer = getattr(ScriptedConnector, name)(self, *arguments)
        if (odd := self.script.answers.get(name, self)) is self or self.rank not in (
            self.script.raises_on or {self.rank}
        ):
            return answer
        return odd() if callable(odd) else odd

    return hook


class OddConnector(ScriptedConnector):
    """Answers what ``Script.answers`` has for a hook, or what that returns, whatever it is."""

    requires_kv_delivery = False

    vars().update({hook: _odd(hook) for hook in ODD_HOOKS})


class FlexKVConnectorV1(ScriptedConnector):
    """Has the name of a connector of vLLM that reports the load only of a request that ended in it."""


class UnwatchingConnector(ScriptedConnector):
    """Does not look at the workers' output, as most real connectors."""

    def update_connector_output(self, connector_output: Any) -> None:
        pass


class SummedConnector(ScriptedConnector):
    """Makes something of its stats in the API server."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Stats(data=data or {})


class PipelineAwareConnector(ScriptedConnector):
    """Takes handshakes of every pipeline stage."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self._note("set_xfer_handshake_metadata_pp_aware", metadata)


class Things(KVConnectorPromMetrics):
    """A metrics class that two connector classes share."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.things = self._counter_cls(name="scripted_things", documentation="things", labelnames=labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.things.labels(*self.per_engine_labelvalues[engine_idx]).inc(transfer_stats_data["n"])


class MeteredConnector(ScriptedConnector):
    """Has metrics of its own."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Things:
        return Things(*args)


class OtherMeteredConnector(MeteredConnector):
    """Another class with the same metrics."""


class UnmeterableConnector(ScriptedConnector):
    """Can't make its metrics."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Things:
        raise RuntimeError("no metrics today")


class HndConnector(ScriptedConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "HND"


class NhdConnector(ScriptedConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "NHD"


class Tally(KVConnectorWorkerMetadata):
    """Worker metadata that adds up."""

    def __init__(self, n: int) -> None:
        self.n = n

    def aggregate(self, other: Any) -> "Tally":
        return Tally(self.n + other.n)


class Stats(KVConnectorStats):
    """Stats that add up, such as {"n": count}."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        self.data.update(Counter(self.data) + Counter(other.data))
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int]:
        return dict(self.data)


class Handshake(KVConnectorHandshakeMetadata):
    """A handshake that says whose it is."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handshake) and other.tag == self.tag

    def __hash__(self) -> int:
        return hash(self.tag)


class Events:
    """A container of one worker's KV cache events, as LMCache and Mooncake have them."""

    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[str]) -> None:
        self.events += events

    def get_all_events(self) -> list[str]:
        return self.events

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_number_of_workers(self) -> int:
        return self.workers

    def aggregate(self) -> None:
        self.events = sorted({e for e in self.events if self.events.count(e) == self.workers})

    def clear_events(self) -> None:
        self.events = []


class LayerwiseConnector(ScriptedConnector):
    """Has hooks of each layer, and so on: what scripted ones have not."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))

    @property
    def requires_kv_delivery(self) -> bool:
        return self._kv_transfer_config.is_kv_consumer

    def get_handshake_metadata(self) -> None:
        self._note("get_handshake_metadata")


class BrokenConnector(KVConnectorBase_V1):
    """Can't say whether it needs piecewise graphs."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        raise LookupError("no such thing")


class PeerConnector(MeteredConnector):
    """Reads, as connectors between engines do, which engine has a request's KV."""

    @staticmethod
    def _peer(params: dict[str, Any]) -> Any:
        return params.get("remote_host") if params.get("do_remote_prefill") else None
