"""Copy blocks within host memory.

Copies through numpy views of wide integers are nearly as fast as memcpy; advanced indexing, as in vLLM, copies
everything into a temporary first and takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvobs.blocks.runs import Run
from kvobs.blocks.strides import Layer, host_view

if TYPE_CHECKING:
    import numpy as np


def copy_within_host(layers: Sequence[Layer], runs: Sequence[Run]) -> None:
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


def copy_runs(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any], runs: Sequence[Run]) -> None:
    """Copy runs between two arrays whose first dimension counts blocks."""
    for first, to, length in runs:
        dst[to : to + length] = src[first : first + length]


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
