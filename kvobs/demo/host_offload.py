"""Let vLLM's own OffloadingConnector keep KV blocks in host memory on a machine without a GPU, and let it fail.

vLLM refuses only at the last step, where a worker would copy blocks with CUDA streams. An offloading spec from outside
is its extension point for that step; all else (lookups, eviction, accounting, metrics) stays vLLM's own:

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "HostOffloadingSpec", "spec_module_path": "kvobs.demo.host_offload", "cpu_bytes_to_use": 67108864}}

Every worker copies its share of each block into its memory, so any tensor parallel size works.
vLLM 0.27 to 0.33 have the same interface here, but for two names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvobs.vllm_api.versions import chunks_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading spec, with a worker that copies from host memory to host memory."""

    _worker: base.OffloadingWorker | None

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        """Return this process's worker, made on the first call."""
        if self._worker is None:
            kind = ShiftingWorker if self.extra_config.get("fault") == "wrong-bytes" else HostWorker
            self._worker = kind(kv_caches, self.blocks_per_chunk, chunks_of(self))
        return self._worker


class HostWorker(base.OffloadingWorker):
    """Copies blocks between the engine's KV cache and host memory, at once and in the calling thread."""

    def __init__(self, kv_caches: base.CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        """Reserve `chunks` x `blocks_per_chunk` blocks of host memory for each KV cache tensor."""
        self.blocks_per_chunk = blocks_per_chunk
        self.group_refs = kv_caches.group_data_refs
        self.engine = [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]  # (blocks, bytes)
        self.host = [
            torch.zeros((chunks, blocks_per_chunk, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        self.finished: list[base.TransferResult] = []

    def submit_store(self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: base.LoadStoreSpec) -> bool:
        return self.copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: base.LoadStoreSpec, dst_spec: base.GPULoadStoreSpec, **_urgency: bool
    ) -> bool:
        """Copy host memory to engine blocks; `expedited`, which vLLM 0.33 adds, means nothing where nothing queues."""
        return self.copy(job_id, dst_spec, src_spec, store=False)

    def copy(
        self, job_id: int, engine_spec: base.GPULoadStoreSpec, host_spec: base.LoadStoreSpec, *, store: bool
    ) -> bool:
        """Copy the blocks of one job, KV cache group by group, and note it as finished."""
        assert isinstance(host_spec, base.BlockIDsLoadStoreSpec)
        begin, moved = time.perf_counter(), 0
        blocks, chunks = torch.from_numpy(engine_spec.block_ids).long(), torch.from_numpy(host_spec.block_ids).long()
        places = zip(engine_spec.group_sizes, engine_spec.block_indices, self.group_refs, strict=True)
        for size, first, refs in places:
            offset = first % self.blocks_per_chunk  # a group's first block may lie in the middle of a chunk
            slots = torch.arange(offset, offset + size)
            used = -(-(offset + size) // self.blocks_per_chunk) if size else 0
            rows, columns = chunks[:used][slots // self.blocks_per_chunk], slots % self.blocks_per_chunk
            for ref in refs:
                engine, host, width = self.engine[ref.tensor_idx], self.host[ref.tensor_idx], ref.page_size_bytes
                if store:
                    host[rows, columns, :width] = engine[blocks[:size], :width]
                else:
                    engine[blocks[:size], :width] = host[rows, columns, :width]
                moved += size * width
            blocks, chunks = blocks[size:], chunks[used:]
        self.finished.append(base.TransferResult(job_id, True, moved, time.perf_counter() - begin))
        return True

    def get_finished(self) -> list[base.TransferResult]:
        """Return the jobs finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: a submitted job is a finished one."""


class ShiftingWorker(HostWorker):
    """Loads the next blocks of its memory, as a store that mixes up its keys does; each load succeeds."""

    @property
    def shifts(self) -> bool:
        """Return whether the next load is of other blocks."""
        return True

    def copy(
        self, job_id: int, engine_spec: base.GPULoadStoreSpec, host_spec: base.LoadStoreSpec, *, store: bool
    ) -> bool:
        if store or not self.shifts:
            return super().copy(job_id, engine_spec, host_spec, store=store)
        right, self.host = self.host, [host.roll(-1, 0) for host in self.host]
        try:
            return super().copy(job_id, engine_spec, host_spec, store=store)
        finally:
            self.host = right


SLOW_S = 1.2
"""How much longer a load takes: a slow connector's is over `slow_load_ms`."""
SLOW_RANK = 1


class FaultyOffloadingConnector(OffloadingConnector):
    """Loads late on every rank or on one, or raises when it is to load; option ``fault`` is a key of `FAULTS`.

    The spec reads ``wrong-bytes`` itself.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._fault = str(self._kv_transfer_config.get_from_extra_config("fault", ""))
        rank = vllm_config.parallel_config.rank
        self._holds = self._fault == "slow-connector" or (self._fault == "slow-rank" and rank == SLOW_RANK)
        self._held: dict[str, float] = {}  # loaded request -> when to report it

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._fault == "failing-connector" and num_external_tokens:
            raise ConnectionError("the demo's failing connector has lost its storage")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Report loads, late if this is the slow connector; vLLM calls again as long as a load is pending."""
        saved, loaded = super().get_finished(finished_req_ids)
        if not self._holds:
            return saved, loaded
        now = time.monotonic()
        self._held.update(dict.fromkeys(loaded, now + SLOW_S))
        due = {request for request, when in self._held.items() if when <= now}
        for request in due:
            del self._held[request]
        return saved, due
