"""Caches in any layout, drawn at random, and what a plain loop would make of them."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float64]
BLOCK_SHAPES = [(2, 3, 2, 8), (4, 8), (3,), (2, 1, 5), (8, 16), ()]


@st.composite
def caches(draw: st.DrawFn, blocks: int, dtype: torch.dtype, shape: tuple[int, ...], block_dim: int) -> torch.Tensor:
    """Draw a cache of random bytes: its dimensions may lie in memory in any order, with an offset, and with gaps."""
    full = [*shape[:block_dim], blocks, *shape[block_dim:]]
    in_order = st.just(list(range(len(full))))
    order = draw(st.one_of(in_order, st.permutations(range(len(full)))))
    gap, offset = draw(st.sampled_from([0, 0, 1, 3])), draw(st.sampled_from([0, 0, 1, 4]))
    stored = [full[i] for i in order]
    stored[-1] += gap
    size = torch.empty((), dtype=dtype).element_size()
    number = int(np.prod(stored)) + offset
    raw = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 256, number * size, dtype=np.uint8)
    flat = torch.from_numpy(raw).view(dtype)[offset:]
    cache = flat.view(stored)[..., : stored[-1] - gap] if gap else flat.view(stored)
    return cache.permute([order.index(i) for i in range(len(full))])


def memory(cache: torch.Tensor) -> torch.Tensor:
    """Return every byte of a cache's memory, those between its elements too."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage, 0, (len(storage),), (1,))


def twin(cache: torch.Tensor, place: str = "cpu") -> torch.Tensor:
    """Return a copy that lies in that place's memory in the same way."""
    copy = memory(cache).to(place, copy=True).untyped_storage()
    return torch.empty(0, dtype=cache.dtype, device=place).set_(
        copy, cache.storage_offset(), cache.shape, cache.stride()
    )


def by_a_loop(src: torch.Tensor, dst: torch.Tensor, pairs: Sequence[tuple[int, int]], block_dim: int) -> torch.Tensor:
    """Return what copying block by block makes of the destination, which stays as it is."""
    expected = twin(dst)
    for s, d in pairs:
        # As integers: a copy of a NaN need not have its bits.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[src.element_size()]
        expected.view(integers).select(block_dim, d).copy_(src.view(integers).select(block_dim, s))
    return expected
