"""vLLM's MooncakeStoreConnector, all real but for the store's handle, CUDA's event, threads and sockets."""

import ctypes
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler as store_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker

from tests.connectors.memory import BLOCK, HEADS, LAYERS, WIDTH, Memory, Truth, page_is_right
from tests.connectors.plug import Plug, entries
from tests.connectors.servers.cpu import Event


class MooncakeStore(Plug):
    """A store of its own; its lookups answer at once, as by default."""

    connector = "MooncakeStoreConnector"
    is_lookup_async = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: dict[str, bytes] = {}
        self.lookups: list[tuple[int, Future[Any], Any]] = []
        self.due: list[int] = []

    def options(self) -> dict[str, Any]:
        return {"lookup_rpc_port": self.tag, "lookup_async": self.is_lookup_async}

    def install(self, patch: Any) -> None:
        module = ModuleType("mooncake.store")
        module.MooncakeDistributedStore = Handle  # type: ignore[attr-defined]
        module.ReplicateConfig = SimpleNamespace  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
        patch.setitem(sys.modules, "mooncake.store", module)
        sizes = {"global_segment_size": 0, "local_buffer_size": 0}
        config = SimpleNamespace(mode="embedded", enable_offload=False, tenant_id="", **sizes)
        patch.setattr(store_worker.MooncakeStoreConfig, "load_from_config", lambda *_: config)
        patch.setattr(store_worker, "setup_mooncake_store", lambda *_: None)
        one = SimpleNamespace(world_size=1, rank_in_group=0)
        patch.setattr(store_worker, "get_pcp_group", lambda: one)
        patch.setattr(store_worker, "get_dcp_group", lambda: one)
        patch.setattr(store_worker, "get_tensor_model_parallel_rank", lambda: 0)
        patch.setattr(store_worker, "get_tensor_model_parallel_world_size", lambda: 1)
        patch.setattr(store_worker, "LookupKeyServer", lambda *_: SimpleNamespace(close=lambda: None))
        patch.setattr(store_worker.KVTransferThread, "start", lambda thread: thread.ready_event.set())
        patch.setattr(store_worker.torch.cuda, "Event", Event)
        patch.setattr(store_scheduler, "LookupKeyClient", _client)

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        super().attach_worker(connector, memory, truth, rank)
        connector.connector_worker.store.plug = self

    def tick(self) -> None:
        """Let each of the store's threads do what it would have done in a step."""
        super().tick()
        for worker in (connector.connector_worker for connector in self.workers.values()):
            for thread in (worker.kv_send_thread, worker.kv_recv_threads[0]):
                for _ in range(self.random.choice((0, 1, 1, 3))):
                    if not thread.request_queue.empty():
                        thread._handle_request(thread.request_queue.get())
        waiting, self.lookups = self.lookups, []
        for due, future, call in waiting:
            if due > self.now:
                self.lookups.append((due, future, call))
            elif future.set_running_or_notify_cancel():
                _finish(future, call)

    def submit(self, call: Any) -> Future[Any]:
        """Stand for the lookup client's one thread."""
        future: Future[Any] = Future()
        if self.is_lookup_async:
            self.lookups.append((self.now + self.delay(), future, call))
        else:
            _finish(future, call)
        return future

    def lookup(self, num_tokens: int, block_hashes: Any) -> Any:
        self.may_fail("lookup")
        return self.workers[0].connector_worker.lookup(num_tokens, block_hashes)

    def reset(self) -> bool:
        self.cleared += 1
        self.keys.clear()
        return True

    def leftovers(self) -> list[str]:
        scheduler = self.on_scheduler.connector_scheduler
        books = ("load_specs", "_request_trackers", "_unfinished_requests", "_unfinished_request_ids", "_pinned_saves")
        left = entries(scheduler, *books) + entries(scheduler.client, "futures")
        for worker in (connector.connector_worker for connector in self.workers.values()):
            threads = (worker.kv_send_thread, *worker.kv_recv_threads)
            left += entries(worker.kv_send_thread, "stored_requests")
            left += [f"{thread.name} has work" for thread in threads if thread.request_queue.qsize()]
        return left


class AsyncMooncakeStore(MooncakeStore):
    """With lookups that say "not yet"."""

    is_lookup_async = True


def _client(vllm_config: Any) -> Any:
    """Make the real lookup client without its socket and its thread."""
    plug = MooncakeStore.of(vllm_config, "lookup_rpc_port")
    client = object.__new__(store_worker.LookupKeyClient)
    client.futures, client.executor = {}, SimpleNamespace(submit=lambda call, *args: plug.submit(lambda: call(*args)))
    client._lookup, client._reset = plug.lookup, plug.reset
    client.socket = SimpleNamespace(close=lambda **_: None)
    return client


def _finish(future: Future[Any], call: Any) -> None:
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


class Handle:
    """Stands for MooncakeDistributedStore: reads and writes the engine's memory by address."""

    plug: MooncakeStore

    def register_buffer(self, address: int, length: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.plug.keys) for key in keys]

    def batch_put_from_multi_buffers(self, keys: Any, addresses: Any, sizes: Any, config: Any) -> list[int]:
        plug = self.plug
        plug.may_fail("put")
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            data = b"".join(ctypes.string_at(place, length) for place, length in zip(places, lengths, strict=True))
            page = np.frombuffer(data, dtype=np.float32).reshape(len(LAYERS), HEADS, BLOCK, WIDTH)
            values = plug.truth.by_hash[bytes.fromhex(key.rsplit("@", 1)[-1])]
            plug.check_store(page_is_right(page, values), f"key {key[-12:]}")
            plug.keys[key] = data
        return [sum(lengths) for lengths in sizes]

    def batch_get_into_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        plug, results = self.plug, []
        plug.loaded += 1
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            if plug.random.random() < plug.fail_rate:
                results.append(-1)
                continue
            data, begin = plug.keys[key], 0
            for place, length in zip(places, lengths, strict=True):
                ctypes.memmove(place, data[begin : begin + length], length)
                begin += length
            results.append(begin)
        return results

    def remove_all(self, force: bool = False) -> int:
        return int(self.plug.reset())

    def close(self) -> int:
        return 0
