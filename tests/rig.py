"""vLLM's real scheduler and output aggregator around a connector, in one process and without a model.

Every step runs the hooks in vLLM's order, and whatever crosses a process boundary is pickled. What a model would add
is a constant next token. The same rig runs kvobs's class and vLLM's own, so that a test can show what stock does.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import abstract as executors
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvobs import signals
from kvobs.demo.model import make_model
from kvobs.payload import KvobsStats
from kvobs.recorder import Recorder
from kvobs.traces import Traces
from tests.scripted import Script

BLOCK = 16
ROUTERS = {"kvobs": "kvobs", "stock": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"}


@cache
def _base_config() -> Any:
    """Make vLLM's configuration of the tiny model once; its connector is put in later.

    vLLM would set up its logging here, and take away what pytest listens with.
    """
    model = make_model(Path(tempfile.mkdtemp(prefix="kvobs-rig-")) / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CONFIGURE_LOGGING", "0")
        return EngineArgs(
            model=str(model), enforce_eager=True, dtype="float32", block_size=BLOCK, max_model_len=1024, max_num_seqs=8
        ).create_engine_config()


def child_config(script: Script, cls: str = "ScriptedConnector", **more: Any) -> dict[str, Any]:
    """Return the ``connectors`` entry of a scripted child."""
    return {
        "kv_connector": cls,
        "kv_connector_module_path": "tests.scripted",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tag": script.tag},
        **more,
    }


def transfer_config(
    router: str, connectors: list[dict[str, Any]], kvobs: dict[str, Any] | None = None, **more: Any
) -> KVTransferConfig:
    extra: dict[str, Any] = {"connectors": connectors}
    if kvobs is not None and router == "kvobs":
        extra["kvobs"] = kvobs
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path=ROUTERS[router],
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        **{"kv_load_failure_policy": "recompute", **more},
    )


def engine_config(transfer: KVTransferConfig, ranks: int = 1, rank: int = 0) -> Any:
    """Return vLLM's configuration with this connector, as a worker of this rank sees it."""
    config = copy.copy(_base_config())
    config.kv_transfer_config = transfer
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = ranks
    config.parallel_config.rank = rank
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def cache_config(blocks: int = 64, groups: int = 1) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    names = [KVCacheGroupSpec([f"layer.{g}"], spec) for g in range(groups)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=names)


class Rig:
    """An engine without a model: ``add`` requests, ``step``, and look at ``scheduler.requests``."""

    def __init__(
        self,
        router: str,
        *scripts: Script,
        ranks: int = 1,
        kvobs: dict[str, Any] | None = None,
        blocks: int = 64,
        groups: int = 1,
        policy: str = "recompute",
        connectors: list[dict[str, Any]] | None = None,
        lag: int = 0,
    ) -> None:
        """Build it; with ``lag`` the scheduler is so many steps ahead of the workers, as in async scheduling."""
        transfer = transfer_config(
            router, connectors or [child_config(s) for s in scripts], kvobs, kv_load_failure_policy=policy
        )
        caches = cache_config(blocks, groups)
        cls = KVConnectorFactory.get_connector_class(transfer)
        config = engine_config(transfer, ranks)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.workers: list[Any] = [
            cls(engine_config(transfer, ranks, rank), KVConnectorRole.WORKER, caches) for rank in range(ranks)
        ]
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        self.lag = lag
        self.in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self.scheduler: Any = (AsyncScheduler if lag else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        # By the name that vLLM's executor looks up, which kvobs may have replaced.
        self.aggregator = executors.KVOutputAggregator.from_connector(self.connector, ranks)
        self.output: KVConnectorOutput | None = None
        self.stats: list[Any] = []

    def add(
        self,
        request_id: str,
        tokens: int = 4 * BLOCK + 1,
        max_tokens: int = 2,
        trace_headers: Any = None,
        **params: Any,
    ) -> Request:
        """Add a request of ``tokens`` prompt tokens, all its own."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        seed = sum(map(ord, request_id)) * 31 % 97 + 3
        prompt = [(seed + i * 7) % 250 for i in range(tokens)]
        request = Request(request_id, prompt, sampling, None, block_hasher=self.hasher, trace_headers=trace_headers)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> KVConnectorOutput:
        """Run one engine step; return what the scheduler read from the connectors' output, after the wrapper."""
        scheduled = self.scheduler.schedule()
        requests = self.scheduler.requests
        samples = {
            r: requests[r].num_computed_tokens >= requests[r].num_prompt_tokens for r in scheduled.num_scheduled_tokens
        }
        self.in_flight.append((scheduled, samples))
        if len(self.in_flight) <= self.lag:
            return KVConnectorOutput()
        scheduled, samples = self.in_flight.popleft()
        outputs = [self._work(worker, scheduled, samples) for worker in self.workers]
        combined = self.aggregator.aggregate(outputs, 0)
        assert combined is not None
        self.output = combined.kv_connector_output
        for engine_output in self.scheduler.update_from_output(scheduled, combined).values():
            if engine_output.scheduler_stats is not None and engine_output.scheduler_stats.kv_connector_stats:
                self.stats.append(engine_output.scheduler_stats.kv_connector_stats)
        assert self.output is not None
        return self.output

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, bool]) -> ModelRunnerOutput:
        """Do what vLLM's model runner does with a connector in one step."""
        meta = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        assert worker.has_connector_metadata()
        worker.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            worker.wait_for_layer_load("layer.0")
            worker.save_kv_layer("layer.0", None, None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set(scheduled.finished_req_ids))
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        output = pickle.loads(pickle.dumps(output))
        ids = list(samples)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] if is_sampled else [] for is_sampled in samples.values()],
            kv_connector_output=output,
        )

    def status(self, request_id: str) -> str:
        """Return vLLM's status of a request, or "gone"."""
        request = self.scheduler.requests.get(request_id)
        return "gone" if request is None else request.status.name

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Blocks:
    """Stands for vLLM's KVCacheBlocks."""

    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups


def counted(rig: Rig, metric: str, child: int, *labels: str) -> int:
    """Return what has been counted so far: what was shipped, and what the scheduler's side will ship."""
    place = _place(child, metric, *labels)
    shipped = sum(KvobsStats(data=payload["kvobs"]).taken().counts.get(place, 0) for payload in rig.stats)
    return shipped + counts_of(rig.connector._side._outcomes._recorder, child, metric, *labels)


def counts_of(recorder: Recorder, child: int, metric: str, *labels: str) -> int:
    """Return what a recorder has counted since its numbers were taken."""
    return recorder._counts.get(_place(child, metric, *labels), 0)


def _place(child: int, metric: str, *labels: str) -> int:
    return signals.PROCESS_WIDTH + child * signals.CHILD_WIDTH + signals._BY_VALUES[(metric, *labels)].first


def assert_nothing_is_left(rig: Rig) -> None:
    """Let the engine go idle: every block must be free, and no book of kvobs's may hold anything."""
    rig.run(3)
    assert rig.scheduler.requests == {}
    assert rig.free_blocks == rig.scheduler.kv_cache_config.num_blocks - 1
    side = rig.connector._side
    assert (len(side.ledger), len(side._offers), side._news.loads) == (0, 0, {})
    assert not isinstance(side._traces, Traces) or len(side._traces) == 0
    assert [worker._side._loads for worker in rig.workers] == [{}] * len(rig.workers)
    assert [worker._side._began for worker in rig.workers] == [{}] * len(rig.workers)
