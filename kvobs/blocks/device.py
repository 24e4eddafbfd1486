"""Copy blocks between host memory and a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import torch

from kvobs.blocks.accelerator import Cuda, Device
from kvobs.blocks.plans import CHUNK_BYTES, CopyPath, choose, pieces_of, pointers
from kvobs.blocks.runs import Ids, Run, find_runs
from kvobs.blocks.staging import Staging
from kvobs.blocks.strides import Layer


class Copier:
    """Copies to and from one device, one call at a time."""

    def __init__(self, device: Device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._staging = Staging(device, chunk_bytes)
        self._lock = threading.Lock()  # children also copy from their own threads

    def copy(self, layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids, direction: str) -> None:
        """Copy blocks; at return the host may read the destination of a "d2h" and change the source of an "h2d"."""
        device, to_device = self._device, direction == "h2d"
        runs = find_runs(src_ids, dst_ids)
        # Caches made in inference mode can't be written outside of it.
        with self._lock, torch.inference_mode():
            pinned = all(device.is_pinned(layer.src if to_device else layer.dst) for layer in layers)
            path = choose(layers, runs, pinned=pinned, batched=device.batched_copy is not None)
            staged = self._staging.to_device if to_device else self._staging.to_host
            try:
                with device.ordered():
                    if path is CopyPath.STAGED:
                        staged(layers, src_ids, dst_ids)
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


@cache
def copier_of(device: torch.device) -> Copier:
    """Return the one copier of a CUDA device."""
    return Copier(Cuda(device))


def _piece(cache: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    return cache.as_strided((length,), (1,), cache.storage_offset() + begin)
