"""Copy blocks between host memory and a CUDA device, with torch's own operations and through one pinned buffer."""

import threading
from collections.abc import Sequence
from functools import lru_cache

import torch

from kvobs.blocks.layout import Ids, Layer, packed, tensor_view

BUFFER_BYTES = 8 << 20
"""Enough for the link's full speed; a block that is larger has a buffer of its size."""

_LOCK = threading.Lock()  # of the buffer: connectors also copy from their own threads


def copy_staged(layers: Sequence[Layer], src_ids: Ids, dst_ids: Ids, direction: str) -> None:
    """Copy as many blocks at a time as the buffer holds, layer by layer.

    Torch queues each step on the device's current stream, and returns from a copy to or from the device when that is
    complete. So the buffer is free at the next step, "d2h" is complete at return, and so is all but the last step of
    "h2d", the device's own.
    """
    with _LOCK, torch.inference_mode():  # torch may refuse to write caches that were made in this mode outside of it
        src_on, dst_on = layers[0].src.device, layers[0].dst.device
        sources, destinations = torch.from_numpy(src_ids).to(src_on), torch.from_numpy(dst_ids).to(dst_on)
        is_pinned = "cuda" in (src_on.type, dst_on.type)
        buffer = _buffer(max(BUFFER_BYTES, *(layer.layout.block_bytes for layer in layers)), is_pinned=is_pinned)
        for _, src, dst, layout in layers:
            from_blocks = tensor_view(src, layout.src, layout.unit)
            to_blocks = tensor_view(dst, layout.dst, layout.unit)
            at_once = len(buffer) // layout.block_bytes
            for some, to in zip(torch.split(sources, at_once), torch.split(destinations, at_once), strict=True):
                staged = packed(buffer[: len(some) * layout.block_bytes], layout)
                if direction == "h2d":
                    torch.index_select(from_blocks, 0, some, out=staged)
                else:
                    staged.copy_(from_blocks.index_select(0, some))
                to_blocks.index_copy_(0, to, staged.to(dst_on))


@lru_cache(maxsize=1)
def _buffer(size: int, *, is_pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
