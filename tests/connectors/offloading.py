"""vLLM's OffloadingConnector, both specs, all real but for CUDA's copies, which may be made late."""

from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    Medium,
    OffloadingWorker,
    RequestOffloadingContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvobs.demo.host_offload import HostOffloadingSpec, HostWorker
from tests.connectors.memory import BLOCK, HEADS, LAYERS, PAGE_BYTES, WIDTH, page_is_right
from tests.connectors.plug import Plug, entries


class LateWorker(HostWorker):
    """Copies when a job is due, or when it is waited for: until then the engine may overwrite what it must not."""

    def __init__(self, plug: "Offloading", kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        super().__init__(kv_caches, blocks_per_chunk, chunks)
        self.plug = plug
        self.jobs: dict[int, tuple[int, Any, Any, bool]] = {}  # job -> (due, engine's blocks, host's blocks, store)
        self.done: dict[int, Any] = {}

    def copy(self, job_id: int, engine_spec: Any, host_spec: Any, *, store: bool) -> bool:
        self.plug.may_fail("store" if store else "load")
        self.jobs[job_id] = (self.plug.now + self.plug.delay(), engine_spec, host_spec, store)
        if store and not self.plug.is_late:
            super().copy(job_id, engine_spec, host_spec, store=True)
            self.done[job_id] = self.finished.pop()
        return True

    def get_finished(self) -> Any:
        self._run([job for job, (due, *_) in self.jobs.items() if due <= self.plug.now])
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        self._run([job for job in self.jobs if job in job_ids])

    def _run(self, jobs: list[int]) -> None:
        for job in jobs:
            _, engine_spec, host_spec, store = self.jobs.pop(job)
            if job in self.done:
                self.finished.append(self.done.pop(job))
                continue
            super().copy(job, engine_spec, host_spec, store=store)
            self.plug.loaded += not store


class LateSpec(HostOffloadingSpec):
    """The host spec with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
            plug = Offloading.by_tag[self.extra_config["tag"]]
            self._worker = LateWorker(plug, kv_caches, self.blocks_per_chunk, chunks)
        return self._worker


class LateTieringSpec(TieringOffloadingSpec):
    """The tiering spec with that worker, on the memory that it shares with its tiers."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = LateWorker(
                Offloading.by_tag[self.extra_config["tag"]], kv_caches, self.blocks_per_chunk, self.num_chunks
            )
            widths = [cache.page_size_bytes * self.blocks_per_chunk for cache in kv_caches.tensors]
            worker.host = [
                region.create_next_worker_view(width).unflatten(1, (self.blocks_per_chunk, -1)) for width in widths
            ]
            worker.region = region
            self._worker = worker
        return self._worker


class MemoryTier(SecondaryTierManager):
    """A tier of our own, as vLLM has for disks and object stores: what it stores and loads takes some steps."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **more: Any) -> None:
        super().__init__(offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **more)
        self.plug = Offloading.by_tag[offloading_spec.extra_config["tag"]]
        self.primary = np.asarray(primary_kv_view)
        self.chunks: dict[Any, Any] = {}
        self.jobs: list[tuple[int, Any, bool]] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        self.plug.may_fail("tier lookup")
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self.jobs.append((self.plug.now + self.plug.delay(), job_metadata, True))

    def submit_load(self, job_metadata: Any) -> None:
        self.jobs.append((self.plug.now + self.plug.delay(), job_metadata, False))

    def get_finished_jobs(self) -> list[JobResult]:
        done = [job for job in self.jobs if job[0] <= self.plug.now]
        self.jobs = [job for job in self.jobs if job[0] > self.plug.now]
        return [self._run(job, is_store) for _, job, is_store in done]

    def _run(self, job: Any, is_store: bool) -> JobResult:
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            if is_store:
                self.chunks[key] = self.primary[chunk].copy()
            else:
                self.primary[chunk] = self.chunks[key]
        return JobResult(job_id=job.job_id, success=True, transfer_time=0.0)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self.jobs)

    def drain_jobs(self) -> None:
        for _, job, is_store in self.jobs:
            self._run(job, is_store)
        self.jobs.clear()


class Offloading(Plug):
    """The CPU offloading spec.

    ``is_late``: stores are read at the end of their time, not at its begin. A sibling that loads asynchronously makes
    that wrong in stock, too: see test_stock_faults.py.
    """

    connector = "OffloadingConnector"
    is_late = False
    chunks = 60
    more: ClassVar[dict[str, Any]] = {}

    spec_name = "LateSpec"

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "spec_name": self.spec_name,
            "spec_module_path": "tests.connectors.offloading",
            "cpu_bytes_to_use": self.chunks * PAGE_BYTES * len(LAYERS),
            **self.more,
        }

    def attach_scheduler(self, connector: Any) -> None:
        super().attach_scheduler(connector)
        manager = self.manager
        complete, reset = manager.complete_store, manager.reset_cache

        def completed(keys: Any, *args: Any, **kwargs: Any) -> None:
            complete(keys, *args, **kwargs)
            for key in keys:
                self._check(key)

        def cleared() -> None:
            self.cleared += 1
            reset()

        manager.complete_store, manager.reset_cache = completed, cleared

    @property
    def manager(self) -> Any:
        return self.on_scheduler.connector_scheduler.manager

    @property
    def primary(self) -> Any:
        return self.manager

    def _check(self, key: Any) -> None:
        status = self.primary._policy.get(key)
        if status is None or not status.is_ready:
            return
        chunk = status.chunk_id
        values = self.truth.by_hash[get_offload_block_hash(key)]
        for rank, worker in self.workers.items():
            host = worker.connector_worker.worker.host
            page = [layer[chunk].reshape(-1).view(torch.float32).view(HEADS, BLOCK, WIDTH).numpy() for layer in host]
            self.check_store(page_is_right(page, values), f"rank {rank}: host chunk {chunk} under the wrong tokens")

    def leftovers(self) -> list[str]:
        scheduler = self.on_scheduler.connector_scheduler
        left = entries(scheduler, "_req_status", "_jobs", "_block_id_to_pending_jobs")
        left += ["chunks being loaded"] if scheduler._chunks_being_loaded else []
        for key, status in self.primary._policy.chunks.items():
            if status.ref_cnt != 0:
                left.append(f"chunk {status.chunk_id} has {status.ref_cnt} references ({key.hex()[:8]})")
        for worker in self.workers.values():
            left += [f"copy {job}" for job in worker.connector_worker.worker.jobs]
            left += ["unsubmitted stores"] if worker.connector_worker._unsubmitted_store_jobs else []
        return left


class Tiering(Offloading):
    """The tiering spec, with little host memory before a tier that is never full."""

    spec_name, chunks = "LateTieringSpec", 24
    more: ClassVar[dict[str, Any]] = {
        "secondary_tiers": [{"type": "MemoryTier", "module_path": "tests.connectors.offloading"}]
    }

    @property
    def primary(self) -> Any:
        return self.manager.primary_tier

    def leftovers(self) -> list[str]:
        left = super().leftovers()
        left += ["work of a tier"] if self.manager.has_pending_work() else []
        return left + [f"tier's job {job.job_id}" for tier in self.manager.secondary_tiers for _, job, _ in tier.jobs]
