"""Blocks arrive bit by bit as a plain loop would copy them, or nothing moves and the error says why."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from kvobs.blocks import copy_kv_blocks, find_runs

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float64]
BLOCK_SHAPES = [(2, 3, 2, 8), (4, 8), (3,), (2, 1, 5), ()]


def bits(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy that can be compared: NaN is like NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return cache.view(integers[cache.element_size()]).clone()


@st.composite
def caches(draw: st.DrawFn, blocks: int, dtype: torch.dtype, shape: tuple[int, ...], block_dim: int) -> torch.Tensor:
    """Draw a cache of random bytes: its dimensions may lie in memory in any order, with an offset, and with gaps."""
    full = [*shape[:block_dim], blocks, *shape[block_dim:]]
    order = draw(st.permutations(range(len(full))))
    gap, offset = draw(st.sampled_from([0, 0, 1, 3])), draw(st.sampled_from([0, 0, 1, 4]))
    stored = [full[i] for i in order]
    stored[-1] += gap
    size = torch.empty((), dtype=dtype).element_size()
    number = int(np.prod(stored)) + offset
    raw = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 256, number * size, dtype=np.uint8)
    flat = torch.from_numpy(raw).view(dtype)[offset:]
    cache = flat.view(stored)[..., : stored[-1] - gap] if gap else flat.view(stored)
    return cache.permute([order.index(i) for i in range(len(full))])


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(BLOCK_SHAPES), st.integers(1, 12), st.integers(1, 12))
def test_every_byte_arrives_and_no_other_changes(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...], src_blocks: int, dst_blocks: int
) -> None:
    """Any layout, any dtype, any ids: scattered, in runs, duplicates."""
    block_dim = data.draw(st.integers(0, len(shape)))
    layers = ["a", "b"]
    src = {layer: data.draw(caches(src_blocks, dtype, shape, block_dim)) for layer in layers}
    dst = {layer: data.draw(caches(dst_blocks, dtype, shape, block_dim)) for layer in layers}
    pairs = data.draw(st.lists(st.tuples(st.integers(0, src_blocks - 1), st.integers(0, dst_blocks - 1)), max_size=20))
    expected = {layer: bits(cache) for layer, cache in dst.items()}
    before = {layer: bits(cache) for layer, cache in src.items()}
    for layer in layers:
        for s, d in pairs:
            expected[layer].select(block_dim, d).copy_(before[layer].select(block_dim, s))
    copy_kv_blocks(src, dst, [s for s, _ in pairs], [d for _, d in pairs], "d2h", block_dim=block_dim)
    for layer in layers:
        assert torch.equal(bits(dst[layer]), expected[layer])
        assert torch.equal(bits(src[layer]), before[layer])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_within_one_cache_all_is_read_before_anything_is_written(pairs: list[tuple[int, int]]) -> None:
    cache = {"a": torch.arange(10 * 4).view(10, 4).clone()}
    expected = cache["a"].clone()
    for s, d in pairs:
        expected[d] = cache["a"][s]
    copy_kv_blocks(cache, {"a": cache["a"].view(10, 4)}, [s for s, _ in pairs], [d for _, d in pairs], "h2d")
    assert torch.equal(cache["a"], expected)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40))
def test_runs_are_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    runs = find_runs(np.array([s for s, _ in pairs]), np.array([d for _, d in pairs]))
    copied = {run.dst + i: run.src + i for run in runs for i in range(run.length)}
    assert copied == {d: s for s, d in pairs}
    assert sum(run.length for run in runs) == len(copied)
    for one, other in itertools.pairwise(runs):
        assert one.dst + one.length <= other.dst
        assert (one.src + one.length, one.dst + one.length) != (other.src, other.dst)


def test_thousands_of_blocks() -> None:
    rng = np.random.default_rng(1)
    src = {"a": torch.from_numpy(rng.integers(0, 2**15, (5000, 2, 16), dtype=np.int16)).view(torch.bfloat16)}
    dst = {"a": torch.zeros(6000, 2, 16, dtype=torch.bfloat16)}
    src_ids, dst_ids = rng.permutation(5000)[:4096].tolist(), rng.permutation(6000)[:4096].tolist()
    copy_kv_blocks(src, dst, src_ids, dst_ids, "h2d")
    assert torch.equal(bits(dst["a"])[dst_ids], bits(src["a"])[src_ids])
    left = sorted(set(range(6000)) - set(dst_ids))
    assert not bits(dst["a"])[left].any()


A, B = torch.zeros(4, 2), torch.ones(6, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (({"a": A}, {"a": B}, [0], [0], "up"), "direction is 'up', allowed: 'h2d', 'd2h'"),
        (({"a": A}, {"a": B}, [0, 1], [0], "h2d"), "2 source blocks can't go to 1 destination blocks"),
        (({"a": A}, {"a": B}, [], [0], "h2d"), "0 source blocks can't go to 1 destination blocks"),
        (({"a": A, "b": A}, {"a": B}, [0], [0], "h2d"), "layers without a destination: b"),
        (({"a": A}, {"a": B, "c": B}, [0], [0], "h2d"), "layers without a source: c"),
        (({"a": A}, {"a": B}, [4], [0], "h2d"), "a: source block 4 is out of range, allowed: 0 to 3"),
        (({"a": A}, {"a": B}, [0, 1], [-1, 2], "h2d"), "a: destination block -1 is out of range, allowed: 0 to 5"),
        (({"a": A}, {"a": torch.ones(6, 1)}, [0], [0], "h2d"), "a: a block has shape (2,) in the source, (1,) in the"),
        (({"a": A}, {"a": B.double()}, [0], [0], "h2d"), "a: torch.float32 in the source, torch.float64 in the dest"),
        (({"a": [A]}, {"a": B}, [0], [0], "h2d"), "a: a cache must be one tensor, found list"),
        (
            ({"a": A.to("meta")}, {"a": B}, [0], [0], "d2h"),
            "a: this copies between caches in host memory, found one",
        ),
        (({"a": A}, {"a": B}, [0.5], [0], "h2d"), "source block ids must be whole numbers in a list, found float64"),
        (({"a": A}, {"a": B}, [[0]], [0], "h2d"), "source block ids must be whole numbers in a list, found int64 of"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_moves(arguments: Any, says: str) -> None:
    before = B.clone()
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        copy_kv_blocks(*arguments)
    assert torch.equal(B, before)


def test_a_layer_without_that_dimension_is_named() -> None:
    with pytest.raises(ValueError, match="a: has no dimension 2 for its blocks"):
        copy_kv_blocks({"a": A}, {"a": B}, [0], [0], "h2d", block_dim=2)


def test_a_fault_in_a_later_layer_keeps_the_first_as_it_was() -> None:
    dst = {"a": torch.zeros(4, 2), "b": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match="b: destination block 3 is out of range"):
        copy_kv_blocks({"a": A + 1, "b": A + 1}, dst, [0], [3], "d2h")
    assert not dst["a"].any()


def test_nothing_to_copy_is_no_error() -> None:
    copy_kv_blocks({}, {}, [], [], "h2d")
    copy_kv_blocks({"a": A}, {"a": B}, [], [], "d2h")


def test_it_needs_torch_and_numpy_only() -> None:
    hidden = "import sys; sys.modules['vllm'] = sys.modules['prometheus_client'] = sys.modules['pydantic'] = None; "
    subprocess.run([sys.executable, "-c", hidden + "import kvobs.blocks"], check=True, timeout=60)
