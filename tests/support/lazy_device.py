"""A device in host memory that does everything as late as it may, or at once: who forgets to wait gets wrong bytes."""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
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
        self.done = 0

    def queue(self, work: Callable[[], object]) -> None:
        mode = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(mode):
                work()

        self._work.append(run)
        if self._eager:
            self.synchronize()

    def wait_stream(self, other: "Stream") -> None:
        until = other.queued
        self.queue(lambda: other.run(until))

    @property
    def queued(self) -> int:
        return len(self._work)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self._work[self.done - 1]()

    def synchronize(self) -> None:
        self.run(self.queued)


class Mark:
    """A point of a stream."""

    def __init__(self) -> None:
        self.synchronize: Callable[[], None] = lambda: None

    def record(self, stream: Stream) -> None:
        self.synchronize = partial(stream.run, stream.queued)


def move(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy bytes between addresses, in no order that anybody could rely on."""
    for triple in reversed(list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))):
        ctypes.memmove(*triple)


class LazyDevice(Device):
    """The device's memory is host memory that only queued work may touch, and only that of the stream it belongs to.

    Freed pinned memory is garbage at once, but for what `copy` has queued: of that torch knows, not of bare addresses.
    """

    def __init__(
        self, *, eager: bool = False, pinned: bool = False, batched: bool = False, kernel: BatchedCopy | None = None
    ) -> None:
        self.current = Stream(eager)
        self._sides = [Stream(eager) for _ in range(SLOTS)]
        self._marks = [Mark() for _ in range(SLOTS)]
        self.batched_copy: BatchedCopy | None = self._batched_copy if batched else None
        self.kernel_copy: BatchedCopy | None = partial(self._kernel_copy, kernel) if kernel else None
        self.calls: list[str] = []
        self.allocated = 0
        self._all_pinned = pinned
        self._owners: dict[int, Stream | str] = {}  # by the address of an allocation
        self._stream = self.current
        self._is_ordered = False

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with super().ordered():
            self._is_ordered = True
            yield
        self._is_ordered = False

    @contextmanager
    def on(self, slot: int) -> Iterator[None]:
        self._stream = self._sides[slot]
        yield
        self._stream = self.current

    def _current(self) -> Stream:
        return self.current

    def is_pinned(self, cache: torch.Tensor) -> bool:
        return self._all_pinned

    def pinned(self, size: int) -> torch.Tensor:
        self.allocated += size
        return self._new(size, "pinned")

    def memory(self, size: int) -> torch.Tensor:
        self.allocated += size
        return self._new(size, self._stream)

    def _new(self, size: int, owner: Stream | str) -> torch.Tensor:
        assert owner is not self.current, "allocated on the caller's own stream"
        kept = np.full(size, GARBAGE, dtype=np.uint8)
        handed_out = kept.view()  # lives as long as any tensor of this memory
        self._owners[kept.ctypes.data] = owner
        weakref.finalize(handed_out, self._free, kept)
        return torch.from_numpy(handed_out)

    def _free(self, kept: Any) -> None:
        if self._owners.pop(kept.ctypes.data) == "pinned":
            kept.fill(GARBAGE)

    def upload(self, ids: Ids) -> torch.Tensor:
        there, here = self._new(ids.nbytes, self._stream).view(torch.int64), torch.from_numpy(ids.copy())
        self._queue("upload", lambda: there.copy_(here), there)
        return there

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        assert self._all_pinned or "pinned" in map(self._owner, (src, dst)), "the host waits for pageable memory"
        self._queue("copy", lambda: dst.copy_(src), src, dst)

    def gather(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        self._queue("gather", lambda: torch.index_select(src, 0, ids, out=dst), src, ids, dst)

    def scatter(self, src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> None:
        self._queue("scatter", lambda: dst.index_copy_(0, ids, src), src, ids, dst)

    def _batched_copy(self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
        assert all(column.dtype == torch.int64 and column.is_cpu for column in (src, dst, sizes))
        assert len(src) == len(dst) == len(sizes) <= plans.BATCH_PIECES
        columns = [column.clone() for column in (src, dst, sizes)]
        self._queue("batch", lambda: move(*columns))

    def _kernel_copy(self, kernel: BatchedCopy, *columns: torch.Tensor) -> None:
        assert not any((column % 8).any() for column in columns), "it copies whole words"
        copied = [column.clone() for column in columns]
        self._queue("kernel", lambda: kernel(*copied))

    def _owner(self, cache: torch.Tensor) -> Stream | str | None:
        return self._owners.get(cache.untyped_storage().data_ptr())

    def _queue(self, call: str, work: Callable[[], object], *caches: torch.Tensor) -> None:
        assert self._is_ordered, "queued before or after the block that orders it"
        assert self._stream is not self.current, "queued on the caller's own stream"
        owners = {self._owner(cache) for cache in caches} - {None, "pinned"}
        assert owners <= {self._stream}, "memory of another stream, which may be in use there"
        self.calls.append(call)
        self._stream.queue(work)
