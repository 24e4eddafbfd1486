"""LMCache's in-process connector: both its sides are real, its cache engine and its lookup client stand-ins.

Its loads are synchronous: they are made before the forward of the step that needs them.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tests.connectors.memory import BLOCK, Memory, Truth, chain, page_is_right
from tests.connectors.plug import Plug, entries, held

CHUNK = 2 * BLOCK


class LMCacheV1(Plug):
    """One connector with a cache of its own."""

    connector = "LMCacheConnectorV1"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chunks: dict[tuple[int, ...], list[Any]] = {}
        self.answers: dict[str, int] = {}  # request -> tokens found, until it is allocated
        self.pins: set[str] = set()
        self.given_up: set[str] = set()  # ended with a lookup that nobody used: LMCache leaves these to time

    def options(self) -> dict[str, Any]:
        return {**super().options(), "lmcache.chunk_size": CHUNK, "lmcache.save_unfull_chunk": False}

    def install(self, patch: Any) -> None:
        adapter: Any = import_module("lmcache.integration.vllm.vllm_v1_adapter")

        patch.setattr(adapter, "LMCacheManager", _manager)
        patch.setattr(adapter, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))

    def attach_scheduler(self, connector: Any) -> None:
        super().attach_scheduler(connector)
        impl = connector._lmcache_engine
        finished = impl.request_finished

        def request_finished(request: Any, block_ids: list[int]) -> Any:
            if request.request_id in self.answers:
                self.given_up.add(request.request_id)
            return finished(request, block_ids)

        impl.request_finished = request_finished

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        super().attach_worker(connector, memory, truth, rank)
        connector._lmcache_engine.lmcache_engine.memory = memory

    # The lookup client

    def lookup_cache(self, lookup_id: str) -> int:
        return self.answers.get(lookup_id, -1)

    def lookup(self, token_ids: Any, lookup_id: str, request_configs: Any = None) -> int:
        self.may_fail("lookup")
        found = held(self.chunks, token_ids, step=CHUNK)
        if found:
            self.pins.add(lookup_id)
        self.answers[lookup_id] = found
        return found

    def clear_lookup_status(self, lookup_id: str) -> None:
        self.answers.pop(lookup_id, None)

    def supports_producer_reuse(self) -> bool:
        return True

    def leftovers(self) -> list[str]:
        impl = self.on_scheduler._lmcache_engine
        left = entries(impl, "_unfinished_requests", "_request_trackers")
        left += [f"load_specs: {request}" for request in impl.load_specs if request not in self.given_up]
        left += [f"answer for {request}" for request in self.answers if request not in self.given_up]
        return left + [f"pins of {request}" for request in sorted(self.pins - self.given_up)]


def _manager(config: Any, factory: Any, connector: Any) -> Any:
    """Stand for LMCacheManager, which would start the engine or the lookup client."""
    plug = LMCacheV1.of(connector._vllm_config)
    is_worker = connector._role.name == "WORKER"
    return SimpleNamespace(
        start_services=lambda: None,
        stop_services=lambda: None,
        post_init=lambda: None,
        lmcache_engine=Store(plug) if is_worker else None,
        lmcache_engine_metadata=None,
        lookup_client=None if is_worker else plug,
        lookup_server=None,
    )


class Store:
    """Stands for LMCacheEngine in a worker."""

    memory: Memory

    def __init__(self, plug: LMCacheV1) -> None:
        self.plug = plug

    def store(self, tokens: list[int], mask: Any, slot_mapping: Any, req_id: str, **_: Any) -> None:
        self.plug.may_fail("store")
        values, first = chain(tokens), int((~mask).sum())
        for begin in range(first, len(tokens) - CHUNK + 1, CHUNK):
            blocks = (slot_mapping[begin : begin + CHUNK : BLOCK] // BLOCK).tolist()
            pages = [self.memory.page(block) for block in blocks]
            for index, page in enumerate(pages):
                at = begin + index * BLOCK
                what = f"{req_id}: tokens {at} to {at + BLOCK}"
                self.plug.check_store(page_is_right(page, values[at : at + BLOCK]), what)
            self.plug.chunks.setdefault(tuple(tokens[: begin + CHUNK]), pages)

    def retrieve(self, tokens: list[int], mask: Any, slot_mapping: Any, **_: Any) -> Any:
        self.plug.may_fail("retrieve")
        got, first = torch.zeros(len(tokens), dtype=torch.bool), int((~mask).sum())
        if self.plug.random.random() < self.plug.fail_rate:
            return got  # of which LMCache makes blocks with load errors
        self.plug.loaded += 1
        for begin in range(first, len(tokens) - CHUNK + 1, CHUNK):
            blocks = (slot_mapping[begin : begin + CHUNK : BLOCK] // BLOCK).tolist()
            for block, page in zip(blocks, self.plug.chunks[tuple(tokens[: begin + CHUNK])], strict=True):
                self.memory.put(block, page)
            got[begin : begin + CHUNK] = True
        return got

    def lookup_unpin(self, request_id: str) -> None:
        self.plug.pins.discard(request_id)

    def get_kv_events(self) -> list[Any]:
        return []
