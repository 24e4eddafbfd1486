"""Describe how blocks lie in memory on both sides, in the form that is fastest to copy.

A block's dimensions are merged wherever both sides allow it, and eight bytes are copied at a time if aligned. Copies
through numpy views of such integers are nearly as fast as memcpy; advanced indexing, as in vLLM, copies everything into
a temporary first and takes several times as long.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_INTEGERS = {size: np.dtype(f"i{size}") for size in _INTEGERS}
WIDE = 8  # bytes

Ids: TypeAlias = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that are consecutive on both sides."""

    src: int
    dst: int
    length: int


class Side(NamedTuple):
    """The memory layout of one side's blocks."""

    shape: tuple[int, ...]  # the number of blocks, then `Layout.sizes`
    steps: tuple[int, ...]  # stride in bytes of each dimension of the shape
    length: int  # bytes from the first to after the last

    @property
    def blocks(self) -> int:
        return self.shape[0]


class Layout(NamedTuple):
    """The shape of a block, the same on both sides, and its memory layout on each."""

    unit: int  # bytes copied at a time
    sizes: tuple[int, ...]  # units along each dimension of a block, the largest stride first
    src: Side
    dst: Side

    @property
    def block_bytes(self) -> int:
        return self.unit * prod(self.sizes)


class Layer(NamedTuple):
    """A layer's caches and their common layout."""

    name: str
    src: torch.Tensor
    dst: torch.Tensor
    layout: Layout


@lru_cache(maxsize=256)  # a model has few kinds of layers, and each call needs all of them
def layout_of(
    src_shape: tuple[int, ...],
    src_strides: tuple[int, ...],
    dst_shape: tuple[int, ...],
    dst_strides: tuple[int, ...],
    *,
    element_size: int,
    block_dim: int,
    aligned: bool,
) -> Layout:
    """Merge the dimensions of a block; `aligned`: both sides begin at a multiple of eight bytes."""
    inner = [i for i, size in enumerate(src_shape) if i != block_dim and size != 1]
    merged: list[tuple[int, int, int]] = []
    for i in sorted(inner, key=src_strides.__getitem__, reverse=True):
        size, src_step, dst_step = src_shape[i], src_strides[i], dst_strides[i]
        if merged and merged[-1][1:] == (size * src_step, size * dst_step):
            size *= merged.pop()[0]
        merged.append((size, src_step, dst_step))
    sizes = [size for size, _, _ in merged]
    pair = [
        [strides[block_dim], *(item[side] for item in merged)] for side, strides in ((1, src_strides), (2, dst_strides))
    ]
    unit, each = element_size, WIDE // element_size
    dense = sizes and all(steps[-1] == 1 for steps in pair)
    if aligned and dense and all(n % each == 0 for n in (sizes[-1], *pair[0][:-1], *pair[1][:-1])):
        unit = WIDE
        sizes[-1] //= each
        pair = [[*steps[:-1], each] for steps in pair]
    src, dst = (
        _side((shape[block_dim], *sizes), tuple(step * element_size for step in steps), unit)
        for shape, steps in zip((src_shape, dst_shape), pair, strict=True)
    )
    return Layout(unit, tuple(sizes), src, dst)


def _side(shape: tuple[int, ...], steps: tuple[int, ...], unit: int) -> Side:
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    return Side(shape, steps, 0 if 0 in shape else last + unit)


def host_view(cache: torch.Tensor, side: Side, unit: int) -> npt.NDArray[Any]:
    """Return a cache in host memory as an array of integers, blocks first."""
    # Built from the address: torch's own views of it take several times as long, for each layer of each call.
    memory: Any = (ctypes.c_char * side.length).from_address(cache.data_ptr())
    return np.ndarray(side.shape, _NUMPY_INTEGERS[unit], memory, 0, side.steps)


def tensor_view(cache: torch.Tensor, side: Side, unit: int) -> torch.Tensor:
    """Return a cache as a tensor of integers, blocks first."""
    element_size = cache.element_size()
    each = unit // element_size
    sizes, steps = list(side.shape), [step // element_size for step in side.steps]
    if each > 1:
        sizes[-1] *= each
        steps[-1] = 1
    view = cache.view(_INTEGERS[element_size]).as_strided(sizes, steps)
    return view.view(_INTEGERS[unit]) if each > 1 else view


def packed(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return bytes as a tensor of consecutive blocks."""
    return memory.view(_INTEGERS[layout.unit]).view(-1, *layout.sizes)


def without_duplicates(src_ids: Ids, dst_ids: Ids) -> tuple[Ids, Ids]:
    """Return the pairs by destination; the last pair if several have the same destination."""
    # The first of equal ones in the reversed order is the last one.
    dst, last = np.unique(dst_ids[::-1], return_index=True)
    return src_ids[::-1][last], dst


def find_runs(src_ids: Ids, dst_ids: Ids) -> list[Run]:
    """Return the longest runs that cover these pairs in this order."""
    ends = np.flatnonzero((np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)) + 1
    begins = [0, *ends.tolist()]
    lengths = [end - begin for begin, end in pairwise([*begins, len(dst_ids)])]
    return list(map(Run, src_ids[begins].tolist(), dst_ids[begins].tolist(), lengths))


def copy_runs(src: npt.NDArray[Any], dst: npt.NDArray[Any], runs: Sequence[Run]) -> None:
    """Copy runs between two arrays whose first dimension counts blocks."""
    for first, to, length in runs:
        dst[to : to + length] = src[first : first + length]
