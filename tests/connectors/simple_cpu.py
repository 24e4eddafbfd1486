"""vLLM's SimpleCPUOffloadConnector, all real but for CUDA: its streams, events and batched copies."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.simple_kv_offload import worker as simple_worker

from tests.connectors.memory import BLOCK, HEADS, LAYERS, PAGE_BYTES, WIDTH, Memory, Truth, page_is_right
from tests.connectors.plug import Plug, entries
from tests.connectors.servers.cpu import Event


class SimpleCPU(Plug):
    """Eager saves, as by default."""

    connector = "SimpleCPUOffloadConnector"
    is_lazy = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backends: list[Copies] = []

    def options(self) -> dict[str, Any]:
        return {"cpu_bytes_to_use": 60 * PAGE_BYTES * len(LAYERS), "lazy_offload": self.is_lazy}

    def install(self, patch: Any) -> None:
        cuda = SimpleNamespace(Stream=_Stream, current_stream=lambda: None)
        stand_in = SimpleNamespace(cuda=cuda, Event=_Event, empty=torch.empty, zeros=torch.zeros, int8=torch.int8)
        patch.setattr(simple_worker, "torch", stand_in)
        patch.setattr(simple_worker, "PIN_MEMORY", False)
        patch.setattr(simple_worker, "DmaCopyBackend", Copies)

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        super().attach_worker(connector, memory, truth, rank)
        handler = connector.worker_handler
        make = handler._init_cpu_mode

        def init(*args: Any) -> None:
            make(*args)
            handler._backend.plug = self
            self.backends.append(handler._backend)

        handler._init_cpu_mode = init

    def attach_scheduler(self, connector: Any) -> None:
        super().attach_scheduler(connector)
        manager = connector.scheduler_manager
        complete, reset = manager._process_store_completion, manager.reset

        def completed(gpu_blocks: list[int], cpu_blocks: list[int], *args: Any) -> None:
            for gpu_block, cpu_block in zip(gpu_blocks, cpu_blocks, strict=True):
                block_hash = manager._gpu_block_pool.blocks[gpu_block].block_hash
                values = self.truth.by_hash[bytes(get_block_hash(block_hash))]
                for backend in self.backends:
                    page = backend.host_page(cpu_block)
                    self.check_store(page_is_right(page, values), f"host block {cpu_block} under the wrong tokens")
            complete(gpu_blocks, cpu_blocks, *args)

        def cleared() -> bool:
            self.cleared += 1
            return reset()

        manager._process_store_completion, manager.reset = completed, cleared

    def leftovers(self) -> list[str]:
        manager = self.on_scheduler.scheduler_manager
        books = [
            *("_pending_cpu_hits", "_reqs_to_load", "_reqs_to_store", "_load_event_to_reqs", "_store_event_to_blocks"),
            *("_store_event_to_reqs", "_pending_finished_stores", "_in_flight_store_gpu_blocks"),
            "_store_event_pending_counts",
        ]
        left = entries(manager, *books)
        pool = manager.cpu_block_pool
        left += [f"host block {b.block_id} is pinned" for b in pool.blocks if b.ref_cnt and not b.is_null]
        return left + [f"{len(b.pending)} copies" for b in self.backends if b.pending]


class LazySimpleCPU(SimpleCPU):
    """Saves what is about to be evicted."""

    is_lazy = True


class Copies:
    """Stands for the batched CUDA copies; each is made when it is due, or waited for."""

    plug: SimpleCPU

    def __init__(self) -> None:
        self.pending: list[_Event] = []

    def init(self, gpu_caches: dict[str, Any], cpu_caches: dict[str, Any], *_: Any) -> None:
        self.gpu, self.cpu = gpu_caches, cpu_caches

    def launch_copy(
        self, src_blocks: Any, dst_blocks: Any, *, is_store: bool, event_idx: int, events_list: Any, **_: Any
    ) -> None:
        self.plug.may_fail("store" if is_store else "load")
        event = _Event()
        event.copies, event.what = self, (src_blocks, dst_blocks, is_store)
        earlier = [other.due for other in self.pending if other.what[2] == is_store]
        event.due = max([self.plug.now + self.plug.delay(), *earlier])  # a stream is in order
        self.pending.append(event)
        events_list.append((event_idx, event))

    def run(self, event: "_Event") -> None:
        if event not in self.pending:
            return
        self.pending.remove(event)
        src_blocks, dst_blocks, is_store = event.what
        source, target = (self.gpu, self.cpu) if is_store else (self.cpu, self.gpu)
        for name in source:
            target[name][dst_blocks] = source[name][src_blocks]
        self.plug.loaded += not is_store

    def host_page(self, block: int) -> Any:
        return [self.cpu[layer][block].view(torch.float32).view(HEADS, BLOCK, WIDTH).numpy() for layer in LAYERS]


class _Stream(SimpleNamespace):
    """Stands for torch.cuda.Stream."""

    priority_range = staticmethod(lambda: (0, 0))


class _Event(Event):
    """Stands for torch.Event; those that a copy made know when it is done."""

    copies: Copies | None = None
    due = 0
    what: Any = None

    def query(self) -> bool:
        if self.copies is not None and self.due <= self.copies.plug.now:
            self.copies.run(self)
            return True
        return self.copies is None

    def synchronize(self, *_: Any) -> None:
        if self.copies is not None:
            self.copies.run(self)
