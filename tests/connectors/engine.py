"""vLLM's real scheduler around real connectors, in one process; the model is arithmetic on real KV tensors.

A step calls the hooks in the order of vLLM's V1 or V2 model runner: a synchronous load before the forward, everything
else after its launch. Whatever crosses a process boundary is pickled.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import abstract as executors
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvobs.testing import engine_config, transfer_config
from tests.connectors.memory import BLOCK, LAYERS, Memory, Truth, cache_config
from tests.connectors.plug import Plug


class Engine:
    """An engine whose children are real connectors.

    Args:
        router: ``kvobs`` or ``stock``.
        plugs: the children, in order.
        kvobs: options.
        blocks: GPU blocks, one of which vLLM keeps for itself.
        budget: tokens per step; prompts longer than that are prefilled in chunks.
        is_v2: whether the worker is a V2 model runner.
        ranks: workers, each with a memory of its own.
    """

    def __init__(
        self,
        router: str,
        plugs: list[Plug],
        *,
        kvobs: dict[str, Any] | None = None,
        blocks: int = 26,
        budget: int = 50,
        is_v2: bool = False,
        ranks: int = 1,
        connectors: list[dict[str, Any]] | None = None,
    ) -> None:
        self.plugs, self.is_v2 = plugs, is_v2
        transfer = transfer_config(router, connectors or [plug.config() for plug in plugs], kvobs)
        self.caches = cache_config(blocks)
        self.truth = Truth()
        self.memories = [Memory(blocks) for _ in range(ranks)]
        cls = KVConnectorFactory.get_connector_class(transfer)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.workers: list[Any] = []
        for rank, memory in enumerate(self.memories):
            worker = cls(self._config(transfer, blocks, budget, ranks, rank), KVConnectorRole.WORKER, self.caches)
            for plug, child in zip(plugs, children_of(worker), strict=True):
                plug.attach_worker(child, memory, self.truth, rank)
            worker.register_kv_caches(memory.kv_caches)
            self.workers.append(worker)
        config = self._config(transfer, blocks, budget, ranks, 0)
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=self.caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = is_v2
        self.connector: Any = self.scheduler.connector
        for plug, child in zip(plugs, children_of(self.connector), strict=True):
            plug.attach_scheduler(child)
        self.aggregator = executors.KVOutputAggregator.from_connector(self.connector, ranks)
        self.steps = 0
        self.wrong_uses: list[str] = []  # KV that was read by a forward and was not what it had to be
        self.preemptions = 0
        self.finished: dict[str, dict[str, Any]] = {}

    @staticmethod
    def _config(transfer: Any, blocks: int, budget: int, ranks: int, rank: int) -> Any:
        config = engine_config(transfer, ranks, rank)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.kv_cache_layout = "LBHNC"
        config.scheduler_config.disable_hybrid_kv_cache_manager = not KVConnectorFactory.supports_hma_config(transfer)
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.scheduler_config.max_num_seqs = 4
        config.scheduler_config.enable_chunked_prefill = True
        return config

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **params: Any) -> Request:
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(request_id, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Evict what the GPU caches and nobody uses, so that connectors are asked for it."""
        pool = self.scheduler.kv_cache_manager.block_pool
        unused = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None}
        self.scheduler.kv_cache_manager.evict_blocks(unused)

    def take_finished(self) -> dict[str, dict[str, Any]]:
        """Return the requests that have ended since the last time, and what their connectors say to their clients."""
        finished, self.finished = self.finished, {}
        return finished

    @property
    def is_busy(self) -> bool:
        """Return whether vLLM would run another step."""
        return bool(self.scheduler.has_requests())

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def step(self) -> None:
        """Run one engine step."""
        self.steps += 1
        for plug in self.plugs:
            plug.tick()
        scheduled = self.scheduler.schedule()
        self.preemptions += len(scheduled.preempted_req_ids or ())
        requests = self.scheduler.requests
        for request_id in scheduled.num_scheduled_tokens:
            self.truth.learn(requests[request_id])
        wrong: dict[str, tuple[int, int]] = {}  # request -> (first wrong position, its block)
        outputs = [
            self._work(worker, memory, scheduled, wrong)
            for worker, memory in zip(self.workers, self.memories, strict=True)
        ]
        combined = self.aggregator.aggregate(outputs, 0)
        assert combined is not None
        output = combined.kv_connector_output
        reported = (output.invalid_block_ids or set()) if output is not None else set()
        for request_id, (position, block) in wrong.items():
            if block not in reported:  # else vLLM is about to compute it anew
                self.wrong_uses.append(f"step {self.steps}: {request_id} reads wrong KV from token {position} on")
        for outputs_ in self.scheduler.update_from_output(scheduled, combined).values():
            for each in outputs_.outputs:
                if each.finished:
                    self.finished[each.request_id] = each.kv_transfer_params or {}

    def _work(self, worker: Any, memory: Memory, scheduled: Any, wrong: dict[str, tuple[int, int]]) -> Any:
        """Do what vLLM's model runner does in one step."""
        context = SimpleNamespace(
            attn_metadata=dict.fromkeys(LAYERS),
            no_compile_layers={layer: SimpleNamespace(kv_cache=memory.kv_caches[layer]) for layer in LAYERS},
        )
        meta = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if scheduled.has_sync_kv_loads:
            worker.start_load_kv(context)
        samples = self._forward(worker, memory, scheduled, wrong) if scheduled.total_num_scheduled_tokens else {}
        if self.is_v2:
            worker.finish_forward()
        if not scheduled.has_sync_kv_loads:
            worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
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
        ids = list(samples)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=list(samples.values()),
            kv_connector_output=pickle.loads(pickle.dumps(output)),
        )

    def _forward(
        self, worker: Any, memory: Memory, scheduled: Any, wrong: dict[str, tuple[int, int]]
    ) -> dict[str, list[int]]:
        """Compute what is scheduled, and return the tokens that it samples."""
        for layer in LAYERS:
            worker.wait_for_layer_load(layer)
        samples: dict[str, list[int]] = {}
        begins = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request, begin = self.scheduler.requests[request_id], begins[request_id]
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            bad = memory.forward(block_ids, request.all_token_ids[: begin + count], begin)
            if bad is not None:
                wrong[request_id] = (bad, block_ids[bad // BLOCK])
            is_done = begin + count >= request.num_tokens
            samples[request_id] = [(request.num_tokens * 7 + request.all_token_ids[0]) % 250] if is_done else []
        for layer in LAYERS:
            worker.save_kv_layer(layer, memory.kv_caches[layer], None)
        return samples


def children_of(connector: Any) -> list[Any]:
    """Return a router's children, in order, and a nested router's in its place."""
    found: list[Any] = []
    for child in connector._connectors:
        found += children_of(child) if hasattr(child, "_connectors") else [child]
    return found
