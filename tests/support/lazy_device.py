"""A device in host memory that does everything as late as it may, or at once: who forgets to wait gets wrong bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvobs.blocks import plans
from kvobs.blocks.device import SLOTS, BatchedCopy, Device
from kvobs.blocks.layout import Ids

GARBAGE = 0xA5


class Stream:
    """Work in order, run when somebody waits for it."""

    def __init__(self, eager: bool) -> None:
        self._eager = eager
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def queue(self, work: Callable[[], object]) -> None:
        mode = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(mode):
                work()

        self._work.append(run)
        if self._eager:
            self.synchronize()

    def queue_wait(self, other: Stream) -> None:
        until = other.queued
        self.queue(lambda: other.run(until))

    @property
    def queued(self) -> int:
        return len(self._work)

    def run(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._work[self._done - 1]()

    def synchronize(self) -> None:
        self.run(self.queued)


class LazyDevice(Device):
    """The device's memory is host memory that only queued work may touch."""

    def __init__(self, *, eager: bool = False, pinned: bool = False, batched: bool = False) -> None:
        self.current = Stream(eager)
        self.side = Stream(eager)
        self.batched_copy: BatchedCopy | None = self._batched_copy if batched else None
        self.calls: list[str] = []
        self.allocated = 0
        self._all_pinned = pinned
        self._pinned: list[torch.Tensor] = []
        self._reached = [0] * SLOTS
        self._inside = False

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self.side.queue_wait(self.current)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self.current.queue_wait(self.side)

    def synchronize(self) -> None:
        self.side.synchronize()

    def record(self, slot: int) -> None:
        self._reached[slot] = self.side.queued

    def wait(self, slot: int) -> None:
        self.side.run(self._reached[slot])

    def is_pinned(self, cache: torch.Tensor) -> bool:
        return self._all_pinned

    def pinned(self, size: int) -> torch.Tensor:
        self._pinned.append(self.memory(size))
        return self._pinned[-1]

    def memory(self, size: int) -> torch.Tensor:
        self.allocated += size
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def upload(self, ids: Ids) -> torch.Tensor:
        there, here = torch.full((len(ids),), -1), torch.from_numpy(ids.copy())
        self._queue("upload", lambda: there.copy_(here))
        return there

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        chunks = {chunk.untyped_storage().data_ptr() for chunk in self._pinned}
        assert self._all_pinned or chunks & {cache.untyped_storage().data_ptr() for cache in (src, dst)}
        self._queue("copy", lambda: dst.copy_(src))

    def gather(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        self._queue("gather", lambda: torch.index_select(src, 0, ids, out=dst))

    def scatter(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        self._queue("scatter", lambda: dst.index_copy_(0, ids, src))

    def _batched_copy(self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
        assert all(column.dtype == torch.int64 and column.is_cpu for column in (src, dst, sizes))
        assert len(src) == len(dst) == len(sizes) <= plans.BATCH_PIECES
        triples = list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))
        # In no order that anybody could rely on.
        self._queue("batch", lambda: [ctypes.memmove(*triple) for triple in reversed(triples)])

    def _queue(self, call: str, work: Callable[[], object]) -> None:
        assert self._inside, "queued on the caller's own stream"
        self.calls.append(call)
        self.side.queue(work)
