"""Copy blocks with vLLM's Triton kernel in Triton's interpreter, on a CPU, and compare every byte."""
# ruff: noqa: E402 - vLLM's module takes Triton as it is when that is imported

import os
from itertools import product
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language
import vllm.platforms
import vllm.triton_utils

# vLLM for CPUs puts placeholders there, even where Triton is installed.
vllm.triton_utils.triton, vllm.triton_utils.tl, vllm.triton_utils.HAS_TRITON = triton, triton.language, True

from vllm.v1.kv_offload.cpu import swap_blocks_triton

from kvobs.blocks.device import _kernel_copy
from tests.support.device_copies import h2d, on
from tests.support.lazy_device import LazyDevice

SIZES = (8, 24, 1000, 4096, 8192, 8200, 28664)  # bytes of a piece
SHAPES = [((24,), 0, 0), ((24,), 16, 0), ((2, 24), 0, 1)]  # of blocks, the gap after each, which dimension counts them
IDS = [[(i * 5 % 24, i * 7 % 24) for i in range(20)], [((i + 9) % 24, i) for i in range(24)]]  # scattered, in runs

to: Any = torch.Tensor.to
with (
    patch.object(
        torch.Tensor, "to", lambda self, *a, **how: self.clone() if a[:1] == ("cuda",) else to(self, *a, **how)
    ),
    patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
    patch.object(type(vllm.platforms.current_platform), "is_cuda", lambda _: True),
    patch.object(swap_blocks_triton, "MIN_N", 1),  # below, it is vLLM's batched copy
):
    assert type(swap_blocks_triton._swap_blocks_kernel).__name__ == "InterpretedFunction"
    kernel: Any = _kernel_copy()
    for size, (blocks, gap, dim), ids in product(SIZES, SHAPES, IDS):
        device, shape = LazyDevice(pinned=True, kernel=kernel), (*blocks, size + gap)
        src, dst = ({"a": torch.randint(0, 256, shape, dtype=torch.uint8)[..., :size]} for _ in range(2))
        with on(device, small_piece=1 << 30, _MANY_PIECES=1):
            h2d(device, src, dst, ids, {"a": dim})()
        assert device.calls == ["kernel"]
    # What it can't do, and so is never asked to: the last bytes of a piece that isn't of whole words.
    piece, copied = torch.arange(12, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    kernel(*(torch.tensor([number]) for number in (piece.data_ptr(), copied.data_ptr(), 12)))
    assert copied.tolist() == [*range(8), 0, 0, 0, 0]
