"""Copies of blocks between host memory and a CUDA device: right ones first, then how long they take.

    python tests/bench/copying_cuda.py

Needs torch and numpy; takes vLLM's copies where it is installed. Prints a table in Markdown. Exit status: 0, 1 where a
copy went wrong, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvobs.blocks.copy import copy_kv_blocks

Caches: TypeAlias = dict[str, torch.Tensor]
Copy: TypeAlias = Callable[[Caches, Caches, list[int], list[int], str], None]

LAYERS = 8
BLOCK_KIB = (1, 4, 16, 24, 28, 64, 256, 2048)
BLOCKS = (2, 4, 8, 64, 512, 1024)  # 16 to 8,192 pieces
MOST_BYTES = 2 << 30
ROUNDS, WARM_UP = 7, 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)
BUSY_CYCLES = 50_000_000  # some tens of milliseconds


class Case(NamedTuple):
    """One line of the table."""

    direction: str
    pinned: bool
    block_kib: int
    blocks: int
    run: int

    @property
    def size(self) -> int:
        return LAYERS * self.blocks * self.block_kib << 10

    @property
    def cache_blocks(self) -> int:
        return self.blocks + max(8, self.blocks // 4)


class Times(NamedTuple):
    """Milliseconds, medians."""

    host: float
    device: float


def cases() -> list[Case]:
    """Return every size that fits: blocks scattered, and once in runs."""
    sizes = [(kib, blocks, 1) for kib in BLOCK_KIB for blocks in BLOCKS] + [(kib, 512, 8) for kib in BLOCK_KIB]
    found = itertools.starmap(
        Case, ((way, pin, *size) for way in ("d2h", "h2d") for pin in (False, True) for size in sizes)
    )
    return [case for case in found if case.size <= MOST_BYTES]


def row(case: Case, kvobs: Times, stock: Times, link: Times) -> str:
    """Return a line of the table; speeds and ratios are those of the host's time."""
    cells = [
        case.direction,
        "pinned" if case.pinned else "pageable",
        f"{case.block_kib} KiB",
        f"{case.blocks}" if case.run == 1 else f"{case.blocks} in runs of {case.run}",
        *(f"{number:.3f}" for number in (kvobs.host, kvobs.device, stock.host, stock.device, link.host)),
        f"{case.size / kvobs.host / 1e6:.1f}",
        f"{kvobs.host / link.host:.2f}",
        f"{stock.host / kvobs.host:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADINGS = (
    *("direction", "host memory", "block", "blocks"),
    *("kvobs ms", "on the device", "stock ms", "on the device", "link ms"),
    *("kvobs GB/s", "kvobs / link", "stock / kvobs"),
)


