"""A connector that does what a test's script says: pure routing is tested with it, never the behaviour of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

SCRIPTS: dict[str, Script] = {}


@dataclass
class Script:
    """What one child says and does, in all its roles and ranks; ``calls`` is what it was asked."""

    tag: str
    offers: dict[str, Any] = field(default_factory=dict)  # request -> answer, or a list of answers, the last one stays
    promises: set[str] = field(default_factory=set)
    tails: set[str] = field(default_factory=set)
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[int, KVConnectorTransferResults] = field(default_factory=dict)  # by rank, told once
    bad_blocks: dict[int, set[int]] = field(default_factory=dict)
    finished_count: int | None = None
    stats: list[KVConnectorStats] = field(default_factory=list)
    events: dict[int, Any] = field(default_factory=dict)
    handshake: Any = None
    worker_meta: dict[int, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)  # hook -> answer of a simple hook
    raises: dict[str, Exception] = field(default_factory=dict)
    raises_on: set[int] | None = None  # ranks; the scheduler's side counts as 0
    on_output: Any = None  # called with the scheduler-side view of the workers' output
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        SCRIPTS[self.tag] = self

    def say(self, rank: int, received: str = "", failed: str = "", saved: str = "") -> None:
        """Let this child report requests (space-separated) on one rank in the next step."""
        told = self.reports.setdefault(rank, KVConnectorTransferResults())
        told.finished_recving |= set(received.split()) | set(failed.split())
        told.failed_recving |= set(failed.split())
        told.finished_sending |= set(saved.split())

    def called(self, hook: str) -> list[Any]:
        return [detail for name, detail in self.calls if name == hook]


@dataclass
class ScriptedMeta(KVConnectorMetadata):
    tag: str


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """Follows ``SCRIPTS[tag]``; ``tag`` is in its extra config."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.script = SCRIPTS[self._kv_transfer_config.get_from_extra_config("tag", "")]
        self.rank = vllm_config.parallel_config.rank
        self._note("__init__", role)

    def _note(self, hook: str, detail: Any = None) -> Any:
        self.script.calls.append((hook, detail))
        if hook in self.script.raises and self.rank in (self.script.raises_on or {self.rank}):
            raise self.script.raises[hook]
        return self.script.answers.get(hook)

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._note("on_new_request", request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens", request.request_id)
        answer = self.script.offers.get(request.request_id, (0, False))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        tokens, is_async = answer
        if not tokens:
            return tokens, False
        tokens = min(tokens, request.num_tokens - 1 - num_computed_tokens)  # never more than the prompt has
        return (tokens, is_async) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids() if hasattr(blocks, "get_block_ids") else blocks
        self._note("update_state_after_alloc", (request.request_id, num_external_tokens, ids))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._note("get_loaded_kv_cache_group_ids", request.request_id) or (0,)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._note("build_connector_meta")
        return ScriptedMeta(self.script.tag)

    def update_connector_output(self, connector_output: Any) -> None:
        self._note(
            "update_connector_output",
            {
                "received": set(connector_output.finished_recving or ()),
                "sent": set(connector_output.finished_sending or ()),
                "failed": set(getattr(connector_output, "failed_recving", ())),
                "meta": connector_output.kv_connector_worker_meta,
                "events": connector_output.kv_cache_events,
            },
        )
        if self.script.on_output is not None:
            self.script.on_output(connector_output)

    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        self._note("register_finished_partial_tail", request.request_id)
        return request.request_id in self.script.tails

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished", request.request_id)
        return request.request_id in self.script.promises, self.script.params.get(request.request_id)

    def get_finished_count(self) -> int | None:
        return self.script.finished_count

    def take_events(self) -> Any:
        return self._note("take_events") or ()

    def has_pending_push_work(self) -> bool:
        return bool(self._note("has_pending_push_work"))

    def has_pending_block_frees(self) -> bool:
        return bool(self._note("has_pending_block_frees"))

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._note("set_xfer_handshake_metadata", metadata)

    def reset_cache(self) -> bool | None:
        return self._note("reset_cache")

    # worker

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._note("set_host_xfer_buffer_ops")
        self.copy_blocks = copy_operation

    def get_handshake_metadata(self) -> Any:
        return self.script.handshake

    def get_mem_pool_context(self) -> Any:
        return self._note("get_mem_pool_context")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._note("handle_preemptions", kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._note("bind_connector_metadata", connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load_kv", self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._note("save_kv_layer", layer_name)

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._note("get_transfer_results", set(finished_req_ids))
        return self.script.reports.pop(self.rank, KVConnectorTransferResults())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.script.bad_blocks.pop(self.rank, set())

    def get_kv_connector_kv_cache_events(self) -> Any:
        return self.script.events.pop(self.rank, None)

    def build_connector_worker_meta(self) -> Any:
        return self.script.worker_meta.pop(self.rank, None)

    # both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.script.stats.pop(0) if self.script.stats else None

    def shutdown(self) -> None:
        self._note("shutdown")


class BestEffortConnector(ScriptedConnector):
    """A cache that may be left out, and that can be told to fail in any hook."""

    requires_kv_delivery = False

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.has_connector_metadata(), "as OffloadingConnector insists"
        return super().get_transfer_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._note("get_block_ids_with_load_errors")
        return super().get_block_ids_with_load_errors()

    def get_kv_connector_kv_cache_events(self) -> Any:
        self._note("get_kv_connector_kv_cache_events")
        return super().get_kv_connector_kv_cache_events()

    def build_connector_worker_meta(self) -> Any:
        self._note("build_connector_worker_meta")
        return super().build_connector_worker_meta()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._note("get_kv_connector_stats")
        return super().get_kv_connector_stats()

    def get_finished_count(self) -> int | None:
        self._note("get_finished_count")
        return super().get_finished_count()

    def clear_connector_metadata(self) -> None:
        self._note("clear_connector_metadata")
        super().clear_connector_metadata()

    def finish_forward(self) -> None:
        self._note("finish_forward")


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

    def aggregate(self, other: Any) -> Tally:
        return Tally(self.n + other.n)


class Stats(KVConnectorStats):
    """Stats that add up: {"n": count}."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> Stats:
        self.data["n"] += other.data["n"]
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
