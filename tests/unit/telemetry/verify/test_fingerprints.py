"""Fingerprints of blocks in caches of the shapes that vLLM's attention backends have."""

from itertools import repeat
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec

from kvobs.telemetry.verify.fingerprints import AT_A_TIME, LAYERS_OF_A_BLOCK, VALUES, Fingerprints, Layers
from kvobs.telemetry.verify.noted import Fingerprint, NotedBlocks
from kvobs.telemetry.verify.sample import Block
from tests.support.layers import BLOCKS, SHAPES, layers_of, random_cache


def block(number: int, key: bytes = b"\0" * 8) -> Block:
    return Block(key, 0, number, 0)


def take(layers: Layers, *blocks: Block, reads_all: bool = True) -> list[Fingerprint]:
    taken = Fingerprints(layers, reads_all=reads_all).take(blocks)
    assert taken.is_ready()
    return taken.read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_digest_changes_with_each_byte_and_no_other_block(shape: Any, dtype: Any, data: Any) -> None:
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


def test_values_are_of_all_layers_and_the_largest_of_all_numbers() -> None:
    caches = [torch.full(SHAPES["blocks first"], float(layer), dtype=torch.float32) for layer in range(4)]
    caches[2][7, 1, 3, 0, 5] = -90
    fingerprint = take(layers_of(*caches), block(7))[0]
    assert [int((fingerprint.values == layer).sum()) for layer in range(4)] == [VALUES // 4] * 4
    assert fingerprint.largest == 90


@pytest.mark.parametrize("layers", [1, 3, 4, 32, 80])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_each_token_of_a_block_is_among_its_values(layers: int, tokens: int) -> None:
    for before, after in (((BLOCKS, 2), (2, 8)), ((BLOCKS, 3), (8,)), ((BLOCKS,), (36,))):
        ramp = torch.arange(1.0, tokens + 1).reshape(tokens, *[1] * len(after)).expand(*before, tokens, *after)
        found = take(layers_of(*[ramp] * layers), block(1))[0].values
        counted = [int((found == token + 1).sum()) for token in range(tokens)]
        assert min(counted) >= VALUES // layers * layers // tokens, counted


def test_k_and_v_of_each_head_are_among_the_values() -> None:
    numbers = torch.arange(16.0).reshape(2, 1, 8, 1).expand(BLOCKS, 2, 16, 8, 32) + 1
    assert set(take(layers_of(*[numbers] * 4), block(1))[0].values.tolist()) == {float(n + 1) for n in range(16)}


TOKENS = 32
CACHES = {"bfloat16": torch.bfloat16, "FP8": torch.float8_e4m3fn, "FP8 (e5m2)": torch.float8_e5m2}


def computed(dtype: torch.dtype, *, is_even: bool = True) -> Any:
    """Return pages of blocks, layers, K and V, tokens, heads and columns; uneven ones have a column of large K."""
    numbers = torch.randn((BLOCKS, 4, 2, TOKENS, 2, 16), generator=torch.Generator().manual_seed(4))
    if not is_even:
        numbers[:, :, 0, :, :, 5] *= 15
    return numbers.to(dtype).float()


def outcomes(noted: Any, loaded: Any, dtype: torch.dtype) -> set[str]:
    """Return the outcomes of loaded pages."""
    name = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}.get(dtype, "auto")
    read, blocks = [], [block(number, bytes([number] * 8)) for number in range(BLOCKS)]
    for pages in (noted, loaded):
        caches = pages.to(dtype).view(dtype if name == "auto" else torch.uint8).unbind(1)
        read.append(take(layers_of(*caches, formats=repeat(name)), *blocks))
    found = NotedBlocks()
    for each, fingerprint in zip(blocks, read[0], strict=True):
        found.note(0, each.key, fingerprint)
    return {found.compare(0, each.key, fingerprint) for each, fingerprint in zip(blocks, read[1], strict=True)}


def stepped(numbers: Any, steps: int, *dims: int) -> Any:
    """Return numbers that were rounded to as many steps on each side of 0, with the scale of some dimensions."""
    scale = numbers.abs().amax(dims, keepdim=True) / steps
    return (numbers / scale).round() * scale


LOSSY = {
    "FP8": lambda numbers: numbers.to(torch.float8_e4m3fn).float(),
    "FP8 (e5m2)": lambda numbers: numbers.to(torch.float8_e5m2).float(),
    "INT8 of a block": lambda numbers: stepped(numbers, 127, 2, 3, 4, 5),
    "CacheGen, 32 bins": lambda numbers: stepped(numbers, 15, 4, 5),
    "CacheGen, 16 bins": lambda numbers: stepped(numbers, 7, 4, 5),
}
WITH_ITS_SCALE = ["FP8", "FP8 (e5m2)", "INT8 of a block"]
"""Those that leave something of the usual numbers beside large ones."""