def ids_of(rng: random.Random, case: Case) -> list[int]:
    begins = rng.sample(range(case.cache_blocks // case.run), case.blocks // case.run)
    return [begin * case.run + i for begin in begins for i in range(case.run)]


def layouts(dtype: torch.dtype, blocks: int) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield caches of random bytes, and which dimension counts the blocks."""

    def cache(*shape: int) -> torch.Tensor:
        of_last = shape[-1] * torch.empty((), dtype=dtype).element_size()
        return torch.randint(0, 256, (*shape[:-1], of_last), dtype=torch.uint8).view(dtype)

    yield "small blocks", cache(blocks, 3, 5), 0
    yield "large blocks", cache(blocks, 2, 16, 8, 128), 0
    yield "keys and values first", cache(2, blocks, 16, 8, 128), 1
    yield "heads and tokens swapped", cache(blocks, 2, 16, 8, 64).transpose(2, 3), 0
    yield "gaps between blocks", cache(blocks, 2, 4096)[:, 0], 0
    yield "gaps in blocks", cache(blocks, 64, 48)[..., :40], 0


def like(cache: torch.Tensor, *, device: str | torch.device, pinned: bool = False) -> torch.Tensor:
    """Return a cache that lies in the same way somewhere else."""
    there = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device, pin_memory=pinned)
    return there.copy_(cache)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().cpu().view(torch.uint8)


def wrong_copies(device: torch.device) -> list[str]:
    """Copy everything once, while the device is busy, and return what did not arrive."""
    wrong = []
    rng = random.Random(1)
    for dtype, direction, pinned in itertools.product(DTYPES, ("d2h", "h2d"), (False, True)):
        arrives = _d2h_arrives if direction == "d2h" else _h2d_arrives
        for blocks in (5, 300):
            for (name, src, dim), (_, dst, _) in zip(layouts(dtype, blocks), layouts(dtype, blocks), strict=True):
                ids = list(zip(*(rng.choices(range(blocks), k=blocks) for _ in range(2)), strict=True))
                for lies, there in (("alike", dst), ("packed", dst.contiguous())):
                    if not arrives(Pair(src, there, ids, dim), pinned, device):
                        memory = "pinned" if pinned else "pageable"
                        wrong.append(f"{direction} of {blocks} blocks, {name}, {lies}, {dtype}, {memory}")
    return wrong


class Pair(NamedTuple):
    """Two caches in host memory, and what is to be copied; some destinations are named twice."""

    src: torch.Tensor
    dst: torch.Tensor
    ids: list[tuple[int, int]]
    block_dim: int

    def expected(self) -> torch.Tensor:
        expected = like(self.dst, device="cpu")
        for src, dst in self.ids:
            expected.select(self.block_dim, dst).copy_(self.src.select(self.block_dim, src))
        return bits(expected)

    def copy(self, src: torch.Tensor, dst: torch.Tensor, direction: str) -> None:
        src_ids, dst_ids = [first for first, _ in self.ids], [to for _, to in self.ids]
        copy_kv_blocks({"a": src}, {"a": dst}, src_ids, dst_ids, direction, block_dim=self.block_dim)


def _d2h_arrives(pair: Pair, pinned: bool, device: torch.device) -> bool:
    here, live = like(pair.dst, device="cpu", pinned=pinned), _on_the_way(pair.src, device)
    pair.copy(live, here, "d2h")
    arrived = bits(here).clone()
    live.zero_()
    return torch.equal(arrived, pair.expected())


def _h2d_arrives(pair: Pair, pinned: bool, device: torch.device) -> bool:
    here, live = like(pair.src, device="cpu", pinned=pinned), _on_the_way(pair.dst, device)
    pair.copy(here, live, "h2d")
    here.zero_()
    read = live.clone()  # the caller's next kernel
    return torch.equal(bits(read), pair.expected())


def _on_the_way(cache: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a cache on the device that its stream writes only after a while."""
    written = like(cache, device=device)
    live = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device).zero_()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    return live.copy_(written)


def stock_copy() -> tuple[str, Copy]:
    """Return vLLM's function, or its statements where it isn't installed."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks as stock
        from vllm.platforms import current_platform
    except ImportError:
        return "vLLM's statements, vLLM isn't installed", _stock_statements
    if not current_platform.is_cuda_alike():
        return "vLLM's statements, this vLLM isn't for CUDA", _stock_statements
    return "vLLM's copy_kv_blocks", stock


def _stock_statements(src: Caches, dst: Caches, src_ids: list[int], dst_ids: list[int], direction: str) -> None:
    devices = [next(iter(caches.values())).device for caches in (src, dst)]
    src_indices, dst_indices = (
        torch.tensor(ids, device=at) for ids, at in zip((src_ids, dst_ids), devices, strict=True)
    )
    for name, cache in src.items():
        dst[name][dst_indices] = cache[src_indices].to(devices[1])


def measure(case: Case, host: torch.Tensor, far: torch.Tensor, stock: Copy) -> str:
    """Return a case's line; `host` and `far` are the memory to copy between."""
    rng = random.Random(case.size)
    sides = [_cut(case, memory) for memory in (host, far)]
    src, dst = sides if case.direction == "h2d" else reversed(sides)
    flat = torch.empty(case.size, dtype=torch.uint8, pin_memory=True), far[: case.size]
    flat_src, flat_dst = flat if case.direction == "h2d" else flat[::-1]
    ways: dict[str, Callable[[list[int], list[int]], object]] = {
        "kvobs": lambda src_ids, dst_ids: copy_kv_blocks(src, dst, src_ids, dst_ids, case.direction),
        "stock": lambda src_ids, dst_ids: stock(src, dst, src_ids, dst_ids, case.direction),
        "link": lambda *_: flat_dst.copy_(flat_src, non_blocking=True),
    }
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for turn in range(WARM_UP + ROUNDS):
        src_ids, dst_ids = ids_of(rng, case), ids_of(rng, case)
        for name in rng.sample(list(ways), len(ways)):
            taken = _timed(ways[name], src_ids, dst_ids)
            if turn >= WARM_UP:
                times[name].append(taken)
    kvobs, stock_times, link = (Times(*map(statistics.median, zip(*taken, strict=True))) for taken in times.values())
    return row(case, kvobs, stock_times, link)


def _cut(case: Case, memory: torch.Tensor) -> Caches:
    block = case.block_kib << 10
    length = case.cache_blocks * block
    parts = (memory[layer * length : (layer + 1) * length] for layer in range(LAYERS))
    return {str(layer): part.view(torch.bfloat16).view(case.cache_blocks, -1) for layer, part in enumerate(parts)}


def _timed(way: Callable[[list[int], list[int]], object], src_ids: list[int], dst_ids: list[int]) -> Times:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    marks[0].record()
    way(src_ids, dst_ids)
    marks[1].record()
    torch.cuda.synchronize()
    return Times((time.perf_counter() - begin) * 1e3, marks[0].elapsed_time(marks[1]))


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to copy to or from", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if wrong := wrong_copies(device):
        print(*(f"wrong bytes: {copy}" for copy in wrong), sep="\n", file=sys.stderr)
        return 1
    name, stock = stock_copy()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {LAYERS} layers. Stock: {name}.")
    print("Link: one contiguous copy of as many bytes of pinned memory. Every copy arrived.\n")
    print(f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}", sep="\n")
    room = max(LAYERS * case.cache_blocks * case.block_kib << 10 for case in cases())
    far = torch.empty(room, dtype=torch.uint8, device=device)
    for pinned in (False, True):
        host = torch.ones(room, dtype=torch.uint8, pin_memory=pinned)
        for case in cases():
            if case.pinned == pinned:
                print(measure(case, host, far, stock), flush=True)
        del host
    return 0


if __name__ == "__main__":
    sys.exit(main())
