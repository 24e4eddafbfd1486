"""What copying blocks within host memory takes, kvobs's against vLLM's own and against memcpy, in turns."""

from __future__ import annotations

import ctypes
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from kvobs.blocks.copy import copy_kv_blocks
from tests.bench.report import Budget, Line, Part

LAYERS, BLOCKS = 32, 640
BLOCK = (2, 16, 8, 128)
BLOCK_BYTES = 2 * 2 * 16 * 8 * 128

CASES = {  # blocks, in runs of so many, whether keys and values come first, rounds
    "1 block": (1, 1, False, 41),
    "8 blocks": (8, 1, False, 31),
    "64 blocks": (64, 1, False, 15),
    "512 blocks": (512, 1, False, 9),
    "512 blocks in runs of 8": (512, 8, False, 9),
    "512 blocks, keys and values first": (512, 1, True, 5),
}
MEMCPY_BUDGETS = {"512 blocks": Budget(1.3), "512 blocks in runs of 8": Budget(1.1)}
STOCK_BUDGETS = {"512 blocks": Budget(5, at_least=True), "512 blocks in runs of 8": Budget(10, at_least=True)}

Caches = dict[str, torch.Tensor]


def measure() -> Part:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        src = torch.randint(-(2**15), 2**15, (LAYERS, BLOCKS, *BLOCK), dtype=torch.int16).view(torch.bfloat16)
        dst = torch.ones_like(src)
        with stock_of_cuda() as stock:
            lines = [line for case in CASES for line in _lines(case, src, dst, stock)]
    finally:
        torch.set_num_threads(threads)
    return Part(f"Blocks of {BLOCK_BYTES >> 10} KiB copied in {LAYERS} layers, within host memory, one thread", lines)


@contextmanager
def stock_of_cuda() -> Iterator[Callable[..., None]]:
    """Yield vLLM's function with the statements its CUDA platform runs: the one for CPUs has none."""
    from vllm.distributed.kv_transfer.kv_connector import utils

    # The module of the CUDA platform wants vLLM's operations for CUDA, but not for these two statements.
    operations = types.ModuleType("vllm._C_stable_libtorch")
    with patch.dict(sys.modules, {operations.__name__: operations}):
        from vllm.platforms.cuda import CudaPlatformBase
    with patch.object(utils, "current_platform", CudaPlatformBase):
        yield utils.copy_kv_blocks


def stock_of_kv_first(src: Caches, dst: Caches, src_ids: list[int], dst_ids: list[int], direction: str) -> None:
    """Do what vLLM's statement would have to for these caches; it takes keys and values for blocks."""
    src_indices, dst_indices = torch.tensor(src_ids), torch.tensor(dst_ids)
    for layer, cache in src.items():
        dst[layer][:, dst_indices] = cache[:, src_indices].cpu()


def _lines(case: str, src: torch.Tensor, dst: torch.Tensor, stock: Callable[..., None]) -> list[Line]:
    blocks, run, kv_first, rounds = CASES[case]
    shape = (BLOCK[0], BLOCKS, *BLOCK[1:]) if kv_first else (BLOCKS, *BLOCK)
    from_caches, to_caches = ({str(i): layer.view(shape) for i, layer in enumerate(side)} for side in (src, dst))
    size = LAYERS * blocks * BLOCK_BYTES
    src_bytes, dst_bytes = src.view(torch.uint8).view(-1), dst.view(torch.uint8).view(-1)

    def by_kvobs(src_ids: list[int], dst_ids: list[int], begin: int) -> None:
        copy_kv_blocks(from_caches, to_caches, src_ids, dst_ids, "d2h", block_dim=1 if kv_first else 0)

    def by_stock(src_ids: list[int], dst_ids: list[int], begin: int) -> None:
        (stock_of_kv_first if kv_first else stock)(from_caches, to_caches, src_ids, dst_ids, "d2h")

    def by_torch(src_ids: list[int], dst_ids: list[int], begin: int) -> None:
        dst_bytes[begin : begin + size].copy_(src_bytes[begin : begin + size])

    def by_memmove(src_ids: list[int], dst_ids: list[int], begin: int) -> None:
        ctypes.memmove(dst_bytes.data_ptr() + begin, src_bytes.data_ptr() + begin, size)

    rng = random.Random(blocks * run)
    ways = [by_kvobs, by_stock, by_torch, by_memmove]
    times: dict[Callable[..., None], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        src_ids, dst_ids = _ids(rng, blocks, run), _ids(rng, blocks, run)
        for way in rng.sample(ways, len(ways)):
            # Each contiguous copy begins elsewhere: none may find its bytes in the cache.
            where = rng.randrange(0, src_bytes.numel() - size + 1, BLOCK_BYTES)
            begin = time.perf_counter()
            way(src_ids, dst_ids, where)
            times[way].append((time.perf_counter() - begin) * 1e3)
    memcpy = [min(pair) for pair in zip(times[by_torch], times[by_memmove], strict=True)]
    return [
        Line(f"{case}, against memcpy", "ms", times[by_kvobs], memcpy, MEMCPY_BUDGETS.get(case)),
        Line(f"{case}: stock, against kvobs", "ms", times[by_stock], times[by_kvobs], STOCK_BUDGETS.get(case)),
    ]


def _ids(rng: random.Random, blocks: int, run: int) -> list[int]:
    return [begin * run + i for begin in rng.sample(range(BLOCKS // run), blocks // run) for i in range(run)]
