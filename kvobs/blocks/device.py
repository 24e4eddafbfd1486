"""Copy blocks between host memory and a CUDA device."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from kvobs.blocks.layout import Ids, Layer, Run, copy_runs, find_runs, host_view, packed, tensor_view
from kvobs.blocks.plans import CHUNK_BYTES, CopyPath, Has, Part, choose, chunks_of, pieces_of, pointers

BatchedCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes addresses to copy from, addresses to copy to, and numbers of bytes."""

SLOTS = 2
"""One chunk travels while the other is read or filled, by the host and by the device."""

_KERNEL_BYTES = 8192  # of a piece in one step of the kernel, as in vLLM


class Device:
    """A CUDA device with a side stream for each slot: copies, gathers and scatters are queued there, and run later.

    The work of one stream runs in order, that of two may run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: list[Any] = [torch.cuda.Stream(device) for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._marks: list[Any] = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._is_pinned: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # by the tensor's id, while it lives
        self.batched_copy, self.kernel_copy = _batched_copy(), _kernel_copy()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order what is queued within after the current stream's queued work and before its later work."""
        current = self._current()
        for side in self._sides:
            side.wait_stream(current)
        try:
            yield
        finally:
            for side in self._sides:
                current.wait_stream(side)

    def on(self, slot: int) -> AbstractContextManager[Any]:
        """Queue on this slot's stream; memory that is allocated within belongs to that stream."""
        return torch.cuda.stream(self._sides[slot])

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def synchronize(self) -> None:
        """Wait until everything queued has run."""
        for side in self._sides:
            side.synchronize()

    def record(self, slot: int) -> None:
        """Mark this point of the slot's stream."""
        self._marks[slot].record(self._sides[slot])

    def wait(self, slot: int) -> None:
        """Wait until the slot's last mark is reached, if it has one."""
        self._marks[slot].synchronize()

    def is_pinned(self, cache: torch.Tensor) -> bool:
        """Return whether the device can access this host memory directly; the driver is asked once for a tensor."""
        known = self._is_pinned.get(id(cache))
        if known is None:
            # A C function: what Python code raises at an object's end is lost, also an exception of a signal's handler.
            lives = weakref.ref(cache, partial(self._is_pinned.pop, id(cache)))
            known = self._is_pinned[id(cache)] = lives, cache.is_pinned()
        return known[1]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def upload(self, ids: Ids) -> torch.Tensor:
        """Queue a copy of ids to the device; they may change at return."""
        # torch keeps the pinned copy until this stream is past it.
        return torch.from_numpy(ids).pin_memory().to(self._device, non_blocking=True)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue one copy from or to pinned memory."""
        dst.copy_(src, non_blocking=True)

    def gather(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue `dst[i] = src[ids[i]]`."""
        torch.index_select(src, 0, ids, out=dst)

    def scatter(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue `dst[ids[i]] = src[i]`."""
        dst.index_copy_(0, ids, src)


def _batched_copy() -> BatchedCopy | None:
    """Return vLLM's operation, where there is one built for CUDA."""
    try:
        from vllm import _custom_ops
        from vllm.platforms import current_platform
    except ImportError:
        return None
    return getattr(_custom_ops, "swap_blocks_batch", None) if current_platform.is_cuda_alike() else None


def _kernel_copy() -> BatchedCopy | None:
    """Return vLLM's Triton kernel behind the interface of the batched copy, where its kernels can read host memory."""
    try:
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.kv_offload.cpu.swap_blocks_triton import swap_blocks_batch
    except ImportError:
        return None
    if not (HAS_TRITON and current_platform.is_cuda()):
        return None

    def kernel_copy(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
        at_once = min(1 << (int(sizes.max()) - 1).bit_length(), _KERNEL_BYTES)
        # vLLM copies them to the device; from pageable memory the host would wait for what is queued.
        swap_blocks_batch(*torch.stack((src, dst, sizes)).pin_memory(), bytes_per_chunk=at_once)

    return kernel_copy


class Copier:
    """Copies to and from one device, one call at a time.

    Pageable host memory, and many small pieces, are copied through a pinned chunk and a device chunk for each slot,
    which are allocated once and reused.
    """

    def __init__(self, device: Device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._pinned: list[torch.Tensor] = []
        self._memory: list[torch.Tensor] = []
        self._lock = threading.Lock()  # children also copy from their own threads

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Allocate the chunks for blocks of these layers, where they aren't large enough yet."""
        with self._lock, torch.inference_mode():
            self._allocate([layer.layout.block_bytes for layer in layers])

    def copy(
        self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids, direction: str, *, source_stays: bool = False
    ) -> None:
        """Copy blocks; at return the host may read the destination of a "d2h".

        It may change the source of an "h2d", unless `source_stays`.
        """
        device, to_device = self._device, direction == "h2d"
        runs = find_runs(src_ids, dst_ids)
        # Caches made in inference mode can't be written outside of it.
        with self._lock, torch.inference_mode():
            pinned = all(device.is_pinned(layer.src if to_device else layer.dst) for layer in layers)
            has = Has(batch=device.batched_copy is not None, kernel=device.kernel_copy is not None)
            path = choose(layers, runs, direction, pinned=pinned, has=has)
            try:
                with device.ordered():
                    if path is CopyPath.STAGED:
                        (self._to_device if to_device else self._to_host)(layers, src_ids, dst_ids)
                    else:
                        with device.on(0):
                            self._directly(path, layers, runs)
            except BaseException:
                device.synchronize()  # queued copies use buffers that the next call fills
                raise
            if path is not CopyPath.STAGED and not (to_device and source_stays):
                device.synchronize()  # it reads or writes the caller's host memory

    def _directly(self, path: CopyPath, layers: Sequence[Layer], runs: Sequence[Run]) -> None:
        operation = self._device.kernel_copy if path is CopyPath.KERNEL else self._device.batched_copy
        if operation is None:
            self._one_by_one(layers, runs)
            return
        for addresses in pointers(layers, runs):
            operation(*map(torch.from_numpy, addresses))

    def _one_by_one(self, layers: Sequence[Layer], runs: Sequence[Run]) -> None:
        for layer in layers:
            element_size = layer.src.element_size()
            for columns in zip(*(column.tolist() for column in pieces_of(layer.layout, runs)), strict=True):
                src, dst, size = (number // element_size for number in columns)
                self._device.copy(_piece(layer.src, src, size), _piece(layer.dst, dst, size))

    def _to_device(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids) -> None:
        """Queue everything; the source may change at return."""
        device = self._device
        # The order within chunks is free: sorted by host ids the runs are longest.
        order = np.argsort(src_ids, kind="stable")
        runs_of, chunks = _runs_by_part(src_ids[order]), self._chunks(layers, len(order))
        ids = self._upload(dst_ids[order], len(chunks))
        src_views = [host_view(layer.src, layer.layout.src, layer.layout.unit) for layer in layers]
        dst_views = [tensor_view(layer.dst, layer.layout.dst, layer.layout.unit) for layer in layers]
        for number, chunk in enumerate(chunks):
            slot, used = number % SLOTS, chunk[-1].end
            pinned, memory = self._pinned[slot], self._memory[slot]
            device.wait(slot)  # until then its bytes are still being copied, possibly by an earlier call
            for part in chunk:
                copy_runs(src_views[part.layer], _packed(pinned, part, layers).numpy(), runs_of(part))
            with device.on(slot):
                device.copy(pinned[:used], memory[:used])
                device.record(slot)
                for part in chunk:
                    blocks = _packed(memory, part, layers)
                    device.scatter(blocks, ids[slot][part.first : part.last], dst_views[part.layer])

    def _to_host(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids) -> None:
        """Queue everything and wait for it; the host unpacks a chunk while the next one is copied."""
        device = self._device
        order = np.argsort(dst_ids, kind="stable")
        runs_of, chunks = _runs_by_part(dst_ids[order]), self._chunks(layers, len(order))
        ids = self._upload(src_ids[order], len(chunks))
        src_views = [tensor_view(layer.src, layer.layout.src, layer.layout.unit) for layer in layers]
        dst_views = [host_view(layer.dst, layer.layout.dst, layer.layout.unit) for layer in layers]

        def unpack(slot: int, chunk: Sequence[Part]) -> None:
            device.wait(slot)
            for part in chunk:
                runs = [Run(dst, src, length) for src, dst, length in runs_of(part)]
                copy_runs(_packed(self._pinned[slot], part, layers).numpy(), dst_views[part.layer], runs)

        travelling: tuple[int, Sequence[Part]] | None = None
        for number, chunk in enumerate(chunks):
            slot, used = number % SLOTS, chunk[-1].end
            memory = self._memory[slot]
            with device.on(slot):
                for part in chunk:
                    blocks = _packed(memory, part, layers)
                    device.gather(src_views[part.layer], ids[slot][part.first : part.last], blocks)
                device.copy(memory[:used], self._pinned[slot][:used])
                device.record(slot)
            if travelling:
                unpack(*travelling)
            travelling = slot, chunk
        if travelling:
            unpack(*travelling)

    def _upload(self, ids: Ids, chunks: int) -> list[torch.Tensor]:
        """Return the ids on the device, for each slot that these chunks need: each stream uses its own memory."""
        uploaded = []
        for slot in range(min(chunks, SLOTS)):
            with self._device.on(slot):
                uploaded.append(self._device.upload(ids))
        return uploaded

    def _chunks(self, layers: Sequence[Layer], blocks: int) -> list[list[Part]]:
        """Return the chunks, which take the slots in turns; the buffers are large enough at return."""
        block_bytes = [layer.layout.block_bytes for layer in layers]
        return chunks_of(block_bytes, blocks, self._allocate(block_bytes))

    def _allocate(self, block_bytes: Sequence[int]) -> int:
        size = max(self._chunk_bytes, *block_bytes)
        if not self._memory or len(self._memory[0]) < size:
            # torch keeps memory of an earlier copy until its stream has passed it.
            self._pinned = [self._device.pinned(size) for _ in range(SLOTS)]
            self._memory = [self._memory_of(slot, size) for slot in range(SLOTS)]
        return size

    def _memory_of(self, slot: int, size: int) -> torch.Tensor:
        with self._device.on(slot):
            return self._device.memory(size)


@cache
def copier_of(device: torch.device) -> Copier:
    """Return the one copier of a CUDA device."""
    return Copier(Device(device))


def _runs_by_part(host_ids: Ids) -> Callable[[Part], list[Run]]:
    """Return a function that finds a part's runs from host memory into a chunk; layers mostly share them."""

    @cache
    def runs_between(first: int, last: int) -> list[Run]:
        return find_runs(host_ids[first:last], np.arange(last - first))

    return lambda part: runs_between(part.first, part.last)


def _packed(memory: torch.Tensor, part: Part, layers: Sequence[Layer]) -> torch.Tensor:
    return packed(memory[part.offset : part.end], layers[part.layer].layout)


def _piece(cache: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    return cache.as_strided((length,), (1,), cache.storage_offset() + begin)
