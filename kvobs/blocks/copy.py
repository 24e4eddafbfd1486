"""Copy blocks between two KV caches: all arguments are checked first, and runs of blocks are copied at once.

Needs torch and numpy only.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch

from kvobs.blocks.layout import WIDE, Ids, Layer, Run, copy_runs, find_runs, host_view, layout_of, without_duplicates

Caches: TypeAlias = Mapping[str, torch.Tensor]  # layer name -> its cache
BlockDim: TypeAlias = int | Mapping[str, int]  # of all layers, or layer name -> its own
Pair: TypeAlias = tuple[str, torch.Tensor, torch.Tensor]  # layer name, source, destination

_ROUTES = {"h2d": "from host memory to a CUDA device", "d2h": "from a CUDA device to host memory"}
_ELEMENT_SIZES = (1, 2, 4, 8)


def copy_kv_blocks(
    src_kv_caches: Caches,
    dst_kv_caches: Caches,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: str,
    *,
    block_dim: BlockDim = 0,
) -> None:
    """Copy block ``src_block_ids[i]`` to block ``dst_block_ids[i]`` in every layer; complete at return.

    The signature is the same as vLLM's function of this name. If a destination occurs twice, the last one counts. On an
    error nothing is copied.

    Both sides may be in host memory, and share it; no device is touched then. With one side on a CUDA device the copies
    come after what its current stream has queued and before what it gets next, and at return the host may read what
    was copied to it and change what was copied from it.

    Args:
        src_kv_caches: a tensor for each layer, [blocks, ...] of any strides.
        dst_kv_caches: the same layers, shapes but for the number of blocks, and dtypes.
        src_block_ids: ids of blocks in the source.
        dst_block_ids: as many ids of blocks in the destination.
        direction: "h2d" or "d2h".
        block_dim: which dimension counts the blocks, in all layers or for each layer by name: 1 in tensors with keys
            and values first, [2, blocks, ...].

    Raises:
        ValueError: names the difference and the layer.
    """
    if direction not in _ROUTES:
        raise ValueError(f"direction is {direction!r}, allowed: {', '.join(map(repr, _ROUTES))}")
    if len(src_block_ids) != len(dst_block_ids):
        raise ValueError(
            f"{len(src_block_ids)} source blocks can't be copied to {len(dst_block_ids)} destination blocks"
        )
    if not len(src_block_ids):
        return
    src_ids, dst_ids = _ids("source", src_block_ids), _ids("destination", dst_block_ids)
    pairs = _pairs(src_kv_caches, dst_kv_caches)
    device = _device(pairs, direction)
    layers = _layers(pairs, block_dim)
    _check_range("source", src_ids, {layer.name: layer.layout.src.blocks for layer in layers})
    _check_range("destination", dst_ids, {layer.name: layer.layout.dst.blocks for layer in layers})
    layers = [layer for layer in layers if layer.layout.block_bytes]
    if not layers:
        return
    src_ids, dst_ids = without_duplicates(src_ids, dst_ids)
    if device is None:
        _copy_within_host(layers, find_runs(src_ids, dst_ids))
        return
    from kvobs.blocks.staged import copy_staged

    copy_staged(layers, src_ids, dst_ids, direction)


def _ids(side: str, ids: Sequence[int]) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"{side} block ids must be whole numbers in a list, found {shape}")
    return array.astype(np.int64)


def _pairs(src_caches: Caches, dst_caches: Caches) -> list[Pair]:
    for side, missing in (
        ("destination", src_caches.keys() - dst_caches.keys()),
        ("source", dst_caches.keys() - src_caches.keys()),
    ):
        if missing:
            raise ValueError(f"layers without a {side}: {', '.join(sorted(missing))}")
    pairs = [(name, src, dst_caches[name]) for name, src in src_caches.items()]
    for name, *caches in pairs:
        for cache in caches:
            if not isinstance(cache, torch.Tensor):
                raise ValueError(f"{name}: a cache must be one tensor, found {type(cache).__name__}")
    return pairs


def _device(pairs: Sequence[Pair], direction: str) -> torch.device | None:
    """Return the device of one side, or None if both are in host memory."""
    if all(src.is_cpu and dst.is_cpu for _, src, dst in pairs):
        return None
    first: torch.device | None = None
    for name, src, dst in pairs:
        host, other = (src, dst) if direction == "h2d" else (dst, src)
        if not host.is_cpu or other.device.type != "cuda":
            raise ValueError(f"{name}: {direction} copies {_ROUTES[direction]}, found {src.device} to {dst.device}")
        first = first or other.device
        if other.device != first:
            raise ValueError(f"{name}: on {other.device}, but {pairs[0][0]} on {first}")
    return first


def _layers(pairs: Sequence[Pair], block_dim: BlockDim) -> list[Layer]:
    if isinstance(block_dim, int):
        return [_layer(name, src, dst, block_dim) for name, src, dst in pairs]
    if missing := [name for name, _, _ in pairs if name not in block_dim]:
        raise ValueError(f"layers without a block_dim: {', '.join(missing)}")
    return [_layer(name, src, dst, block_dim[name]) for name, src, dst in pairs]


def _layer(name: str, src: torch.Tensor, dst: torch.Tensor, block_dim: int) -> Layer:
    for cache in (src, dst):
        if not 0 <= block_dim < cache.ndim:
            raise ValueError(f"{name}: has no dimension {block_dim} for its blocks, shape {tuple(cache.shape)}")
    if src.shape != dst.shape:
        of_block = [(*shape[:block_dim], *shape[block_dim + 1 :]) for shape in (src.shape, dst.shape)]
        if of_block[0] != of_block[1]:
            raise ValueError(f"{name}: a block has shape {of_block[0]} in the source, {of_block[1]} in the destination")
    if src.dtype != dst.dtype:
        raise ValueError(f"{name}: {src.dtype} in the source, {dst.dtype} in the destination")
    element_size = src.element_size()
    if element_size not in _ELEMENT_SIZES:
        allowed = ", ".join(map(str, _ELEMENT_SIZES))
        raise ValueError(f"{name}: elements of {element_size} bytes, {src.dtype}, allowed: {allowed}")
    # torch reads eight bytes at a time only at such an offset in a storage, which may begin anywhere.
    begins = (src.data_ptr(), dst.data_ptr(), src.storage_offset() * element_size, dst.storage_offset() * element_size)
    aligned = not any(begin % WIDE for begin in begins)
    sides = src.shape, src.stride(), dst.shape, dst.stride()
    layout = layout_of(*sides, element_size=element_size, block_dim=block_dim, aligned=aligned)
    return Layer(name, src, dst, layout)


def _check_range(side: str, ids: Ids, blocks_by_layer: Mapping[str, int]) -> None:
    low, high = int(ids.min()), int(ids.max())
    for layer, blocks in blocks_by_layer.items():
        if low < 0 or high >= blocks:
            wrong = low if low < 0 else high
            raise ValueError(f"{layer}: {side} block {wrong} is out of range, allowed: 0 to {blocks - 1}")


def _copy_within_host(layers: Sequence[Layer], runs: Sequence[Run]) -> None:
    """Copy runs of blocks in every layer; source and destination may share memory."""
    views = [
        (host_view(src, layout.src, layout.unit), host_view(dst, layout.dst, layout.unit))
        for _, src, dst, layout in layers
    ]
    if not _share_memory(layers):
        for src, dst in views:
            copy_runs(src, dst, runs)
        return
    gathered = [[src[run.src : run.src + run.length].copy() for run in runs] for src, _ in views]
    for (_, dst), parts in zip(views, gathered, strict=True):
        for run, part in zip(runs, parts, strict=True):
            dst[run.dst : run.dst + run.length] = part


def _share_memory(layers: Sequence[Layer]) -> bool:
    """Return whether any source may overlap any destination."""
    caches = [(src.data_ptr(), layout.src.length, 0) for _, src, _, layout in layers]
    caches += [(dst.data_ptr(), layout.dst.length, 1) for _, _, dst, layout in layers]
    reach = [0, 0]  # the end of each side's memory so far
    for begin, length, side in sorted(caches):
        if begin < reach[1 - side]:
            return True
        reach[side] = max(reach[side], begin + length)
    return False
