"""Plan copies of blocks between host memory and a device: path, pieces and chunks. Nothing is copied here.

The paths:

    batch   every piece in calls of vLLM's batched copy, straight from or into pinned memory
    kernel  every piece in calls of vLLM's Triton kernel, which reads pinned memory
    single  a copy for each piece, straight from or into pinned memory
    staged  gathered into chunks of pinned memory on one side, scattered from there on the other
"""

from collections.abc import Sequence
from enum import StrEnum
from math import prod
from typing import NamedTuple

import numpy as np

from kvobs.blocks.layout import WIDE, Ids, Layer, Layout, Run, Side

CHUNK_BYTES = 8 << 20
"""Bytes of a pinned chunk: enough for the link's full speed, few enough that most copies alternate between several."""

BATCH_PIECES = 8192
"""ROCm fails with more in one call."""

_FEW_PIECES = 200  # a copy is about 5 us of the host's time, so many take as long as two chunks on the link
_MANY_PIECES = 64  # with fewer, starting a kernel or filling a chunk takes longer than it saves
_SMALL_PIECE = {  # bytes; many pieces that are smaller are slow in a batch
    "h2d": 28 << 10,  # an H100 copies them at 4 to 7 GB/s, and those of 28 KiB at 40
    "d2h": 4 << 10,  # the link spends longer on starting such a copy than on its bytes
}
_ALIGNMENT = 16


class CopyPath(StrEnum):
    """The path of a copy."""

    BATCH = "batch"
    KERNEL = "kernel"
    SINGLE = "single"
    STAGED = "staged"


class Pieces(NamedTuple):
    """A range of bytes that is contiguous on both sides; offsets are from the start of a layer's caches."""

    src: Ids
    dst: Ids
    sizes: Ids


class Part(NamedTuple):
    """A layer's blocks `first` to before `last` within a chunk, in packing order."""

    layer: int
    first: int
    last: int
    offset: int  # bytes from the start of the chunk to that of the part
    end: int  # bytes from the start of the chunk to the part's end


class Has(NamedTuple):
    """Whether a device has an operation for many pieces of pinned memory."""

    batch: bool
    kernel: bool


def choose(layers: Sequence[Layer], runs: Sequence[Run], direction: str, *, pinned: bool, has: Has) -> CopyPath:
    """Return the path of a copy; `pinned`: all host memory is pinned."""
    layouts = [layer.layout for layer in layers]
    if not pinned or not all(layout.dense for layout in layouts):
        return CopyPath.STAGED
    blocks = sum(run.length for run in runs)
    pieces = sum(prod(each.sizes[:-1]) * (len(runs) if _runs_are_dense(each) else blocks) for each in layouts)
    # The kernel copies eight bytes at a time.
    has = Has(has.batch, has.kernel and all(layout.unit == WIDE for layout in layouts))
    return path_of(direction, pieces, blocks * sum(layout.block_bytes for layout in layouts), has)


def path_of(direction: str, pieces: int, size: int, has: Has) -> CopyPath:
    """Return the path for so many pieces with this many bytes together, in pinned memory."""
    if pieces >= _MANY_PIECES and size < pieces * _SMALL_PIECE[direction]:
        # Only from the host to the device: the copy engines are faster in the other direction.
        return CopyPath.KERNEL if has.kernel and direction == "h2d" else CopyPath.STAGED
    if has.batch:
        return CopyPath.BATCH
    return CopyPath.SINGLE if pieces <= _FEW_PIECES else CopyPath.STAGED


def pieces_of(layout: Layout, runs: Sequence[Run]) -> Pieces:
    """Split runs into as few pieces as the (dense) layout allows."""
    src, dst, lengths = np.array(runs, dtype=np.int64).T
    sizes = lengths * layout.piece_bytes
    if not _runs_are_dense(layout):
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        src, dst = np.repeat(src, lengths) + within, np.repeat(dst, lengths) + within
        sizes = np.full(len(src), layout.piece_bytes)
    of_src, of_dst = _outer(layout, layout.src), _outer(layout, layout.dst)
    return Pieces(
        np.add.outer(of_src, src * layout.src.steps[0]).ravel(),
        np.add.outer(of_dst, dst * layout.dst.steps[0]).ravel(),
        np.tile(sizes, len(of_src)),
    )


def pointers(layers: Sequence[Layer], runs: Sequence[Run]) -> list[Pieces]:
    """Return all pieces of all layers with addresses instead of offsets, at most `BATCH_PIECES` together."""
    cut = [pieces_of(layer.layout, runs) for layer in layers]
    src = np.concatenate([pieces.src + layer.src.data_ptr() for layer, pieces in zip(layers, cut, strict=True)])
    dst = np.concatenate([pieces.dst + layer.dst.data_ptr() for layer, pieces in zip(layers, cut, strict=True)])
    sizes = np.concatenate([pieces.sizes for pieces in cut])
    begins = range(0, len(sizes), BATCH_PIECES)
    return [Pieces(*(column[i : i + BATCH_PIECES] for column in (src, dst, sizes))) for i in begins]


def chunks_of(block_bytes: Sequence[int], blocks: int, chunk_bytes: int) -> list[list[Part]]:
    """Pack this many blocks of every layer into as few chunks as possible, layer by layer."""
    chunks: list[list[Part]] = []
    free = 0
    for layer, size in enumerate(block_bytes):
        first = 0
        while first < blocks:
            if free < size:
                chunks.append([])
                free = chunk_bytes
            last = min(blocks, first + free // size)
            offset, used = chunk_bytes - free, (last - first) * size
            chunks[-1].append(Part(layer, first, last, offset, offset + used))
            free -= used + -used % _ALIGNMENT
            first = last
    return chunks


def _runs_are_dense(layout: Layout) -> bool:
    return layout.src.steps[0] == layout.dst.steps[0] == layout.piece_bytes


def _outer(layout: Layout, side: Side) -> Ids:
    """Return the offsets of a block's pieces."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, step in zip(layout.sizes[:-1], side.steps[1:-1], strict=False):
        offsets = np.add.outer(offsets, np.arange(size) * step).ravel()
    return offsets
