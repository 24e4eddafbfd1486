"""Pieces and chunks hold every byte once, and the path is the one the memory allows."""

import ctypes
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

from kvobs.blocks import plans
from kvobs.blocks.copy import _layers
from kvobs.blocks.layout import Layer, Run
from kvobs.blocks.plans import CopyPath, Has, choose, chunks_of, path_of, pieces_of, pointers
from tests.support.caches import BLOCK_SHAPES, DTYPES, by_a_loop, caches, memory, twin


def layer_of(src: torch.Tensor, dst: torch.Tensor, block_dim: int = 0) -> Layer:
    return _layers([("a", src, dst)], block_dim)[0]


@st.composite
def runs(draw: st.DrawFn, src_blocks: int, dst_blocks: int) -> list[Run]:
    """Draw runs that write no block twice."""
    found, free = [], 0
    while free < dst_blocks:
        dst = draw(st.integers(free, dst_blocks - 1))
        src = draw(st.integers(0, src_blocks - 1))
        found.append(Run(src, dst, draw(st.integers(1, min(dst_blocks - dst, src_blocks - src)))))
        free = dst + found[-1].length + draw(st.integers(0, dst_blocks))
    return found


def pairs(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.src + i, run.dst + i) for run in runs for i in range(run.length)]


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(BLOCK_SHAPES), st.integers(1, 8), st.integers(1, 8))
def test_pieces_are_every_byte_of_the_blocks_once(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...], src_blocks: int, dst_blocks: int
) -> None:
    block_dim = data.draw(st.integers(0, len(shape)))
    src, dst = (data.draw(caches(blocks, dtype, shape, block_dim)) for blocks in (src_blocks, dst_blocks))
    layer, found = layer_of(src, dst, block_dim), data.draw(runs(src_blocks, dst_blocks))
    assume(layer.layout.dense)
    expected = by_a_loop(src, dst, pairs(found), block_dim)
    pieces = pieces_of(layer.layout, found)
    assert pieces.sizes.sum() == len(pairs(found)) * layer.layout.block_bytes
    [at_once] = pointers([layer], found)
    assert (at_once.src - src.data_ptr()).tolist() == pieces.src.tolist()
    for to, source, size in zip(at_once.dst.tolist(), at_once.src.tolist(), at_once.sizes.tolist(), strict=True):
        ctypes.memmove(to, source, size)
    assert torch.equal(memory(dst), memory(expected))


@pytest.mark.parametrize(
    ("src", "dst", "block_dim", "sizes"),
    [
        (torch.zeros(9, 4), torch.zeros(9, 4), 0, [48, 16]),
        (torch.zeros(9, 5)[:, :4], torch.zeros(9, 4), 0, [16] * 4),
        (torch.zeros(9, 4), torch.zeros(9, 5)[:, :4], 0, [16] * 4),
        (torch.zeros(2, 9, 4), torch.zeros(2, 9, 4), 1, [48, 16] * 2),
        (torch.zeros(9, 3, 4), torch.zeros(9, 4, 4)[:, :3], 0, [48] * 4),
    ],
)
def test_pieces_are_as_long_as_they_can(src: torch.Tensor, dst: torch.Tensor, block_dim: int, sizes: list[int]) -> None:
    assert pieces_of(layer_of(src, dst, block_dim).layout, [Run(0, 4, 3), Run(8, 1, 1)]).sizes.tolist() == sizes


def test_no_call_has_more_pieces_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BATCH_PIECES", 4)
    batches = pointers([layer_of(torch.zeros(9, 4), torch.zeros(9, 4))] * 3, [Run(0, 0, 1), Run(2, 1, 2), Run(8, 8, 1)])
    assert [len(batch.sizes) for batch in batches] == [4, 4, 1]


def kib(blocks: int, size: int, *, layers: int = 1) -> list[Layer]:
    cache = torch.empty(blocks, size << 10, dtype=torch.uint8)
    return [layer_of(cache, twin(cache))] * layers


PERMUTED = [layer_of(torch.empty(4, 64, 256), torch.empty(4, 256, 64).transpose(1, 2))]
ONE, FOUR = [Run(0, 0, 1)], [Run(0, 0, 4)]
SINGLES = [Run(i, i, 1) for i in range(0, 16, 2)]

NINE = torch.empty(64, 9, dtype=torch.int16)[:, :8]
ODD = [layer_of(NINE, twin(NINE))]  # not of eight bytes
EVERY = Has(batch=True, kernel=True)


@pytest.mark.parametrize(
    ("layers", "found", "direction", "pinned", "path"),
    [
        (kib(4, 64), ONE, "h2d", False, CopyPath.STAGED),
        (kib(4, 64), ONE, "h2d", True, CopyPath.BATCH),
        (kib(16, 27, layers=8), SINGLES, "h2d", True, CopyPath.KERNEL),  # 64 pieces
        (kib(16, 27, layers=8), SINGLES, "d2h", True, CopyPath.BATCH),
        (kib(16, 27, layers=8), FOUR, "h2d", True, CopyPath.BATCH),  # eight pieces of 108 KiB
        (kib(16, 3, layers=8), SINGLES, "d2h", True, CopyPath.STAGED),
        ([*kib(64, 1), *ODD], [Run(i, i, 1) for i in range(0, 64, 2)], "h2d", True, CopyPath.STAGED),
        ([*kib(4, 64), *PERMUTED], ONE, "h2d", True, CopyPath.STAGED),
    ],
)
def test_the_path_is_that_of_pieces_in_memory(
    layers: list[Layer], found: list[Run], direction: str, pinned: bool, path: CopyPath
) -> None:
    assert choose(layers, found, direction, pinned=pinned, has=EVERY) is path


@pytest.mark.parametrize("has", [Has(*both) for both in itertools.product([True, False], repeat=2)])
@pytest.mark.parametrize(("direction", "small"), [("h2d", 28 << 10), ("d2h", 4 << 10)])
def test_the_path_at_every_border(direction: str, small: int, has: Has) -> None:
    """One byte less than the border in all pieces together makes them small."""
    for pieces in (1, 2, 63, 64, 65, 200, 201, 8192, 8193, 10**6):
        large = CopyPath.BATCH if has.batch else CopyPath.SINGLE if pieces <= 200 else CopyPath.STAGED
        many = CopyPath.KERNEL if has.kernel and direction == "h2d" else CopyPath.STAGED
        border = pieces * small
        for size in (pieces, border - 1, border, border + 1, 99 * border):
            assert path_of(direction, pieces, size, has) is (many if pieces >= 64 and size < border else large)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 40), st.integers(100, 400))
def test_chunks_hold_every_block_once_in_order_and_fit(block_bytes: list[int], blocks: int, chunk_bytes: int) -> None:
    chunks = chunks_of(block_bytes, blocks, chunk_bytes)
    packed = [(part.layer, block) for chunk in chunks for part in chunk for block in range(part.first, part.last)]
    assert packed == [(layer, block) for layer in range(len(block_bytes)) for block in range(blocks)]
    for chunk in chunks:
        end = 0
        for part in chunk:
            assert part.offset % 8 == 0
            assert part.offset >= end
            end = part.end
            assert end == part.offset + (part.last - part.first) * block_bytes[part.layer]
        assert end <= chunk_bytes
    for chunk, following in itertools.pairwise(chunks):
        end = chunk[-1].end
        assert end + -end % 16 + block_bytes[following[0].layer] > chunk_bytes
