"""Connectors that keep files, or fill KV by themselves: vLLM's examples, of which nothing is stood in for, and HF3FS.

Of HF3FS the client of its metadata server is a stand-in, and CUDA and the threads of its transfers.
"""

import tempfile
from concurrent.futures import Future
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs import hf3fs_connector

from tests.connectors.memory import BLOCK, LAYERS, Memory, Truth, chain, page_is_right
from tests.connectors.plug import Plug, entries


class Example(Plug):
    """Saves whole prompts into files, and loads them synchronously."""

    connector = "ExampleConnector"

    @cached_property
    def tag(self) -> str:
        return tempfile.mkdtemp(prefix="kvobs-example-")

    def options(self) -> dict[str, Any]:
        return {"shared_storage_path": self.tag}

    def install(self, patch: Any) -> None:
        save = ExampleConnector.save_kv_layer
        if hasattr(save, "is_ours"):
            return

        def saved(connector: Any, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
            save(connector, layer_name, kv_layer, attn_metadata, **kwargs)
            for request in connector._get_connector_metadata().requests:
                if request.is_store and layer_name == LAYERS[0]:
                    slots, values = request.slot_mapping, chain(request.token_ids.tolist())
                    held = kv_layer[slots // BLOCK, 0, slots % BLOCK, 0].tolist()
                    Example.by_tag[connector._storage_path].check_store(
                        held == values[: len(held)], f"{len(held)} tokens"
                    )

        saved.is_ours = True  # type: ignore[attr-defined]
        patch.setattr(ExampleConnector, "save_kv_layer", saved)

    def leftovers(self) -> list[str]:
        return entries(self.on_scheduler, "_requests_need_load")


class DecodeBench(Plug):
    """Fills the KV of every prompt with made-up values: what is computed with it is wrong on purpose."""

    connector = "DecodeBenchConnector"
    is_a_lie = True

    def leftovers(self) -> list[str]:
        return entries(self.on_scheduler.connector_scheduler, "_filled_requests", "_pending_fills")


class HF3FS(Plug):
    """One connector with its own file system; the system made last gets the next connector."""

    connector = "HF3FSKVConnector"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pages: dict[str, Any] = {}
        self.transfers: list[tuple[int, Any]] = []

    def install(self, patch: Any) -> None:
        silent = SimpleNamespace(signal=lambda *_: None, SIGINT=0, SIGTERM=0, SIGQUIT=0)
        patch.setattr(hf3fs_connector, "signal", silent)
        patch.setattr(hf3fs_connector, "atexit", SimpleNamespace(register=lambda _: None))
        patch.setattr(hf3fs_connector, "Hf3fsMetadataClient", lambda: Metadata(self))
        patch.setattr(hf3fs_connector, "AsyncOperationManager", Operations)
        patch.setattr(hf3fs_connector.HF3FSKVConnector, "_setup_storage_clients", _no_clients)

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        super().attach_worker(connector, memory, truth, rank)
        connector.plug, connector.memory = self, memory

    def tick(self) -> None:
        super().tick()
        transfers, self.transfers = self.transfers, []
        for due, run in transfers:
            if due <= self.now:
                run()
            else:
                self.transfers.append((due, run))

    def leftovers(self) -> list[str]:
        left = entries(self.on_scheduler, "_scheduling_states")
        for worker in self.workers.values():
            left += entries(worker._async_manager, "_save_futures", "_load_futures", "_pending_finished_requests")
        return left


def _no_clients(connector: Any) -> None:
    connector._rank, connector._clients = 0, []


class Metadata:
    """Stands for the client of the metadata server."""

    def __init__(self, plug: HF3FS) -> None:
        self.plug = plug

    def initialize(self, *_: Any, **__: Any) -> None:
        """Know of no ranks."""

    def batch_key_exists(self, keys: list[str]) -> list[bool]:
        self.plug.may_fail("exists")
        return [key in self.plug.pages for key in keys]


class Operations(hf3fs_connector.AsyncOperationManager):
    """Its transfers, without CUDA streams and threads."""

    def __init__(self, connector: Any) -> None:
        self._connector, self.plug, self.memory = connector, connector.plug, connector.memory
        self._save_futures: dict[str, list[Future[Any]]] = {}
        self._load_futures: dict[str, Future[Any]] = {}
        self._pending_finished_requests: set[str] = set()
        self.hf3fs_stats = hf3fs_connector.HF3FSKVConnectorStats()

    def submit_save_operation(self, request_id: str, block_ids: list[int], block_hashes: list[str]) -> Future[Any]:
        self.plug.may_fail("save")
        places = self._places(request_id, block_hashes)
        future = self._submit(lambda: self._save(request_id, block_ids, places))
        self._save_futures.setdefault(request_id, []).append(future)
        return future

    def submit_load_operation(self, request_id: str, block_ids: list[int], block_hashes: list[str]) -> Future[Any]:
        self.plug.may_fail("load")
        future = self._submit(lambda: self._load(block_ids, block_hashes))
        self._load_futures[request_id] = future
        return future

    def _submit(self, run: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.plug.transfers.append((self.plug.now + self.plug.delay(), lambda: future.set_result(run())))
        return future

    def _places(self, request_id: str, block_hashes: list[str]) -> list[tuple[str, list[int]]]:
        """Return each block's name and what it must hold."""
        requests = self._connector._get_connector_metadata().requests
        token_ids = next(r.token_ids for r in requests if r.request_id == request_id and r.save_block_op)
        values = chain(token_ids)
        order = self._connector._generate_block_hashes(token_ids, 0)
        return [(h, values[order.index(h) * BLOCK : (order.index(h) + 1) * BLOCK]) for h in block_hashes]

    def _save(self, request_id: str, block_ids: list[int], places: list[tuple[str, list[int]]]) -> None:
        for block, (name, values) in zip(block_ids, places, strict=False):
            page = self.memory.page(block)
            self.plug.check_store(page_is_right(page, values), f"{request_id}: block {block} as {name[:8]}")
            self.plug.pages.setdefault(name, page)

    def _load(self, block_ids: list[int], block_hashes: list[str]) -> None:
        self.plug.loaded += 1
        for block, name in zip(block_ids, block_hashes, strict=False):
            self.memory.put(block, self.plug.pages[name])
