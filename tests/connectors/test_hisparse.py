"""HiSparse beside a sibling that loads asynchronously: its coordinator is given the end of every load.

On vLLM's real scheduler its connector, its coordinator and its KV cache managers are the real ones. The KV cache groups
are those that vLLM lays out for a model with sparse attention; the worker, which is CUDA, has a stand-in that
acknowledges each transfer some steps after it was ordered, and host copies at once.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as hisparse
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.hisparse.coordinator import HiSparseCoordinator, get_hisparse_coordinator

from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector, rig
from tests.connectors.engine import Beside
from tests.connectors.plug import Idle, Wire

ROUTERS = ["stock", "kvobs"]
FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
HOST_BLOCKS = 96  # more than the longest prompt needs
TRANSFER_STEPS = 2


def cache_config(blocks: int, groups: int = 1) -> kv.KVCacheConfig:
    """Return the groups of a model with sparse attention: host source, indexer, resident pages, hot region."""
    shared: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.float32}
    source = kv.MLAAttentionSpec(**shared, head_size=64, cache_role=kv.SparseCacheRole.SPARSE)
    indexer = kv.MLAAttentionSpec(**shared, head_size=32, cache_role=kv.SparseCacheRole.INDEXER)
    resident = kv.HiSparseResidentSpec(block_size=BLOCK, page_size=source.page_size_bytes)
    hot = kv.HiSparseHotSpec(block_size=BLOCK, page_size=source.page_size_bytes, blocks_per_request=2)
    return kv.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            kv.KVCacheGroupSpec(["layer.0"], source, host_resident=True, role=kv.KVCacheGroupRole.HISPARSE_SOURCE),
            kv.KVCacheGroupSpec(["layer.0.indexer"], indexer, role=kv.KVCacheGroupRole.HISPARSE_INDEXER),
            kv.KVCacheGroupSpec(["layer.0.hisparse_resident"], resident, enable_kv_transfer=False),
            kv.KVCacheGroupSpec(["layer.0.hisparse_hot"], hot, enable_kv_transfer=False),
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
        self.ordered = [order.transfer_id for order in (metadata.command.page_transfers if metadata.command else [])]
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


def _live(router: str, seed: int, *, is_first: bool) -> tuple[dict[str, bool], Imports, list[str]]:
    """Run one random life: hits, loads that end or fail, aborts, preemptions, prompts that share a prefix.

    Returns:
        the loads that the sibling reported and whether each has failed, the coordinator's imports, what is left.
    """
    with pytest.MonkeyPatch.context() as patch:
        imports, sibling, rng = Imports(), Script("sibling"), random.Random(seed)
        imports.install(patch)
        engine = build(router, patch, sibling, is_first=is_first, blocks=44)
        due: list[tuple[int, str]] = []
        said: dict[str, bool] = {}
        seen = 0
        for step in range(260):
            if step < 150 and rng.random() < 0.3:
                name = f"r{step}"
                if rng.random() < 0.7:
                    sibling.offers[name] = [(BLOCK * rng.randint(1, 5), True), (0, False)]
                tokens = BLOCK * rng.randint(2, 8) + rng.choice((0, 1, 5))
                engine.add(name, tokens, rng.choice((1, 4, 30)), prompt_of=rng.choice(("a", "b", name)))
            live = sorted(engine.scheduler.requests)
            if live and rng.random() < 0.06:
                engine.abort(rng.choice(live))
            # One at a time: vLLM goes through a set, whose order no router promises.
            for at, name in [entry for entry in due if entry[0] <= step][:1]:
                due.remove((at, name))
                said[name] = rng.random() < 0.35
                sibling.say(0, **{"failed" if said[name] else "received": name})
            engine.step()
            loads = sibling.called("update_state_after_alloc")
            for name, tokens, _ in loads[seen:]:
                if tokens and name in engine.scheduler.requests and engine.status(name) == "WAITING_FOR_REMOTE_KVS":
                    due.append((step + rng.choice((1, 2, 5)), name))
            seen = len(loads)
        return said, imports, leftovers(engine)


@pytest.mark.parametrize("seed", [1, 2])
@FIRST
@pytest.mark.parametrize("router", ROUTERS)
def test_each_load_ends_once_and_nothing_is_left(router: str, is_first: bool, seed: int) -> None:
    said, imports, left = _live(router, seed, is_first=is_first)
    assert sorted(imports.ended) == sorted(said.items())
    assert set(said) == {name for name, _ in imports.recorded}
    assert set(said.values()) == {False, True}
    assert left == []


class Pull(Wire):
    """NIXL's worker on the decode side: a load is over two steps after it was ordered."""

    failing: frozenset[str] = frozenset()

    def __init__(self, *_: Any) -> None:
        self.now = 0
        self.ordered: list[tuple[int, str]] = []
        self.blocks: dict[str, Any] = {}

    def start_load_kv(self, meta: Any) -> None:
        self.now += 1
        for request, need in meta.reqs_to_recv.items():
            self.blocks[request] = need.local_block_ids
            self.ordered.append((self.now + 2, request))

    def get_transfer_results(self) -> KVConnectorTransferResults:
        done = {request for due, request in self.ordered if due <= self.now}
        self.ordered = [entry for entry in self.ordered if entry[1] not in done]
        return KVConnectorTransferResults(finished_recving=done, failed_recving=done & self.failing)


def _decode(engine: Rig, request: str) -> Any:
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": f"p-{request}"}
    params |= {"remote_host": "h", "remote_port": 1, "tp_size": 1, "remote_block_ids": [[7, 8, 9, 10, 11]] * 2}
    return engine.add(request, max_tokens=3, **params)


@FIRST
@pytest.mark.parametrize("router", ROUTERS)
def test_hisparse_is_given_the_ends_of_nixls_loads(
    router: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = Imports()
    imports.install(monkeypatch)
    monkeypatch.setattr(nixl_connector, "NixlPullConnectorWorker", Pull)
    monkeypatch.setattr(Pull, "failing", frozenset({"bad"}))
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    engine = build(router, monkeypatch, nixl, is_first=is_first)
    requests = {name: _decode(engine, name) for name in ("good", "bad")}
    engine.run(20)
    assert dict(imports.ended) == {"good": False, "bad": True}
    assert imports.ready == {"good": 4, "bad": 0}
    assert coordinator_of(engine)._pending_imports == {}
    assert [request.num_output_tokens for request in requests.values()] == [3, 3]
    assert leftovers(engine) == []
