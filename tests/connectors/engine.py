"""A rig around real connectors, whose model is arithmetic on real KV tensors.

A step calls the hooks in the order of vLLM's V1 or V2 model runner: a synchronous load before the forward, everything
else after its launch.
"""

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvobs.testing import Rig, Script
from tests.connectors.memory import BLOCK, LAYERS, Memory, Truth, cache_config
from tests.connectors.plug import Plug, entries
from tests.support.rig import entry_for


class Engine(Rig):
    """An engine whose connectors are real connectors, one for each plug; its worker is a V1 or V2 model runner.

    Prompts with more tokens than the ``budget`` of a step are prefilled in chunks.
    """

    def __init__(
        self, router: str, plugs: list[Plug], *, blocks: int = 26, budget: int = 50, is_v2: bool = False, **more: Any
    ) -> None:
        self.plugs, self.is_v2, self._budget = plugs, is_v2, budget
        self.truth, self.memories = Truth(), dict[Any, Memory]()  # by worker
        more.setdefault("connectors", [plug.config() for plug in plugs])
        super().__init__(router, blocks=blocks, **more)
        self.scheduler.use_v2_model_runner = is_v2
        for plug, connector in zip(plugs, connectors_of(self.connector), strict=True):
            plug.attach_scheduler(connector)
        self.steps = 0
        self.wrong_uses: list[str] = []  # KV that was read by a forward and was not what it had to be
        self._wrong: dict[str, tuple[int, int]] = {}  # in this step: request -> first wrong position, its block
        self._reported: set[int] = set()

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        return cache_config(blocks)

    def _configure(self, config: Any) -> None:
        config.cache_config.kv_cache_layout = "LBHNC"
        scheduler = config.scheduler_config
        scheduler.disable_hybrid_kv_cache_manager = not KVConnectorFactory.supports_hma_config(
            config.kv_transfer_config
        )
        scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = self._budget
        scheduler.max_num_seqs, scheduler.enable_chunked_prefill = 4, True

    def _build_worker(self, cls: Any, config: Any, caches: KVCacheConfig) -> Any:
        memory = Memory(caches.num_blocks)
        config.compilation_config.static_forward_context = memory.layers
        worker = super()._build_worker(cls, config, caches)
        self.memories[worker] = memory
        for plug, connector in zip(self.plugs, connectors_of(worker), strict=True):
            plug.attach_worker(connector, memory, self.truth, config.parallel_config.rank)
        worker.register_kv_caches(memory.kv_caches)
        return worker

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def step(self) -> Any:
        self.steps += 1
        for plug in self.plugs:
            plug.tick()
        self._wrong.clear()
        self._reported.clear()
        output = super().step()
        self.wrong_uses += [
            f"step {self.steps}: {request_id} reads wrong KV from token {position} on"
            for request_id, (position, block) in self._wrong.items()
            if block not in self._reported  # else vLLM is about to compute it anew
        ]
        return output

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        requests = {request_id: self.scheduler.requests[request_id] for request_id in scheduled.num_scheduled_tokens}
        for request in requests.values():
            self.truth.learn(request)
        return {
            request_id: [(request.num_tokens * 7 + request.all_token_ids[0]) % 250]
            if request.num_computed_tokens >= request.num_tokens
            else []
            for request_id, request in requests.items()
        }

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> Any:
        output = super()._work(worker, scheduled, samples)
        self._reported |= output.kv_connector_output.invalid_block_ids or set()
        return output

    def _forward(self, worker: Any, scheduled: Any) -> None:
        """Call the hooks as a model runner does, and compute what is scheduled."""
        memory = self.memories[worker]
        context = SimpleNamespace(
            attn_metadata=dict.fromkeys(LAYERS),
            no_compile_layers=memory.layers,
        )
        if scheduled.has_sync_kv_loads:
            worker.start_load_kv(context)
        if scheduled.total_num_scheduled_tokens:
            for layer in LAYERS:
                worker.wait_for_layer_load(layer)
            self._compute(memory, scheduled)
            for layer in LAYERS:
                worker.save_kv_layer(layer, memory.kv_caches[layer], None)
        if self.is_v2:
            worker.finish_forward()
        if not scheduled.has_sync_kv_loads:
            worker.start_load_kv(context)
        worker.wait_for_save()

    def _compute(self, memory: Memory, scheduled: Any) -> None:
        begins = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request, begin = self.scheduler.requests[request_id], begins[request_id]
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            bad = memory.forward(block_ids, request.all_token_ids[: begin + count], begin)
            if bad is not None:
                self._wrong[request_id] = (bad, block_ids[bad // BLOCK])


class Beside(Rig):
    """A rig of a real connector that moves no KV, and of others, which come after or before it."""

    def __init__(self, router: str, entry: dict[str, Any], *others: Any, is_first: bool, **more: Any) -> None:
        entries = [entry_for(other) if isinstance(other, Script) else other for other in others]
        super().__init__(router, connectors=[entry, *entries] if is_first else [*entries, entry], **more)
        self._place = 0 if is_first else len(entries)

    def real(self, router: Any) -> Any:
        """Return the connector in the scheduler's router, or in a worker's."""
        return connectors_of(router)[self._place]

    def left_in(self, owner: Any, *books: str) -> list[str]:
        """Return what is left in an idle engine: requests, blocks, and entries of these books."""
        held = [f"{self.held_blocks} blocks"] if self.held_blocks else []
        return entries(owner, *books) + list(self.scheduler.requests) + held


def connectors_of(connector: Any) -> list[Any]:
    """Return a router's connectors, in order, and a nested router's in its place."""
    found: list[Any] = []
    for sub_connector in connector._connectors:
        found += connectors_of(sub_connector) if hasattr(sub_connector, "_connectors") else [sub_connector]
    return found
