"""Which blocks a load fills, what is lost with bad ones, and how many bytes they are."""

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvobs.state.cache_layout import CacheLayout, bytes_of_blocks, full_group, layers_differ
from kvobs.testing.rig import base_config


@pytest.mark.parametrize(
    ("local", "external", "expected"),
    [(0, 32, (11, 12)), (16, 16, (12,)), (16, 17, (12, 13)), (8, 8, (11,)), (0, 64, (11, 12, 13)), (48, 16, ())],
)
def test_the_blocks_of_a_load_are_beyond_local_tokens(local: int, external: int, expected: tuple[int, ...]) -> None:
    assert CacheLayout((16,)).loaded([[11, 12, 13]], local, external) == (expected,)


def test_groups_have_block_sizes_and_the_null_block_has_no_owner() -> None:
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
def test_a_block_has_bytes_in_all_layers_of_all_ranks(ranks: int) -> None:
    differing = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"e": spec(), "f": spec()})  # its page is a sum
    groups = [(["a", "b", "c"], spec()), (["d"], spec(32)), (["e", "f"], differing)]
    made = CacheLayout.of([KVCacheGroupSpec(*group) for group in groups], ranks)
    of_blocks = tuple(tokens * PER_TOKEN * ranks for tokens in (3 * 16, 32, 2 * 16))
    assert made == CacheLayout((16, 32, 16), of_blocks, is_full=True)
    assert made.bytes_per_token == 6 * PER_TOKEN * ranks
    assert made.bytes_of(((1, 2), (), (7,))) == 2 * of_blocks[0] + of_blocks[2]
    assert CacheLayout((16,)).bytes_of(((1, 2),)) == CacheLayout(()).bytes_of(((1, 2),)) == 0


def test_pipeline_stages_add_up_also_if_ranks_are_missing() -> None:
    """Where vLLM has no pp_aware hook, the stages' handshakes have the same key, and one is left."""
    layout = CacheLayout((16, 16), (1, 1))
    assert layout.measured([(30, 10), (20, 10)], 2).block_bytes == (50, 20)
    assert layout.measured([(30, 10), (20, 10)], 4).block_bytes == (100, 40)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=tokens)


def state(block_size: int = 1024) -> MambaSpec:
    return MambaSpec(block_size, shapes=((16, 64),), dtypes=(torch.float32,), page_size_padded=16 * PER_TOKEN)


def latent(head_size: int = 576) -> MLAAttentionSpec:
    return MLAAttentionSpec(64, num_kv_heads=1, head_size=head_size, dtype=torch.bfloat16)


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


MODELS: dict[str, dict[str, KVCacheSpec]] = {
    "full": layers(*[spec()] * 4),
    "sliding": layers(*[window(128)] * 4),
    "as gpt-oss": layers(*[window(128), spec()] * 12),
    "as Gemma 3": layers(*([window(1024)] * 5 + [spec()]) * 10, *[window(1024)] * 2),
    "with states": layers(*([state()] * 3 + [spec()]) * 2),
    "latent": layers(*[latent()] * 4),
    "latent, with an index": layers(*[latent(), latent(128)] * 4),
}


@cache
def groups_of(*model: tuple[str, KVCacheSpec]) -> tuple[list[KVCacheGroupSpec], list[KVCacheGroupSpec]]:
    """Return the groups that vLLM makes of a model, on the scheduler's side and in a worker."""
    config = copy.copy(base_config())
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = "LBNHC"
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    made = kv_cache_utils.get_kv_cache_configs(config, [dict(model)], [2**30])
    return kv_cache_utils.generate_scheduler_kv_cache_config(made).kv_cache_groups, made[0].kv_cache_groups


def seen(spec: Any, end: int) -> int:
    """Return the first token of which a layer needs the block, to compute the one at ``end``."""
    if isinstance(spec, MambaSpec):
        return end - 1
    return max(0, end - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0


def layer_by_layer(model: dict[str, KVCacheSpec], local: int, end: int) -> int:
    """Return the bytes of a load on one rank, counted without groups."""
    total = 0
    for spec in model.values():
        size, first = spec.block_size, seen(spec, end)
        blocks = [i for i in range(-(-end // size)) if local // size <= i and (i + 1) * size > first]
        total += len(blocks) * spec.page_size_bytes
    return total


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@given(local=st.integers(0, 200), external=st.integers(1, 40_000), ranks=st.integers(1, 8))
def test_a_load_has_the_bytes_that_its_layers_fill(
    model: dict[str, KVCacheSpec], local: int, external: int, ranks: int
) -> None:
    """Of vLLM's groups, with null blocks where vLLM has them, against a count of each layer."""
    of_scheduler, of_worker = groups_of(*model.items())
    end = local + external
    layout = CacheLayout.of(of_scheduler, ranks)
    if layers_differ(of_worker):
        layout = layout.measured([bytes_of_blocks(of_worker)] * ranks, ranks)
    tables = []
    for group in of_scheduler:
        size, first = group.kv_cache_spec.block_size, seen(group.kv_cache_spec, end)
        tables.append([0 if (i + 1) * size <= first else i + 1 for i in range(-(-end // size) + 1)])
    assert layout.bytes_of(layout.loaded(tables, local, external)) == ranks * layer_by_layer(model, local, end)


@pytest.mark.parametrize(("name", "too_much"), [("as gpt-oss", 2.0), ("as Gemma 3", 5.3), ("full", 1.0)])
def test_tokens_times_all_layers_would_be_too_much(name: str, too_much: float) -> None:
    model, tokens = MODELS[name], 32 * 1024
    assert len(model) * PER_TOKEN * tokens / layer_by_layer(model, 0, tokens) == pytest.approx(too_much, rel=0.02)


def test_a_token_has_a_size_where_all_layers_keep_it() -> None:
    groups = {name: groups_of(*model.items())[0] for name, model in MODELS.items()}
    sizes = {name: CacheLayout.of(of_model, 1).bytes_per_token for name, of_model in groups.items()}
    assert {name for name, size in sizes.items() if size} == {"full", "latent", "latent, with an index"}
    full = {name: full_group(of_model) for name, of_model in groups.items()}
    assert {name for name, group in full.items() if group} == {"as gpt-oss", "as Gemma 3", "with states"}
    assert isinstance(groups["as Gemma 3"][full["as Gemma 3"]].kv_cache_spec, FullAttentionSpec)


def test_layers_that_no_connector_transfers_have_no_bytes() -> None:
    group = KVCacheGroupSpec(["a"], window(128))
    hidden = SimpleNamespace(**vars(group) | {"enable_kv_transfer": False})
    made = CacheLayout.of([KVCacheGroupSpec(["b"], spec()), hidden], 1)
    assert (made.block_bytes, made.is_full) == ((16 * PER_TOKEN, 0), True)


@pytest.mark.parametrize(("exempt", "factor"), [({}, 2), ({"dcp_sharded": True}, 2), ({"dcp_sharded": False}, 1)])
def test_context_parallel_ranks_share_groups_that_are_not_exempt(exempt: dict[str, bool], factor: int) -> None:
    group = SimpleNamespace(
        kv_cache_spec=SimpleNamespace(block_size=16, page_size_bytes=64, **exempt), layer_names=["a"]
    )
    assert CacheLayout.of([group], 2, 2) == CacheLayout((16 * factor,), (128,))
