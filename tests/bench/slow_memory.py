"""Host memory that is far away: vLLM's own offloading, whose loads arrive after a time of their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvobs.demo.host_offload import HostOffloadingSpec, HostWorker
from kvobs.vllm_api.versions import chunks_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, TransferResult

START_S, BLOCK_S = 0.02, 0.0005
"""Of a load: before the first block, and for each."""


class SlowMemorySpec(HostOffloadingSpec):
    """Offloading to host memory with a worker that takes its time."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        """Return this process's worker, made on the first call."""
        if self._worker is None:
            self._worker = SlowWorker(kv_caches, self.blocks_per_chunk, chunks_of(self))
        assert isinstance(self._worker, SlowWorker)
        return self._worker


class SlowWorker(HostWorker):
    """Copies at once, and reports a load only when its time is over; it blocks nobody meanwhile."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        super().__init__(kv_caches, blocks_per_chunk, chunks)
        self.under_way: list[tuple[float, TransferResult]] = []

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **urgency: bool) -> bool:
        """Copy host memory to engine blocks."""
        submitted = super().submit_load(job_id, src_spec, dst_spec, **urgency)
        due = time.perf_counter() + START_S + BLOCK_S * len(dst_spec.block_ids)
        self.under_way.append((due, self.finished.pop()))
        return submitted

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs finished since the last call."""
        now = time.perf_counter()
        self.finished += [result for due, result in self.under_way if due <= now]
        self.under_way = [(due, result) for due, result in self.under_way if due > now]
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs are finished."""
        for due, result in self.under_way:
            if result.job_id in job_ids:
                time.sleep(max(0.0, due - time.perf_counter()))
