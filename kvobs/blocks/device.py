"""Copy blocks between host memory and a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import numpy as np
import torch

from kvobs.blocks.layout import Ids, Layer, Run, copy_runs, find_runs, host_view, packed, tensor_view
from kvobs.blocks.plans import CHUNK_BYTES, CopyPath, Part, choose, chunks_of, pieces_of, pointers

BatchedCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes addresses to copy from, addresses to copy to, and numbers of bytes."""

SLOTS = 2
"""One chunk travels while the host reads or fills the other."""


class Device:
    """A CUDA device with a side stream: copies, gathers and scatters are queued there, and run later, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marks = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self.batched_copy = _batched_copy()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order the following copies after the current stream's queued work and before its later work."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    def synchronize(self) -> None:
        """Wait until everything queued has run."""
        self._side.synchronize()

    def record(self, slot: int) -> None:
        """Mark this point of the queue."""
        self._marks[slot].record(self._side)

    def wait(self, slot: int) -> None:
        """Wait until the slot's last mark is reached, if it has one."""
        self._marks[slot].synchronize()

    def is_pinned(self, cache: torch.Tensor) -> bool:
        """Return whether the device can access this host memory directly."""
        return cache.is_pinned()

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


class Copier:
    """Copies to and from one device, one call at a time.

    Pageable host memory, and blocks of many small pieces, are copied through two pinned chunks and one device chunk,
    which are allocated on first use and reused.
    """

    def __init__(self, device: Device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._pinned: list[torch.Tensor] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()  # children also copy from their own threads

    def copy(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids, direction: str) -> None:
        """Copy blocks; at return the host may read the destination of a "d2h" and change the source of an "h2d"."""
        device, to_device = self._device, direction == "h2d"
        runs = find_runs(src_ids, dst_ids)
        # Caches made in inference mode can't be written outside of it.
        with self._lock, torch.inference_mode():
            pinned = all(device.is_pinned(layer.src if to_device else layer.dst) for layer in layers)
            path = choose(layers, runs, pinned=pinned, batched=device.batched_copy is not None)
            try:
                with device.ordered():
                    if path is CopyPath.STAGED:
                        (self._to_device if to_device else self._to_host)(layers, src_ids, dst_ids)
                    elif device.batched_copy and path is CopyPath.BATCH:
                        for addresses in pointers(layers, runs):
                            device.batched_copy(*map(torch.from_numpy, addresses))
                    else:
                        self._one_by_one(layers, runs)
            except BaseException:
                device.synchronize()  # queued copies use buffers that the next call fills
                raise
            if path is not CopyPath.STAGED:
                device.synchronize()  # it reads or writes the caller's host memory

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
        runs_of, ids = _runs_by_part(src_ids[order]), device.upload(dst_ids[order])
        src_views = [host_view(layer.src, layer.layout.src, layer.layout.unit) for layer in layers]
        dst_views = [tensor_view(layer.dst, layer.layout.dst, layer.layout.unit) for layer in layers]
        for slot, chunk in self._chunks(layers, len(order)):
            pinned, used = self._pinned[slot], chunk[-1].end
            device.wait(slot)  # until then its bytes are still being copied, possibly by an earlier call
            for part in chunk:
                copy_runs(src_views[part.layer], _packed(pinned, part, layers).numpy(), runs_of(part))
            device.copy(pinned[:used], self._memory[:used])
            device.record(slot)
            for part in chunk:
                blocks = _packed(self._memory, part, layers)
                device.scatter(blocks, ids[part.first : part.last], dst_views[part.layer])

    def _to_host(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids) -> None:
        """Queue everything and wait for it; the host unpacks a chunk while the next one is copied."""
        device = self._device
        order = np.argsort(dst_ids, kind="stable")
        runs_of, ids = _runs_by_part(dst_ids[order]), device.upload(src_ids[order])
        src_views = [tensor_view(layer.src, layer.layout.src, layer.layout.unit) for layer in layers]
        dst_views = [host_view(layer.dst, layer.layout.dst, layer.layout.unit) for layer in layers]

        def unpack(slot: int, chunk: Sequence[Part]) -> None:
            device.wait(slot)
            for part in chunk:
                runs = [Run(dst, src, length) for src, dst, length in runs_of(part)]
                copy_runs(_packed(self._pinned[slot], part, layers).numpy(), dst_views[part.layer], runs)

        travelling: tuple[int, Sequence[Part]] | None = None
        for slot, chunk in self._chunks(layers, len(order)):
            for part in chunk:
                blocks = _packed(self._memory, part, layers)
                device.gather(src_views[part.layer], ids[part.first : part.last], blocks)
            used = chunk[-1].end
            device.copy(self._memory[:used], self._pinned[slot][:used])
            device.record(slot)
            if travelling:
                unpack(*travelling)
            travelling = slot, chunk
        if travelling:
            unpack(*travelling)

    def _chunks(self, layers: Sequence[Layer], blocks: int) -> list[tuple[int, list[Part]]]:
        """Return the chunks with their slots; both buffers are large enough at return."""
        block_bytes = [layer.layout.block_bytes for layer in layers]
        size = max(self._chunk_bytes, *block_bytes)
        if len(self._memory) < size:  # torch keeps memory of an earlier copy until the stream has passed it
            self._pinned = [self._device.pinned(size) for _ in range(SLOTS)]
            self._memory = self._device.memory(size)
        return [(number % SLOTS, chunk) for number, chunk in enumerate(chunks_of(block_bytes, blocks, size))]


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
