"""A rig whose workers are vLLM's V1 or V2 model runners, with as many steps in flight as its scheduling allows."""

import os
import pickle
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.testing import Rig
from kvobs.testing.rig import base_config


class Running(NamedTuple):
    """How an engine schedules, and which model runner its workers have."""

    is_v2: bool = False
    is_async: bool = False
    is_pipeline: bool = False
    ranks: int = 1

    def __str__(self) -> str:
        how = " ".join(name for name, has in (("async", self.is_async), ("pipeline", self.is_pipeline)) if has)
        return f"V{1 + self.is_v2} runner, {how or 'sync'} scheduling, {self.ranks} ranks"

    @property
    def overlaps(self) -> bool:
        """Whether a step is scheduled before the one before it is read."""
        return self.is_async or self.is_pipeline

    @property
    def recomputes(self) -> bool:
        """Whether vLLM recomputes the blocks of a synchronous load that has failed."""
        return not self.is_v2 and not self.overlaps

    @property
    def seen(self) -> set[str]:
        """What some lives of such an engine must have, or they say nothing about it."""
        return {
            *("preempted during a load", "loads begun after the forward"),
            "resumed as new" if self.is_v2 else "resumed as cached",
            *(("scheduled before the last step was read", "a rank works ahead") if self.overlaps else ()),
        }


RUNNINGS = [
    *(Running(v2, is_async, ranks=ranks) for v2 in (False, True) for is_async in (False, True) for ranks in (1, 2)),
    # vLLM's V1 runner has no asynchronous pipeline.
    *(
        Running(v2, is_async, is_pipeline=True, ranks=2)
        for v2, is_async in ((False, False), (True, False), (True, True))
    ),
]


@dataclass
class Table:
    """A request's blocks, by group, and how many of its tokens are computed."""

    blocks: list[list[int]]
    computed: int


class Tables(dict[str, Table]):
    """The tables of the requests that a scheduler's outputs have shown, kept as one of vLLM's model runners does."""

    def take(self, output: Any, *, is_v2: bool) -> None:
        for request in output.finished_req_ids | (output.preempted_req_ids or set() if is_v2 else set()):
            self.pop(request, None)
        for new in output.scheduled_new_reqs:
            self[new.req_id] = Table([[*group] for group in new.block_ids], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request in cached.resumed_req_ids:
                self[request] = Table([[*group] for group in blocks], computed)
                continue
            table = self[request]
            for group, more in zip(table.blocks, blocks or (), strict=False):
                group.extend(more)
            table.computed = table.computed if is_v2 else computed  # the V2 runner counts on the GPU


@dataclass
class InFlight:
    """A step that is scheduled and not read yet, and the outputs of the ranks that have worked on it."""

    scheduled: Any
    sent: bytes
    samples: dict[str, list[int]]
    outputs: dict[int, ModelRunnerOutput] = field(default_factory=dict)


class Overlapping(Rig):
    """Steps as EngineCore does with its batch queue; with ``dice`` some ranks work as soon as a step is scheduled.

    ``seen`` counts what a life must have to say anything about the model runners.
    """

    def __init__(self, router: str, *scripts: Any, running: Running, dice: Random | None = None, **more: Any) -> None:
        self.running, self._dice, self.seen = running, dice, Counter[str]()
        self._steps: list[InFlight] = []
        base_config()  # made before vLLM is made to believe in a model runner that a CPU has not
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(running.is_v2))):
            super().__init__(router, *scripts, lag=int(running.is_async), **more)
            self._depth: int = self.scheduler.vllm_config.max_concurrent_batches

    def _configure(self, config: Any) -> None:
        parallel = config.parallel_config
        sizes = (1, parallel.world_size) if self.running.is_pipeline else (parallel.world_size, 1)
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = sizes
        config.scheduler_config.async_scheduling = self.running.is_async

    def zero_blocks(self, *, is_on: bool) -> None:
        """Let the workers zero new blocks, as vLLM has it for some models."""
        self.scheduler.needs_kv_cache_zeroing = is_on
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = is_on

    @property
    def is_busy(self) -> bool:
        return bool(self._steps or self.scheduler.has_requests())

    def step(self) -> KVConnectorOutput:
        """Schedule a step, unless there is nothing to do, and read the oldest one if no more may be in flight."""
        self.scheduled, self.output, self.request_outputs = None, None, []
        if has_requests := self.scheduler.has_requests():
            self._schedule()
        if not self._steps or (has_requests and len(self._steps) < self._depth and self.scheduler.has_requests()):
            return KVConnectorOutput()
        oldest = self._steps[0]
        for rank in range(len(self.workers)):
            if rank not in oldest.outputs:
                self._work_on(oldest, rank)
        self._steps.pop(0)
        self._before_read()
        return self._read(oldest.scheduled, [oldest.outputs[rank] for rank in range(len(self.workers))])

    def _schedule(self) -> None:
        # vLLM keeps room for a request whose load has failed, and may admit no further load, its own included.
        self.scheduler._inflight_prefills = {r for r in self.scheduler._inflight_prefills if r.num_computed_tokens}
        scheduled = self.scheduled = self.scheduler.schedule()
        self._count(scheduled)
        self._steps.append(InFlight(scheduled, pickle.dumps(scheduled), self._samples(scheduled)))
        for rank in range(len(self.workers)):
            if self._dice is not None and self._dice.random() < 0.5:
                for step in self._steps:
                    if rank not in step.outputs:
                        self._work_on(step, rank)

    def _count(self, scheduled: Any) -> None:
        requests = self.scheduler.requests
        loads = any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in requests.values())
        self.seen += Counter(
            {
                "scheduled before the last step was read": len(self._steps),
                "resumed as new": sum(requests[new.req_id].num_preemptions > 0 for new in scheduled.scheduled_new_reqs),
                "resumed as cached": len(scheduled.scheduled_cached_reqs.resumed_req_ids),
                "preempted during a load": len(scheduled.preempted_req_ids or ()) if loads else 0,
            }
        )

    def _work_on(self, step: InFlight, rank: int) -> None:
        self.seen["a rank works ahead"] += step is not self._steps[0]
        step.outputs[rank] = self._work(self.workers[rank], pickle.loads(step.sent), step.samples)

    def _before_read(self) -> None:
        """Do what a client may cause while the workers work."""

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        """Return the tokens that the model samples for each request of a step."""
        requests = self.scheduler.requests
        return {name: [] if requests[name].is_prefill_chunk else [7] for name in scheduled.num_scheduled_tokens}

    def _forward(self, worker: Any, scheduled: Any) -> None:
        """Load before the forward only what it needs, as vLLM's model runners do."""
        if scheduled.has_sync_kv_loads:
            worker.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            worker.wait_for_layer_load("layer.0")
            self._compute(worker, scheduled)
            worker.save_kv_layer("layer.0", None, None)
        if self.running.is_v2:
            worker.finish_forward()
        if not scheduled.has_sync_kv_loads:
            self.seen["loads begun after the forward"] += bool(scheduled.total_num_scheduled_tokens)
            worker.start_load_kv(None)
        worker.wait_for_save()

    def _compute(self, worker: Any, scheduled: Any) -> None:
        """Compute what is scheduled, where there are contents."""
