"""Blocks arrive bit by bit through the buffer, however large it is; on a machine with a GPU also to and from that."""

from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from kvobs.blocks import copy, staged
from kvobs.blocks.copy import _layer, copy_kv_blocks
from kvobs.blocks.layout import Layer
from kvobs.blocks.staged import copy_staged
from tests.support.caches import BLOCK_SHAPES, DTYPES, by_a_loop, caches, memory, twin

PLACES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GARBAGE = 0xA5
UNCACHED = staged._buffer.__wrapped__


@contextmanager
def staging(buffer_bytes: int = 256, place: str = "cpu") -> Iterator[None]:
    """Copy through a buffer of this size, as between host memory and a device, also within host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "_device", lambda *_: torch.device(place))
        patch.setattr(staged, "BUFFER_BYTES", buffer_bytes)
        yield


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@given(st.data())
def test_every_byte_arrives_and_no_other_changes(direction: str, place: str, data: st.DataObject) -> None:
    """Any layout, dtype and ids, each layer its own; at return the source may change and the destination be read."""
    src_place, dst_place = ("cpu", place) if direction == "h2d" else (place, "cpu")
    src_blocks, dst_blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    src, dst, dims = {}, {}, {}
    with torch.inference_mode(data.draw(st.booleans())):
        for layer in "abc"[: data.draw(st.integers(1, 3))]:
            dtype, shape = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BLOCK_SHAPES))
            dims[layer] = data.draw(st.integers(0, len(shape)))
            src[layer] = twin(data.draw(caches(src_blocks, dtype, shape, dims[layer])), src_place)
            dst[layer] = twin(data.draw(caches(dst_blocks, dtype, shape, dims[layer])), dst_place)
    ids = st.tuples(st.integers(0, src_blocks - 1), st.integers(0, dst_blocks - 1))
    pairs = data.draw(st.lists(ids, min_size=1, max_size=12))
    before = {layer: twin(cache) for layer, cache in src.items()}
    expected = {layer: by_a_loop(before[layer], twin(dst[layer]), pairs, dims[layer]) for layer in src}
    with staging(data.draw(st.sampled_from([1, 16, 100, 4096])), place):
        copy_kv_blocks(src, dst, [s for s, _ in pairs], [d for _, d in pairs], direction, block_dim=dims)
    with torch.inference_mode():
        after = {layer: memory(cache).clone() for layer, cache in src.items()}
        for cache in src.values():
            memory(cache).fill_(GARBAGE)
    for layer, cache in dst.items():
        assert torch.equal(memory(cache).cpu(), memory(expected[layer]))
        assert torch.equal(after[layer].cpu(), memory(before[layer]))


def dense(blocks: int, size: int = 64) -> dict[str, torch.Tensor]:
    return {layer: torch.randint(0, 256, (blocks, size), dtype=torch.uint8) for layer in "ab"}


def test_one_buffer_is_made_and_again_only_for_a_larger_block() -> None:
    staged._buffer.cache_clear()
    made = []
    with staging(buffer_bytes=256):
        for size in (64, 256, 257, 257):
            for direction in ("h2d", "d2h"):
                copy_kv_blocks(dense(9, size), dense(9, size), range(9), range(9), direction)
                made.append(staged._buffer.cache_info().misses)
    assert made == [1] * 4 + [2] * 4


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_each_step_is_on_one_device_and_the_buffer_pinned(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without bytes say where they are; torch refuses an operation on two devices, also without a GPU."""
    pinned = []

    def buffer(size: int, *, is_pinned: bool) -> torch.Tensor:
        pinned.append(is_pinned)
        return UNCACHED(size, is_pinned=is_pinned)

    layout = _layer("a", torch.zeros(4, 2), torch.zeros(4, 2), 0).layout
    with FakeTensorMode(), torch.device("cuda:0"), monkeypatch.context() as patch:
        patch.setattr(staged, "_buffer", buffer)
        here, there = torch.empty(4, 2, device="cpu"), torch.empty(4, 2, device="cuda:1")
        src, dst = (here, there) if direction == "h2d" else (there, here)
        copy_staged([Layer("a", src, dst, layout)], np.array([1, 2]), np.array([0, 3]), direction)
    assert pinned == [True]


def test_the_buffer_is_pinned_host_memory_for_any_torch_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **how: (args, how))
    asked = {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}
    assert UNCACHED(5, is_pinned=True) == ((5,), asked)


def test_calls_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads would write to the same buffer."""
    locked = []

    def buffer(size: int, *, is_pinned: bool) -> torch.Tensor:
        locked.append(staged._LOCK.locked())
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(staged, "_buffer", buffer)
    with staging():
        copy_kv_blocks(dense(2), dense(2), [0], [1], "h2d")
    assert locked == [True]
    assert not staged._LOCK.locked()
