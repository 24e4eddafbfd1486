"""A rig whose workers are vLLM's own V1 or V2 model runner code, with as many steps in flight as its scheduling allows.

The V1 runner's part is a mixin that asks for the process's connector; the V2 runner's part is a class. Between them
and the forward stands here what they would do around a model of two layers.
"""

import inspect
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvobs.testing import Rig
from kvobs.testing.rig import base_config

TOKEN = 7
"""The model samples no other."""

_TAKES_BATCH = "input_batch" in inspect.signature(ActiveKVConnector.pre_forward).parameters
_HAS_FINISH = hasattr(ActiveKVConnector, "finish_forward")
_DEFERS = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters


@dataclass(frozen=True)
class Tensor:
    """Stands for one: the connectors must get this very object."""

    name: str


LAYERS = {name: Tensor(f"{name}'s cache") for name in ("layer.0", "layer.1")}
ATTENTION = Tensor("the attention's metadata")


class Running(NamedTuple):
    """How an engine schedules, and which model runner its workers have."""

    is_v2: bool = False
    is_async: bool = False
    is_pipeline: bool = False  # the ranks are stages, and as many batches are under way
    ranks: int = 1
    is_uni: bool = False  # one worker in the scheduler's process: no aggregator, and nothing is pickled
    drafts: bool = False  # the step is closed after a draft model's forward
    is_graph: bool = False  # a full graph is replayed: no layer hooks

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
            "preempted during a load",
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


class ModelRunner:
    """The connector's part of one rank's model runner."""

    def __init__(self, running: Running, connector: Any, config: Any, forward: Callable[[Any], None]) -> None:
        self._running, self.connector, self._config, self._forward = running, connector, config, forward
        with self._in_this_process():
            if running.is_v2:
                self._active = ActiveKVConnector(config, dict(LAYERS))
            else:
                connector.register_kv_caches(dict(LAYERS))
                connector.set_host_xfer_buffer_ops(_copy)

    def run(self, scheduled: Any) -> KVConnectorOutput | None:
        """Run a step; return the connector's output."""
        with self._in_this_process():
            output = self._run_v2(scheduled) if self._running.is_v2 else self._run_v1(scheduled)
        return output.kv_connector_output if isinstance(output, ModelRunnerOutput) else output

    @contextmanager
    def _in_this_process(self) -> Iterator[None]:
        """Make this rank's connector the one of the process, as it is in a worker's."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    def _run_v1(self, scheduled: Any) -> Any:
        runner, drafts = KVConnectorModelRunnerMixin, self._running.drafts
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        if not scheduled.total_num_scheduled_tokens:
            return runner.kv_connector_no_forward(scheduled, self._config)
        with (
            set_forward_context(None, self._config),
            runner.maybe_get_kv_connector_output(scheduled, defer_finalize=drafts) as output,
        ):
            self._call_layers(scheduled)
        if drafts:
            self._call_layers(scheduled)
            runner.finalize_kv_connector()
        return output

    def _run_v2(self, scheduled: Any) -> Any:
        active = self._active
        if not scheduled.total_num_scheduled_tokens:
            return active.no_forward(scheduled)
        ids = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=list(range(len(ids))), req_ids=ids, num_tokens=len(ids))
        more: tuple[Any, ...] = (batch,) if _TAKES_BATCH else ()
        if self._running.is_graph:
            active.pre_forward(scheduled, *more, *(({},) if _TAKES_BATCH else ()))
        else:
            with set_forward_context(None, self._config):
                active.pre_forward(scheduled, *more)
                self._call_layers(scheduled)
        if _HAS_FINISH:
            active.finish_forward()
        if self._running.drafts and _DEFERS:
            output = active.post_forward(scheduled.finished_req_ids, defer_finalize=True)
            self._call_layers(scheduled)
            active.finalize_step()
            return output
        return active.post_forward(scheduled.finished_req_ids)

    def _call_layers(self, scheduled: Any) -> None:
        """Do what vLLM's attention layers do; a replayed graph has none of it."""
        if not self._running.is_graph and self.connector.has_connector_metadata():
            self._forward(scheduled)


def _copy(*arguments: Any) -> None:
    """Stand for the operation that copies blocks between host and device."""


@dataclass
class InFlight:
    """A step that is scheduled and not read yet, and the outputs of the ranks that have worked on it."""

    scheduled: Any
    sent: bytes
    samples: dict[str, list[int]]
    outputs: dict[int, ModelRunnerOutput] = field(default_factory=dict)


