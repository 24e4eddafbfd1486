"""HiSparse on vLLM's real scheduler: its connector, its coordinator and its KV cache managers are the real ones.

The KV cache groups are those that vLLM lays out for a model with sparse attention; the worker, which is CUDA, has a
stand-in that acknowledges each transfer some steps after it was ordered, and host copies at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as hisparse
from vllm.v1.hisparse.coordinator import HiSparseCoordinator, get_hisparse_coordinator
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)

from kvobs.testing import BLOCK, Rig, ScriptedConnector, rig
from tests.connectors.engine import Beside
from tests.connectors.plug import Idle

HOST_BLOCKS = 96  # more than the longest prompt needs
TRANSFER_STEPS = 2


def cache_config(blocks: int, groups: int = 1) -> KVCacheConfig:
    """Return the groups of a model with sparse attention: host source, indexer, resident pages, hot region."""
    source = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32, cache_role=SparseCacheRole.SPARSE
    )
    indexer = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, cache_role=SparseCacheRole.INDEXER
    )
    resident = HiSparseResidentSpec(block_size=BLOCK, page_size=source.page_size_bytes)
    hot = HiSparseHotSpec(block_size=BLOCK, page_size=source.page_size_bytes, blocks_per_request=2)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["layer.0"], source, host_resident=True, role=KVCacheGroupRole.HISPARSE_SOURCE),
            KVCacheGroupSpec(["layer.0.indexer"], indexer, role=KVCacheGroupRole.HISPARSE_INDEXER),
            KVCacheGroupSpec(["layer.0.hisparse_resident"], resident, enable_kv_transfer=False),
            KVCacheGroupSpec(["layer.0.hisparse_hot"], hot, enable_kv_transfer=False),
        ],
        hisparse_host_num_blocks=HOST_BLOCKS,
    )


class Transfers(Idle):
    """Stands in for the worker's half: transfers are done some steps after they were ordered."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.now = 0
        self.running: list[tuple[int, int]] = []  # when it is done, which
        self.ordered: list[int] = []
        self.copies: list[int] = []

    def start_step(self, metadata: Any, *_: Any, **__: Any) -> None:
        self.now += 1
        orders = metadata.command.page_transfers if metadata.command else []
        self.ordered = [order.transfer_id for order in orders]
        self.running += [(self.now + TRANSFER_STEPS, transfer) for transfer in self.ordered]
        self.copies = [copy.dst_block_id for copy in metadata.host_block_copies]

    def prepare_forward(self, attn_metadata: Any) -> None:
        """Map no rows: there is no memory."""

    def take_transfer_updates(self) -> tuple[list[int], list[int]]:
        done = [transfer for due, transfer in self.running if due <= self.now]
        self.running = [(due, transfer) for due, transfer in self.running if due > self.now]
        ordered, self.ordered = self.ordered, []
        return ordered, done

    def take_completed_host_copies(self) -> list[int]:
        copies, self.copies = self.copies, []
        return copies


@dataclass
class Imports:
    """The imports that the coordinator was passed, in order; ``ready`` is how many pages of each were then readable."""

    recorded: list[tuple[str, int]] = field(default_factory=list)
    ended: list[tuple[str, bool]] = field(default_factory=list)  # request, whether it has failed
    ready: dict[str, int] = field(default_factory=dict)

    def install(self, patch: Any) -> None:
        """Listen to what the real coordinator is called with."""
        record, finish = HiSparseCoordinator.record_pending_host_import, HiSparseCoordinator.finish_host_import

        def recording(coordinator: Any, request_id: str, num_tokens: int) -> None:
            self.recorded.append((request_id, num_tokens))
            record(coordinator, request_id, num_tokens)

        def finishing(coordinator: Any, request_id: str, *, failed: bool) -> None:
            self.ended.append((request_id, failed))
            finish(coordinator, request_id, failed=failed)
            state = coordinator.request_states.get(request_id)
            self.ready[request_id] = state.ready_prefix_pages if state else 0

        patch.setattr(HiSparseCoordinator, "record_pending_host_import", recording)
        patch.setattr(HiSparseCoordinator, "finish_host_import", finishing)


CONFIG = {"kv_connector": "HiSparseConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_pool_gib": 1}}


def build(router: str, patch: Any, other: Any, *, is_first: bool, **options: Any) -> Beside:
    """Build an engine of HiSparse and another connector."""
    patch.setattr(hisparse, "HiSparseConnectorWorker", Transfers)
    patch.setattr(rig, "cache_config", cache_config)
    # A scripted sibling answers for the groups that vLLM transfers.
    patch.setattr(ScriptedConnector, "get_loaded_kv_cache_group_ids", lambda self, request: (0, 1))
    return Beside(router, CONFIG, other, is_first=is_first, **options)


def coordinator_of(engine: Rig) -> Any:
    return get_hisparse_coordinator(engine.scheduler.kv_cache_manager)


def leftovers(engine: Beside) -> list[str]:
    """Return what is left in an idle engine: pages in transfer, imports, requests, blocks of either pool."""
    coordinator = coordinator_of(engine)
    books = ("_pending_imports", "pending_spills", "request_states", "_retained_copies", "spills_to_send")
    host = coordinator.get_host_block_pool()
    held = host.num_gpu_blocks - 1 - host.get_num_free_blocks()
    return engine.left_in(coordinator, *books) + ([f"{held} host blocks"] if held else [])
