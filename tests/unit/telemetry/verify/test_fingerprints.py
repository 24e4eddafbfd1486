"""Fingerprints of blocks in caches of the shapes that vLLM's attention backends have."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec

from kvobs.telemetry.verify.fingerprints import AT_A_TIME, LAYERS_OF_A_BLOCK, VALUES, Fingerprints, Layers
from kvobs.telemetry.verify.noted import Fingerprint
from kvobs.telemetry.verify.sample import Block
from tests.support.layers import BLOCKS, SHAPES, layers_of, random_cache


def block(number: int, key: bytes = b"\0" * 8) -> Block:
    return Block(key, 0, number, 0)


def take(layers: Layers, *blocks: Block, reads_all: bool = True, cache_dtype: str = "auto") -> list[Fingerprint]:
    taken = Fingerprints(layers, reads_all=reads_all, cache_dtype=cache_dtype).take(blocks)
    assert taken.is_ready()
    return taken.read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_digest_changes_with_every_byte_and_with_no_other_block(shape: Any, dtype: Any, data: Any) -> None:
    cache = random_cache(shape, dtype=dtype)
    layers = layers_of(cache)
    blocks = [block(i) for i in (2, 3, 4, BLOCKS - 1)]
    before = take(layers, *blocks)
    page = layers.pages(0, 0)[3].view(torch.uint8)
    at = tuple(data.draw(st.integers(0, size - 1)) for size in page.shape)
    page[at] ^= data.draw(st.integers(1, 255))
    changed = [old.digest != new.digest for old, new in zip(before, take(layers, *blocks), strict=True)]
    assert changed == [False, True, False, False]


def test_a_digest_depends_on_the_order_of_bytes_and_of_layers() -> None:
    one, two = random_cache(seed=1), random_cache(seed=2)
    turned = one.clone()
    turned[5] = turned[5].flip(1)
    digests = [take(layers_of(*caches), block(5))[0].digest for caches in ((one, two), (two, one), (turned, two))]
    assert len(set(digests)) == 3


def test_blocks_of_any_number_are_read_as_each_alone() -> None:
    layers = layers_of(random_cache(seed=1), random_cache(seed=2))
    many = take(layers, *map(block, range(AT_A_TIME + 5)))
    alone = [take(layers, block(i))[0] for i in range(AT_A_TIME + 5)]
    assert [each.digest for each in many] == [each.digest for each in alone]
    assert all((a.values == b.values).all() and a.largest == b.largest for a, b in zip(many, alone, strict=True))


def test_values_are_of_all_layers_and_the_largest_is_of_all_numbers() -> None:
    caches = [torch.full(SHAPES["blocks first"], float(layer), dtype=torch.float32) for layer in range(4)]
    caches[2][7, 1, 3, 0, 5] = -90
    fingerprint = take(layers_of(*caches), block(7))[0]
    assert [int((fingerprint.values == layer).sum()) for layer in range(4)] == [VALUES // 4] * 4
    assert fingerprint.largest == 90


@pytest.mark.parametrize("count", [1, 3, 4, 5, 30, 61])
def test_few_layers_are_read_by_the_key_and_each_by_some_key(count: int) -> None:
    caches = [random_cache(seed=layer) for layer in range(count)]
    layers = layers_of(*caches)
    seen = set()
    for last in range(256):
        chosen = list(Fingerprints(layers, reads_all=False)._chosen(block(1, bytes([0, last]))))
        assert 1 <= len(chosen) <= LAYERS_OF_A_BLOCK
        seen |= set(chosen)
    assert seen == set(range(count))
    assert list(Fingerprints(layers, reads_all=True)._chosen(block(1))) == list(range(count))
    take(layers, block(1, bytes([0, 77])), reads_all=False)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_bytes_of_eight_bit_floats_are_read_as_numbers(name: str) -> None:
    dtype = torch.float8_e4m3fn if name == "fp8" else torch.float8_e5m2
    cache = torch.full(SHAPES["blocks first"], 1.5).to(dtype).view(torch.uint8)
    assert take(layers_of(cache), block(1), cache_dtype=name)[0].largest == 1.5


@pytest.mark.parametrize(
    "layers",
    [layers_of(random_cache(), of=MambaSpec), layers_of(random_cache(), of=CrossAttentionSpec), layers_of()],
    ids=["a state", "cross attention", "no layer on this rank"],
)
def test_groups_without_tokens_prefixes_are_left_out(layers: Layers) -> None:
    assert not Fingerprints(layers, reads_all=True).can_read(block(1))
    assert not Fingerprints(layers, reads_all=True).can_read(Block(b"", 9, 1, 0))


def test_layers_of_a_draft_model_are_left_out() -> None:
    layers = layers_of(random_cache(), random_cache(), random_cache(), hidden=2)
    assert layers.count(0) == 2


def test_a_cache_without_the_blocks_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"no dimension of \(3, 5\) has the KV cache's 70 blocks"):
        layers_of(torch.zeros(3, 5)).pages(0, 0)


def test_a_cache_may_be_that_of_the_first_virtual_engine() -> None:
    cache = random_cache()
    assert take(layers_of([cache]), block(2))[0].digest == take(layers_of(cache), block(2))[0].digest