class _NoAggregator:
    """What an executor of one worker has in place of an aggregator."""

    def aggregate(self, outputs: list[Any], _output_rank: int) -> Any:
        return outputs[0]


class Overlapping(Rig):
    """Steps as EngineCore does with its batch queue; a rank works as soon as a step is scheduled, or before it is read.

    ``seen`` counts what a life must have to say anything about the model runners.
    """

    steps_idle = False  # steps without a request, too: what is to be passed on is

    def __init__(
        self, router: str, *scripts: Any, running: Running, at_once: Callable[[], bool] = lambda: False, **more: Any
    ) -> None:
        self.running, self._at_once, self.seen = running, at_once, Counter[str]()
        self._steps: list[InFlight] = []
        self._runners: dict[Any, ModelRunner] = {}
        base_config()  # made before vLLM is made to believe in a model runner that a CPU has not
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(running.is_v2))):
            super().__init__(router, *scripts, lag=int(running.is_async), ranks=running.ranks, **more)
        self._depth = running.ranks if running.is_pipeline else 1 + running.is_async
        if running.is_uni:
            self.aggregator = _NoAggregator()
        if running.is_pipeline:
            self._output_rank = running.ranks - 1

    def _configure(self, config: Any) -> None:
        parallel, ranks = config.parallel_config, self.running.ranks
        sizes = (1, ranks) if self.running.is_pipeline else (ranks, 1)
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = sizes
        config.scheduler_config.async_scheduling = self.running.is_async

    def _build_worker(self, cls: Any, config: Any, caches: Any) -> Any:
        worker = super()._build_worker(cls, config, caches)
        forward = lambda scheduled: self._forward(worker, scheduled)  # noqa: E731 - a rank's own
        self._runners[worker] = ModelRunner(self.running, worker, config, forward)
        return worker

    @property
    def is_busy(self) -> bool:
        return bool(self._steps or self.scheduler.has_requests())

    def step(self) -> KVConnectorOutput:
        """Schedule a step, unless there is nothing to do, and read the oldest one if no more may be in flight."""
        self.scheduled, self.output, self.request_outputs = None, None, []
        if self.scheduler.has_requests() or self.steps_idle:
            self.scheduled = scheduled = self._schedule()
            sent = b"" if self.running.is_uni else pickle.dumps(scheduled)
            self._steps.append(InFlight(scheduled, sent, self._samples(scheduled)))
            for rank in range(len(self.workers)):
                if self._at_once():
                    for step in self._steps:
                        self._work_on(step, rank)
            if scheduled.total_num_scheduled_tokens and len(self._steps) < self._depth:
                return KVConnectorOutput()
        if not self._steps:
            return KVConnectorOutput()
        oldest = self._steps[0]
        for rank in range(len(self.workers)):
            self._work_on(oldest, rank)
        del self._steps[0]
        self._before_read()
        if oldest.scheduled.total_num_scheduled_tokens:
            self.aggregator.aggregate([None] * len(self.workers), self._output_rank)  # of the forward, before sampling
        return self._read(oldest.scheduled, [oldest.outputs[rank] for rank in range(len(self.workers))])

    def _schedule(self) -> Any:
        scheduled = self.scheduler.schedule()
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
        return scheduled

    def keep_no_room(self) -> None:
        """Drop the room that vLLM keeps for a request whose load has failed: it may admit no load any more."""
        prefills = self.scheduler._inflight_prefills
        self.scheduler._inflight_prefills = {request for request in prefills if request.num_computed_tokens}

    def _work_on(self, step: InFlight, rank: int) -> None:
        if rank in step.outputs:
            return
        self.seen["a rank works ahead"] += step is not self._steps[0]
        scheduled = step.scheduled if self.running.is_uni else pickle.loads(step.sent)
        output = self._work(self.workers[rank], scheduled, step.samples if rank == self._output_rank else {})
        step.outputs[rank] = output if self.running.is_uni else pickle.loads(pickle.dumps(output))

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> ModelRunnerOutput:
        output = self._runners[worker].run(scheduled)
        ids = {request: i for i, request in enumerate(samples)}
        return ModelRunnerOutput([*ids], ids, list(samples.values()), kv_connector_output=output)

    def _before_read(self) -> None:
        """Do what a client may cause while the workers work."""

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        """Return the tokens that the model samples for each request of a step."""
        requests = self.scheduler.requests
        return {name: [] if requests[name].is_prefill_chunk else [TOKEN] for name in scheduled.num_scheduled_tokens}

    def _forward(self, worker: Any, scheduled: Any) -> None:
        """Do what the attention layers of two layers do."""
        for name, cache in LAYERS.items():
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, cache, ATTENTION)
