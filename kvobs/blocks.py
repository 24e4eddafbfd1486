"""Copy blocks between two KV caches: everything checked before the first byte moves, runs of blocks in one go.

Needs torch and numpy only. On CPUs, numpy's views of wide integers come within a third of memcpy; advanced indexing, as
vLLM does it, makes a temporary of everything and takes five times as long or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Caches: TypeAlias = Mapping[str, torch.Tensor]  # layer name -> its cache
DIRECTIONS = ("h2d", "d2h")  # host to device, device to host

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = 8  # bytes


class Run(NamedTuple):
    """Blocks that lie one after the other on both sides."""

    src: int
    dst: int
    length: int


def copy_kv_blocks(
    src_kv_caches: Caches,
    dst_kv_caches: Caches,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: str,
    *,
    block_dim: int = 0,
) -> None:
    """Copy block ``src_block_ids[i]`` to block ``dst_block_ids[i]`` in every layer; complete at return.

    The same signature as vLLM's function of this name. Where a destination is named twice the last one counts; source
    and destination may share memory. Nothing is copied if anything is wrong.

    Args:
        src_kv_caches: a tensor for each layer, [blocks, ...] of any strides.
        dst_kv_caches: the same layers, shapes but for the number of blocks, and dtypes.
        src_block_ids: ids of blocks in the source.
        dst_block_ids: as many ids of blocks in the destination.
        direction: "h2d" or "d2h".
        block_dim: which dimension counts the blocks: 1 in tensors with keys and values first, [2, blocks, ...].

    Raises:
        ValueError: with what differs, and in which layer.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}, allowed: {', '.join(map(repr, DIRECTIONS))}")
    if len(src_block_ids) != len(dst_block_ids):
        raise ValueError(f"{len(src_block_ids)} source blocks can't go to {len(dst_block_ids)} destination blocks")
    if not len(src_block_ids):
        return
    src_ids, dst_ids = _ids("source", src_block_ids), _ids("destination", dst_block_ids)
    _check_layers(src_kv_caches, dst_kv_caches, block_dim)
    for side, caches, ids in (("source", src_kv_caches, src_ids), ("destination", dst_kv_caches, dst_ids)):
        _check_range(side, caches, ids, block_dim)
    runs = find_runs(src_ids, dst_ids)
    views = [_views(src_kv_caches[layer], dst_kv_caches[layer], block_dim) for layer in src_kv_caches]
    if _overlap(src_kv_caches.values(), dst_kv_caches.values()):
        gathered = [[src[run.src : run.src + run.length].copy() for run in runs] for src, _ in views]
        for (_, dst), parts in zip(views, gathered, strict=True):
            for run, part in zip(runs, parts, strict=True):
                dst[run.dst : run.dst + run.length] = part
        return
    for src, dst in views:
        for first, to, length in runs:
            dst[to : to + length] = src[first : first + length]


def find_runs(src_ids: npt.NDArray[np.int64], dst_ids: npt.NDArray[np.int64]) -> list[Run]:
    """Return the runs that copy the same blocks, by destination; of those to one destination the last."""
    # The first of equal ones in the reversed order is the last one.
    dst, last = np.unique(dst_ids[::-1], return_index=True)
    src = src_ids[::-1][last]
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    edges = [0, *ends.tolist(), len(dst)]
    return [Run(int(src[begin]), int(dst[begin]), end - begin) for begin, end in pairwise(edges)]


# --- what is asked for must be possible


def _ids(side: str, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    found = np.asarray(ids)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"{side} block ids must be whole numbers in a list, found {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)


def _check_layers(src_caches: Caches, dst_caches: Caches, block_dim: int) -> None:
    for side, missing in (
        ("destination", src_caches.keys() - dst_caches.keys()),
        ("source", dst_caches.keys() - src_caches.keys()),
    ):
        if missing:
            raise ValueError(f"layers without a {side}: {', '.join(sorted(missing))}")
    for layer, src in src_caches.items():
        dst = dst_caches[layer]
        for cache in (src, dst):
            if not isinstance(cache, torch.Tensor):
                raise ValueError(f"{layer}: a cache must be one tensor, found {type(cache).__name__}")
            if cache.device.type != "cpu":
                raise ValueError(f"{layer}: this copies between caches in host memory, found one on {cache.device}")
            if not 0 <= block_dim < cache.ndim:
                raise ValueError(f"{layer}: has no dimension {block_dim} for its blocks, shape {tuple(cache.shape)}")
        of_block = [tuple(n for i, n in enumerate(cache.shape) if i != block_dim) for cache in (src, dst)]
        if of_block[0] != of_block[1]:
            raise ValueError(
                f"{layer}: a block has shape {of_block[0]} in the source, {of_block[1]} in the destination"
            )
        if src.dtype != dst.dtype:
            raise ValueError(f"{layer}: {src.dtype} in the source, {dst.dtype} in the destination")


def _check_range(side: str, caches: Caches, ids: npt.NDArray[np.int64], block_dim: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    for layer, cache in caches.items():
        blocks = cache.shape[block_dim]
        if low < 0 or high >= blocks:
            wrong = low if low < 0 else high
            raise ValueError(f"{layer}: {side} block {wrong} is out of range, allowed: 0 to {blocks - 1}")


def _overlap(some: Any, others: Any) -> bool:
    """Return whether memory of some tensors may be that of others."""
    spans = sorted((*_extent(cache), side) for side, caches in enumerate((some, others)) for cache in caches)
    reach = [0, 0]  # how far each side's memory extends so far
    for begin, end, side in spans:
        if begin < reach[1 - side]:
            return True
        reach[side] = max(reach[side], end)
    return False


def _extent(cache: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.data_ptr(), cache.data_ptr() + (last + 1) * cache.element_size()


# --- the same bytes, seen so that they are copied fast


def _views(src: torch.Tensor, dst: torch.Tensor, block_dim: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return both caches as numpy arrays, blocks first, with as few dimensions and as wide elements as possible."""
    inner = sorted((i for i in range(src.ndim) if i != block_dim), key=src.stride, reverse=True)
    dims = [(src.shape[i], src.stride(i), dst.stride(i)) for i in inner if src.shape[i] != 1]
    merged: list[tuple[int, int, int]] = []
    for size, src_step, dst_step in dims:
        if merged:
            above, src_above, dst_above = merged[-1]
            if src_above == size * src_step and dst_above == size * dst_step:
                merged[-1] = (above * size, src_step, dst_step)
                continue
        merged.append((size, src_step, dst_step))
    sizes = [size for size, _, _ in merged]
    pair = []
    for cache, steps in ((src, [step for _, step, _ in merged]), (dst, [step for _, _, step in merged])):
        integers = cache.view(_INTEGERS[cache.element_size()])
        pair.append(integers.as_strided((cache.shape[block_dim], *sizes), (cache.stride(block_dim), *steps)))
    if all(_can_widen(view) for view in pair):
        pair = [view.view(torch.int64) for view in pair]
    return pair[0].numpy(), pair[1].numpy()


def _can_widen(view: torch.Tensor) -> bool:
    """Return whether eight bytes at a time can be copied."""
    if view.ndim == 1 or view.stride(-1) != 1:
        return False
    each = _WIDE // view.element_size()
    return all(n % each == 0 for n in (view.shape[-1], view.storage_offset(), *view.stride()[:-1]))
