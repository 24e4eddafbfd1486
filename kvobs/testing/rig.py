"""vLLM's real scheduler and output aggregator around a connector, in one process and without a model.

Every step runs the hooks in vLLM's order, and whatever crosses a process boundary is pickled. What a model would add
is a constant next token. The same rig runs kvobs's router and vLLM's own.
"""

import atexit
import copy
import os
import pickle
import shutil
import tempfile
import weakref
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import abstract as executors
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.testing.model import make_model
from kvobs.testing.scripted import Script, ScriptedConnector, entry_of, wrap_hooks
from kvobs.vllm_api import versions

BLOCK = 16
"""Tokens in a block of the KV cache."""

ROUTERS = {"kvobs": "kvobs", "stock": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"}
"""The routers that a rig runs: name -> ``kv_connector_module_path`` of its ``MultiConnector``."""

_HAS_RESULTS = versions.transfer_results() is not None


@cache
def base_config() -> Any:
    """Make vLLM's configuration of the tiny model, once; its connector is put in later."""
    folder = tempfile.mkdtemp(prefix="kvobs-rig-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = make_model(Path(folder) / "model")
    # vLLM would set up its logging here, and remove the handlers by which tests listen. Without Triton vLLM refuses the
    # V2 model runner; a rig uses no model runner.
    with mock.patch.dict(os.environ, {"VLLM_CONFIGURE_LOGGING": "0", versions.V2_RUNNER: "0"}):
        return EngineArgs(
            model=str(model), enforce_eager=True, dtype="float32", block_size=BLOCK, max_model_len=1024, max_num_seqs=8
        ).create_engine_config()


def transfer_config(
    router: str, connectors: list[dict[str, Any]], kvobs: dict[str, Any] | None = None, **more: Any
) -> KVTransferConfig:
    """Return vLLM's ``--kv-transfer-config`` of a router.

    Args:
        router: a key of ``ROUTERS``.
        connectors: the entries of ``connectors``.
        kvobs: kvobs's options; vLLM's own router gets none.
        more: further keys of the top level; ``kv_load_failure_policy`` is "recompute" by default.
    """
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
    """Return vLLM's ``VllmConfig`` with a transfer configuration, as the worker of this rank of ``ranks`` sees it."""
    config = copy.copy(base_config())
    config.kv_transfer_config = transfer
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = ranks
    config.parallel_config.rank = rank
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def cache_config(blocks: int = 64, groups: int = 1) -> KVCacheConfig:
    """Return vLLM's ``KVCacheConfig``: this many blocks of ``BLOCK`` tokens, 2 heads of 64 ``float32``s.

    Each of the groups has one layer, ``layer.0`` and so on. There are no tensors.
    """
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    names = [KVCacheGroupSpec([f"layer.{g}"], spec) for g in range(groups)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=names)


def _show(rig: "Rig", config: Any) -> None:
    """Take the place of an API server that shows kvobs's metrics: without one an exporter would start after a while."""
    identity = Identity.of(config)
    with suppress(OSError, ValueError):  # perhaps there can be no pages
        lock = files.Lock(files.folder(), f"{identity.server}-{identity.number}{files.COLLECTOR}")
        weakref.finalize(rig, lock.release)


class Rig:
    """An engine without a model: ``add`` requests, ``step``, and look at what became of them.

    Attributes:
        scheduler: vLLM's scheduler; its ``requests`` are those that are alive, by id.
        connector: the router on the scheduler's side.
        workers: the router on the workers' side, by rank.
        aggregator: the ``KVOutputAggregator`` of the workers' outputs.
        output: the connectors' output of the last step, as the scheduler read it; None before the first.
        stats: the connectors' stats that the scheduler would have sent to the API server, so far.
        lag: how many steps the scheduler is ahead of the workers.
        hasher: vLLM's block hasher, for requests that are made without ``add``.
        scheduled: vLLM's ``SchedulerOutput`` of the last step; None before the first.
        request_outputs: what the last step sent to the API server of each request, vLLM's ``EngineCoreOutput``s.
    """

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
        context_parallel: int = 1,
        external_rank: int | None = None,
        hybrid: bool = True,
    ) -> None:
        """Build the scheduler, the router in both roles, and through it the connectors.

        Args:
            router: a key of ``ROUTERS``.
            scripts: one ``ScriptedConnector`` is built for each.
            ranks: the number of workers.
            kvobs: kvobs's options, for its router only.
            blocks: the number of KV cache blocks; one of them is vLLM's null block.
            groups: the number of KV cache groups, of one layer each.
            policy: vLLM's ``kv_load_failure_policy``.
            connectors: the entries of ``connectors``, in place of ``scripts``; see ``entry_of``.
            lag: how many steps the scheduler is ahead of the workers, as in async scheduling.
            context_parallel: a block id stands for a block on each of this many ranks, which share its tokens.
            external_rank: an external launcher started an engine for each rank: this is the one of that rank.
            hybrid: whether vLLM's hybrid KV cache manager is on, which needs connectors with ``SupportsHMA``.

        Raises:
            kvobs.schema.config.ConfigError: the configuration has errors.
            ValueError: kvobs's router with ``hybrid`` and a connector without ``SupportsHMA``.
        """
        transfer = transfer_config(
            router, connectors or [entry_of(script) for script in scripts], kvobs, kv_load_failure_policy=policy
        )
        caches = self._caches(blocks, groups)
        cls = KVConnectorFactory.get_connector_class(transfer)
        block = BLOCK * context_parallel

        def config_of(rank: int) -> Any:
            config = engine_config(transfer, ranks, rank)
            config.parallel_config.decode_context_parallel_size = context_parallel
            config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
            if external_rank is not None:
                config.parallel_config.distributed_executor_backend = "external_launcher"
            config.cache_config = copy.copy(config.cache_config)
            config.cache_config.num_gpu_blocks = blocks
            self._configure(config)
            return config

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block, sha256)
        self.lag, self._output_rank = lag, 0
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.scheduled: Any = None
        self.output: KVConnectorOutput | None = None
        self.request_outputs: list[Any] = []
        self.stats: list[Any] = []
        own = range(ranks) if external_rank is None else [external_rank]
        self.workers: list[Any] = [self._build_worker(cls, config_of(rank), caches) for rank in own]
        config = config_of(external_rank or 0)
        if "exporter" not in (kvobs or {}):
            _show(self, config)
        self.scheduler: Any = (AsyncScheduler if lag else Scheduler)(
            vllm_config=config,
            kv_cache_config=generate_scheduler_kv_cache_config([caches]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=block,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        for router_of_side in (self.connector, *self.workers):
            for connector in router_of_side._connectors:  # noqa: SLF001 - plug-ins also look for them there
                if isinstance(connector, ScriptedConnector):
                    wrap_hooks(connector)
        self._shake_hands()
        # By the name that vLLM's executor looks up, which kvobs may have replaced.
        self.aggregator: Any = executors.KVOutputAggregator.from_connector(self.connector, len(self.workers))

    def add(
        self,
        request_id: str,
        tokens: int | list[int] = 4 * BLOCK + 1,
        max_tokens: int = 2,
        trace_headers: Any = None,
        prompt_of: str | None = None,
        **params: Any,
    ) -> Request:
        """Add a request, which generates ``max_tokens`` tokens.

        Args:
            request_id: its id.
            tokens: its prompt, or only how long it is.
            max_tokens: how many tokens it generates.
            trace_headers: headers of the client's request, such as ``{"traceparent": ...}``.
            prompt_of: the id of another request, with whose prompt this one begins. By default a prompt of a given
                length follows from ``request_id``; two ids may give the same one.
            params: its ``kv_transfer_params``.
        """
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        seed = sum(map(ord, prompt_of or request_id)) * 31 % 97 + 3
        prompt = tokens if isinstance(tokens, list) else [(seed + i * 7) % 250 for i in range(tokens)]
        request = Request(request_id, prompt, sampling, None, block_hasher=self.hasher, trace_headers=trace_headers)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request as if its client had left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> KVConnectorOutput:
        """Run one engine step; return the connectors' output as the scheduler read it.

        Errors of connectors, routers and vLLM's scheduler are raised as they are: in an engine they would end it.
        """
        scheduled = self.scheduled = self.scheduler.schedule()
        self.request_outputs = []
        self._in_flight.append((scheduled, self._samples(scheduled)))
        if len(self._in_flight) <= self.lag:
            return KVConnectorOutput()
        scheduled, samples = self._in_flight.popleft()
        return self._read(scheduled, [self._work(worker, scheduled, samples) for worker in self.workers])

    def _read(self, scheduled: Any, outputs: list[ModelRunnerOutput]) -> KVConnectorOutput:
        """Let the scheduler read the workers' outputs of a step."""
        combined = self.aggregator.aggregate(outputs, self._output_rank)
        assert combined is not None
        self.output = combined.kv_connector_output
        for engine_output in self._update(scheduled, combined).values():
            self.request_outputs += engine_output.outputs
            if engine_output.scheduler_stats is not None and engine_output.scheduler_stats.kv_connector_stats:
                self.stats.append(engine_output.scheduler_stats.kv_connector_stats)
        return self.output or KVConnectorOutput()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    # Parts that a harness with more of an engine replaces

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        return cache_config(blocks, groups)

    def _configure(self, config: Any) -> None:
        """Change vLLM's configuration of the scheduler, or of a worker."""

    def _build_worker(self, cls: Any, config: Any, caches: KVCacheConfig) -> Any:
        return cls(config, KVConnectorRole.WORKER, caches)

    def _shake_hands(self) -> None:
        """Hand the workers' handshakes to the scheduler's side before the first request.

        vLLM makes this call even if no worker has anything. Not so here: NIXL begins to listen on its port in it.
        """
        handshakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        sent = {rank: pickle.loads(pickle.dumps(own)) for rank, own in handshakes.items() if own is not None}
        if sent:
            self.connector.set_xfer_handshake_metadata_pp_aware(sent)

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        """Return the tokens that the model samples for each request of a step."""
        requests = {request_id: self.scheduler.requests[request_id] for request_id in scheduled.num_scheduled_tokens}
        return {
            request_id: [7] if request.num_computed_tokens >= request.num_prompt_tokens else []
            for request_id, request in requests.items()
        }

    def _forward(self, worker: Any, scheduled: Any) -> None:
        """Make the calls between those that begin and end a worker's step."""
        worker.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            worker.wait_for_layer_load("layer.0")
            worker.save_kv_layer("layer.0", None, None)
        worker.wait_for_save()

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> ModelRunnerOutput:
        """Make the calls of vLLM's model runner into a connector in one step."""
        meta = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        assert worker.has_connector_metadata()
        self._forward(worker, scheduled)
        finished = set(scheduled.finished_req_ids)
        ends: dict[str, Any] = {}
        if _HAS_RESULTS:
            results = worker.get_transfer_results(finished)
            sent, received = results.finished_sending or None, results.finished_recving or None
            ends["failed_recving"] = results.failed_recving
        else:
            sent, received = worker.get_finished(finished)
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            **ends,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=list(samples),
            req_id_to_index={request_id: i for i, request_id in enumerate(samples)},
            sampled_token_ids=list(samples.values()),
            kv_connector_output=pickle.loads(pickle.dumps(output)),
        )

    def _update(self, scheduled: Any, combined: ModelRunnerOutput) -> dict[int, Any]:
        """Let the scheduler read a step's output; return vLLM's ``EngineCoreOutputs`` by client."""
        outputs: dict[int, Any] = self.scheduler.update_from_output(scheduled, combined)
        return outputs

    def status(self, request_id: str) -> str:
        """Return vLLM's status of a request, or "gone"."""
        request = self.scheduler.requests.get(request_id)
        return "gone" if request is None else request.status.name

    @property
    def free_blocks(self) -> int:
        """Return how many KV cache blocks are free: one less than there are when nothing holds any."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def held_blocks(self) -> int:
        """Return how many KV cache blocks requests or connectors hold; 0 once all is over."""
        return self.scheduler.kv_cache_config.num_blocks - 1 - self.free_blocks