@pytest.mark.parametrize("dtype", CACHES)
def test_blocks_that_were_compressed_are_lossy(dtype: str) -> None:
    has_room = dtype != "FP8 (e5m2)"  # its numbers are too coarse for few steps
    for is_even, codecs in ((True, list(LOSSY) if has_room else WITH_ITS_SCALE), (False, WITH_ITS_SCALE)):
        noted = computed(CACHES[dtype], is_even=is_even)
        found = {codec: outcomes(noted, LOSSY[codec](noted), CACHES[dtype]) for codec in codecs}
        assert set.union(*found.values()) <= {"match", "lossy"}, found
        assert dtype != "bfloat16" or set.union(*found.values()) == {"lossy"}


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("is_even", [True, False])
def test_blocks_that_differ_in_last_bits_are_lossy(dtype: str, is_even: bool) -> None:
    noted = computed(CACHES[dtype], is_even=is_even)
    raw = noted.to(CACHES[dtype]).view(torch.int16 if dtype == "bfloat16" else torch.uint8)
    differs = torch.rand(raw.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    loaded = torch.where(differs, raw ^ 1, raw).view(CACHES[dtype]).float()
    assert outcomes(noted, loaded, CACHES[dtype]) == {"lossy"}


def zeros(loaded: Any, tokens: slice) -> None:
    loaded[:, :, :, tokens] = 0


def anothers(loaded: Any, tokens: slice) -> None:
    loaded[:, :, :, tokens] = loaded.roll(1, 0)[:, :, :, tokens]


def stale(loaded: Any, tokens: slice) -> None:
    loaded[:, :, :, tokens] = loaded.roll(1, 3)[:, :, :, tokens]


@pytest.mark.parametrize("fault", [zeros, anothers, stale], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("dtype", CACHES)
def test_blocks_with_wrong_tokens_are_found(fault: Any, dtype: str) -> None:
    noted = computed(CACHES[dtype])
    for wrong in (2, 3, 8, 16, 24, 31):
        for tokens in (slice(TOKENS - wrong, TOKENS), slice(0, wrong)):
            loaded = noted.clone()
            fault(loaded, tokens)
            assert outcomes(noted, loaded, CACHES[dtype]) == {"mismatch"}, tokens


def test_a_flipped_bit_that_is_among_the_values_is_found() -> None:
    noted = computed(torch.bfloat16)[:1].expand(BLOCKS, -1, -1, -1, -1, -1)
    seen = take(layers_of(*noted.to(torch.bfloat16).unbind(1)), block(1))[0].values
    loaded = noted.to(torch.bfloat16).contiguous()
    loaded.view(torch.int16)[noted == seen[5]] ^= 1 << 13  # of the exponent
    assert outcomes(noted, loaded.float(), torch.bfloat16) == {"mismatch"}


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
    assert take(layers_of(cache, formats=[name]), block(1))[0].largest == 1.5


def packed(tokens: torch.Tensor) -> torch.Tensor:
    """Return the bytes of tokens as in fp8_ds_mla: numbers of eight bits, their four scales, numbers of 16 bits."""
    parts = tokens[..., :512].reshape(*tokens.shape[:-1], 4, 128)
    scales = parts.abs().amax(-1, keepdim=True) / 448
    numbers = (parts / scales).flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)
    rest = tokens[..., 512:].to(torch.bfloat16).view(torch.uint8)
    return torch.cat([numbers, scales.flatten(-2).view(torch.uint8), rest], -1)


# Each has a packed cache: sparse MLA's, as its layer names it, or an indexer's, which names no format.
PACKED_LAYERS = {"fp8_ds_mla": ["fp8_ds_mla"], "an indexer": [""], "an FP8 layer and its indexer": ["fp8", ""]}


@pytest.mark.parametrize("formats", PACKED_LAYERS.values(), ids=PACKED_LAYERS)
@pytest.mark.parametrize("noise", [1e-4, 4e-3])
def test_packed_bytes_computed_elsewhere_are_lossy(noise: float, formats: list[str]) -> None:
    """Which differ in last bits: a store may be shared by engines, and outlive this one."""

    def caches(tokens: torch.Tensor) -> list[torch.Tensor]:
        plain = tokens.to(torch.float8_e4m3fn).view(torch.uint8)
        return [plain if each == "fp8" else packed(tokens) for each in formats]

    tokens = torch.randn((BLOCKS, TOKENS, 512 + 64), generator=torch.Generator().manual_seed(5))
    elsewhere = tokens * (1 + noise * torch.randn(tokens.shape, generator=torch.Generator().manual_seed(6)))
    found = NotedBlocks()
    blocks = [block(number, bytes([number] * 8)) for number in range(BLOCKS)]
    pages = caches(tokens), caches(elsewhere), caches(tokens.roll(1, 0))
    own, near, wrong = (take(layers_of(*each, formats=formats), *blocks) for each in pages)
    for each, fingerprint in zip(blocks, own, strict=True):
        found.note(0, each.key, fingerprint)
    compared = [[found.compare(0, each.key, one) for each, one in zip(blocks, of, strict=True)] for of in (near, wrong)]
    assert [set(each) for each in compared] == [{"lossy"}, {"mismatch"}]


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
