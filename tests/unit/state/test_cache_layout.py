"""Which blocks a load fills, what is lost with bad ones, and what a token weighs."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from kvobs.state.cache_layout import CacheLayout


@pytest.mark.parametrize(
    ("local", "external", "expected"),
    [(0, 32, (11, 12)), (16, 16, (12,)), (16, 17, (12, 13)), (8, 8, (11,)), (0, 64, (11, 12, 13)), (48, 16, ())],
)
def test_the_blocks_of_a_load_are_beyond_local_tokens(local: int, external: int, expected: tuple[int, ...]) -> None:
    assert CacheLayout((16,)).loaded([[11, 12, 13]], local, external) == (expected,)


def test_groups_have_their_own_block_size_and_the_null_block_is_nobodys_but_unknown_ones_are_taken_whole() -> None:
    assert CacheLayout((16, 32)).loaded([[1, 2, 3, 4], [0, 9]], 0, 64) == ((1, 2, 3, 4), (9,))
    assert CacheLayout(()).loaded([[1, 2]], 16, 16) == ((1, 2),)
    assert CacheLayout(()).lost(((1, 2),), {1}, 0, 32) == 0


@pytest.mark.parametrize(
    ("bad", "lost"), [({12}, 32), ({11}, 48), ({13, 12}, 32), ({13}, 16), (set(), 0), ({99}, 0)], ids=str
)
def test_tokens_before_the_first_bad_block_are_kept(bad: set[int], lost: int) -> None:
    assert CacheLayout((16,)).lost(((11, 12, 13),), bad, 32, 48) == lost


@given(st.data(), st.integers(0, 80), st.integers(1, 200))
def test_tokens_are_lost_from_the_first_bad_block_on(data: st.DataObject, local: int, external: int) -> None:
    """Also where null blocks stand for those before a sliding window, as counted token by token."""
    layout, window, end = CacheLayout((16, 32)), data.draw(st.integers(1, 300)), local + external
    tables = []
    for group, size in enumerate(layout.block_sizes):
        ids = [100 * (group + 1) + i for i in range(-(-end // size))]
        tables.append([0] * (max(0, end - window) // size * group) + ids[max(0, end - window) // size * group :])
    blocks = layout.loaded(tables, local, external)
    bad = data.draw(st.sets(st.sampled_from([*sum(blocks, ()), 999])))
    lost = {
        token
        for table, size in zip(tables, layout.block_sizes, strict=True)
        for token in range(local, end)
        if bad.intersection(table[local // size : token // size + 1])
    }
    assert layout.lost(blocks, bad, local, external) == len(lost)


def spec(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.float32)


PER_TOKEN = 2 * 2 * 64 * 4  # K and V, heads, head size, bytes


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_token_weighs_what_all_layers_of_all_ranks_hold_of_it(ranks: int) -> None:
    differing = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"e": spec(), "f": spec()})  # its page is a sum
    groups = [(["a", "b", "c"], spec()), (["d"], spec(32)), (["e", "f"], differing)]
    made = CacheLayout.of([KVCacheGroupSpec(*group) for group in groups], ranks)
    assert made == CacheLayout((16, 32, 16), 6 * PER_TOKEN * ranks)


@pytest.mark.parametrize(("exempt", "factor"), [({}, 2), ({"dcp_sharded": True}, 2), ({"dcp_sharded": False}, 1)])
def test_a_group_is_shared_by_context_parallel_ranks_unless_it_is_exempt(exempt: dict[str, bool], factor: int) -> None:
    group = SimpleNamespace(
        kv_cache_spec=SimpleNamespace(block_size=16, page_size_bytes=64, **exempt), layer_names=["a"]
    )
    assert CacheLayout.of([group], 1, 2) == CacheLayout((16 * factor,), 4.0 / factor)
