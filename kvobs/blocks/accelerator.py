"""The device operations that block copies need, and their CUDA implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

import torch

from kvobs.blocks.runs import Ids

BatchedCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes addresses to copy from, addresses to copy to, and numbers of bytes."""

SLOTS = 2
"""One chunk travels while the host reads or fills the other."""


class Device(Protocol):
    """A device with a side stream: copies, gathers and scatters are queued there, and run later, in order."""

    @property
    def batched_copy(self) -> BatchedCopy | None:
        """Queue many copies at once, if there is such an operation."""

    def ordered(self) -> AbstractContextManager[None]:
        """Order the following copies after the current stream's queued work and before its later work."""

    def synchronize(self) -> None:
        """Wait until everything queued has run."""

    def record(self, slot: int) -> None:
        """Mark this point of the queue."""

    def wait(self, slot: int) -> None:
        """Wait until the slot's last mark is reached, if it has one."""

    def is_pinned(self, cache: torch.Tensor) -> bool:
        """Return whether the device can access this host memory directly."""

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate pinned host memory of this many bytes."""

    def memory(self, size: int) -> torch.Tensor:
        """Allocate device memory of this many bytes."""

    def upload(self, ids: Ids) -> torch.Tensor:
        """Queue a copy of ids to the device; they may change at return."""

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue one copy from or to pinned memory."""

    def gather(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue `dst[i] = src[ids[i]]`."""

    def scatter(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        """Queue `dst[ids[i]] = src[i]`."""


class Cuda:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marks = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self.batched_copy = _batched_copy()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    def synchronize(self) -> None:
        self._side.synchronize()

    def record(self, slot: int) -> None:
        self._marks[slot].record(self._side)

    def wait(self, slot: int) -> None:
        self._marks[slot].synchronize()

    def is_pinned(self, cache: torch.Tensor) -> bool:
        return cache.is_pinned()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def upload(self, ids: Ids) -> torch.Tensor:
        # torch keeps the pinned copy until this stream is past it.
        return torch.from_numpy(ids).pin_memory().to(self._device, non_blocking=True)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def gather(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        torch.index_select(src, 0, ids, out=dst)

    def scatter(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        dst.index_copy_(0, ids, src)


def _batched_copy() -> BatchedCopy | None:
    """Return vLLM's operation, where there is one built for CUDA."""
    try:
        from vllm import _custom_ops
        from vllm.platforms import current_platform
    except ImportError:
        return None
    return getattr(_custom_ops, "swap_blocks_batch", None) if current_platform.is_cuda_alike() else None
