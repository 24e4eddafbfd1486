"""Copy blocks through pinned chunks: for pageable host memory, or blocks of many small pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvobs.blocks.accelerator import SLOTS, Device
from kvobs.blocks.host import copy_runs
from kvobs.blocks.plans import Part, chunks_of
from kvobs.blocks.runs import Ids, Run, find_runs
from kvobs.blocks.strides import Layer, host_view, packed, tensor_view


class Staging:
    """Two pinned chunks and one device chunk, allocated on first use and reused."""

    def __init__(self, device: Device, chunk_bytes: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._pinned: list[torch.Tensor] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def to_device(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids) -> None:
        """Queue everything; the source may change at return."""
        device = self._device
        # The order within chunks is free: sorted by host ids the runs are longest.
        order = np.argsort(src_ids, kind="stable")
        runs_of, ids = _runs_by_part(src_ids[order]), device.upload(dst_ids[order])
        src_views = [host_view(layer.src, layer.layout.src, layer.layout.unit) for layer in layers]
        dst_views = [tensor_view(layer.dst, layer.layout.dst, layer.layout.unit) for layer in layers]
        for slot, chunk in self._chunks(layers, len(order)):
            pinned = self._pinned[slot]
            device.wait(slot)  # until then its bytes are still being copied, possibly by an earlier call
            for part in chunk:
                copy_runs(src_views[part.layer], _packed(pinned, part, layers).numpy(), runs_of(part))
            used = _used(chunk, layers)
            device.copy(pinned[:used], self._memory[:used])
            device.record(slot)
            for part in chunk:
                blocks = _packed(self._memory, part, layers)
                device.scatter(blocks, ids[part.first : part.last], dst_views[part.layer])

    def to_host(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids) -> None:
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
            used = _used(chunk, layers)
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


def _runs_by_part(host_ids: Ids) -> Callable[[Part], list[Run]]:
    """Return a function that finds a part's runs from host memory into a chunk; layers mostly share them."""
    known: dict[tuple[int, int], list[Run]] = {}

    def runs_of(part: Part) -> list[Run]:
        key = part.first, part.last
        if key not in known:
            known[key] = find_runs(host_ids[part.first : part.last], np.arange(part.last - part.first))
        return known[key]

    return runs_of


def _packed(memory: torch.Tensor, part: Part, layers: Sequence[Layer]) -> torch.Tensor:
    return packed(memory, part.offset, part.last - part.first, layers[part.layer].layout)


def _used(chunk: Sequence[Part], layers: Sequence[Layer]) -> int:
    last = chunk[-1]
    return last.offset + (last.last - last.first) * layers[last.layer].layout.block_bytes
