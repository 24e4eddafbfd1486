"""Blocks between host memory and a device arrive bit by bit, whatever of what is queued runs late or early."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvobs.blocks import copy, plans
from kvobs.blocks import device as device_copies
from kvobs.blocks.copy import copy_kv_blocks
from kvobs.blocks.device import SLOTS, Copier, Device
from tests.support.caches import BLOCK_SHAPES, DTYPES, by_a_loop, caches, memory, twin
from tests.support.lazy_device import GARBAGE, LazyDevice

Check = Callable[[], None]


@contextmanager
def on(device: LazyDevice, chunk_bytes: int = 256, **limits: int) -> Iterator[Copier]:
    """Have every copy take place between host memory and this device."""
    copier = Copier(device, chunk_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "_device", lambda *_: torch.device("cuda", 0))
        patch.setattr(device_copies, "copier_of", lambda _: copier)
        patch.setattr(plans, "_SMALL_PIECE", 1)
        for name, value in limits.items():
            patch.setattr(plans, name, value)
        yield copier


@torch.inference_mode()
def on_the_way(device: LazyDevice, cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of the device whose bytes are still to be written by the current stream."""
    there = twin(cache)
    memory(there).fill_(GARBAGE)
    device.current.queue(lambda: memory(there).copy_(memory(cache)))
    return there


def d2h(
    device: LazyDevice, src: dict[str, Any], dst: dict[str, Any], pairs: list[tuple[int, int]], dims: dict[str, int]
) -> Check:
    expected = {name: by_a_loop(src[name], dst[name], pairs, dims[name]) for name in src}
    live = {name: on_the_way(device, cache) for name, cache in src.items()}
    copy_kv_blocks(live, dst, [s for s, _ in pairs], [d for _, d in pairs], "d2h", block_dim=dims)
    arrived = {name: memory(cache).clone() for name, cache in dst.items()}  # read at once, and not later
    with torch.inference_mode():
        for cache in live.values():
            device.current.queue(partial(memory(cache).fill_, GARBAGE))

    def check() -> None:
        for name in src:
            assert torch.equal(arrived[name], memory(expected[name]))

    return check


def h2d(
    device: LazyDevice, src: dict[str, Any], dst: dict[str, Any], pairs: list[tuple[int, int]], dims: dict[str, int]
) -> Check:
    expected = {name: by_a_loop(src[name], dst[name], pairs, dims[name]) for name in src}
    live = {name: on_the_way(device, cache) for name, cache in dst.items()}
    copy_kv_blocks(src, live, [s for s, _ in pairs], [d for _, d in pairs], "h2d", block_dim=dims)
    for cache in src.values():
        memory(cache).fill_(GARBAGE)
    read: dict[str, torch.Tensor] = {}

    def note(name: str, cache: torch.Tensor) -> None:
        read[name] = memory(cache).clone()

    for name, cache in live.items():
        device.current.queue(partial(note, name, cache))

    def check() -> None:
        device.current.synchronize()
        for name in src:
            assert torch.equal(read[name], memory(expected[name]))

    return check


@given(st.data(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([16, 100, 256, 4096]))
@settings(max_examples=300)
def test_every_byte_arrives_in_calls_one_after_the_other(
    data: st.DataObject, eager: bool, pinned: bool, batched: bool, chunk_bytes: int
) -> None:
    """Both ways in turns with the same buffers; any layout, any dtype, any ids; each layer its own."""
    device = LazyDevice(eager=eager, pinned=pinned, batched=batched)
    checks = []
    with on(device, chunk_bytes, BATCH_PIECES=7):
        for direction in data.draw(st.lists(st.sampled_from([d2h, h2d]), min_size=1, max_size=3)):
            src_blocks, dst_blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
            ids = st.tuples(st.integers(0, src_blocks - 1), st.integers(0, dst_blocks - 1))
            src, dst, dims = {}, {}, {}
            for layer in "abc"[: data.draw(st.integers(1, 3))]:
                dtype, shape = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BLOCK_SHAPES))
                dims[layer] = data.draw(st.integers(0, len(shape)))
                src[layer] = data.draw(caches(src_blocks, dtype, shape, dims[layer]))
                dst[layer] = data.draw(caches(dst_blocks, dtype, shape, dims[layer]))
            checks.append(direction(device, src, dst, data.draw(st.lists(ids, min_size=1, max_size=12)), dims))
    for check in checks:
        check()


def dense(blocks: int, layers: int = 3) -> dict[str, torch.Tensor]:
    return {str(i): torch.randint(0, 256, (blocks, 64), dtype=torch.uint8) for i in range(layers)}


SCATTERED = [(7, 0), (3, 2), (1, 4), (5, 6), (0, 7)]


@pytest.mark.parametrize("direction", [d2h, h2d])
@pytest.mark.parametrize(
    ("has", "limits", "calls"),
    [
        ({"pinned": True, "batched": True}, {"BATCH_PIECES": 10}, ["batch"] * 2),
        ({"pinned": True}, {}, ["copy"] * 15),
        ({"pinned": True}, {"_FEW_PIECES": 14}, ["upload", *["copy"] * 4]),
        ({"batched": True}, {}, ["upload", *["copy"] * 4]),
    ],
)
def test_each_path_is_taken_and_right(
    has: dict[str, bool], limits: dict[str, int], calls: list[str], direction: Any
) -> None:
    """Staged: five blocks of three layers, 15 x 64 bytes, in chunks of four."""
    device, layers = LazyDevice(**has), dense(8)
    with on(device, **limits):
        direction(device, layers, dense(8), SCATTERED, dict.fromkeys(layers, 0))()
    kernel = {"d2h": "gather", "h2d": "scatter"}[direction.__name__]
    assert [call for call in device.calls if call != kernel] == calls
    # A layer whose blocks are in two chunks is gathered or scattered twice.
    assert device.calls.count(kernel) == (6 if "upload" in calls else 0)


def test_buffers_are_made_once_and_grow_for_a_block_that_is_larger() -> None:
    device = LazyDevice()
    with on(device, 256):
        for direction in (h2d, d2h, h2d):
            direction(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0))()
        assert device.allocated == 3 * 256
        one = {"a": torch.arange(2 * 1000, dtype=torch.float32).view(2, 1000)}
        first = h2d(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0))
        second = h2d(device, one, {"a": torch.zeros(3, 1000)}, [(0, 2), (1, 1)], {"a": 0})
        first()
        second()
        assert device.allocated == 3 * (256 + 4000)


def test_after_a_failure_nothing_is_left_in_the_queue() -> None:
    device = LazyDevice()
    layers, pairs, dims = dense(8), SCATTERED, dict.fromkeys("012", 0)
    with on(device) as copier, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "record", lambda _: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            h2d(device, dense(8), dense(8), pairs, dims)
        assert device.side._done == device.side.queued
        assert not copier._lock.locked()
        patch.undo()
    with on(device):
        d2h(device, layers, dense(8), pairs, dims)()


def test_one_call_at_a_time() -> None:
    device = LazyDevice(pinned=True)
    with on(device) as copier, pytest.MonkeyPatch.context() as patch:
        locked: list[bool] = []
        queue = device.copy

        def copy(src: torch.Tensor, dst: torch.Tensor) -> None:
            locked.append(copier._lock.locked())
            queue(src, dst)

        patch.setattr(device, "copy", copy)
        d2h(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0))()
        assert locked == [True] * 15
        assert not copier._lock.locked()


# --- what CUDA is asked for, in which order

GPU = torch.device("cuda", 1)


class Recorded:
    """A stream or an event that notes its calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def __getattr__(self, method: str) -> Any:
        return lambda *others: self._log.append(" ".join([self.name, method, *(other.name for other in others)]))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    events = iter(range(9))

    @contextmanager
    def stream(which: Recorded) -> Any:
        log.append(f"enter {which.name}")
        yield
        log.append(f"leave {which.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorded(log, f"side@{device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded(log, f"current@{device}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Recorded(log, f"event{next(events)}"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return log


def test_the_side_stream_waits_for_the_current_one_and_the_current_one_for_it(log: list[str]) -> None:
    device = Device(GPU)
    with device.ordered():
        log.append("work")
    assert log == [
        "side@cuda:1 wait_stream current@cuda:1",
        "enter side@cuda:1",
        "work",
        "leave side@cuda:1",
        "current@cuda:1 wait_stream side@cuda:1",
    ]


def test_marks_are_of_the_side_stream_and_the_host_waits_for_them(log: list[str]) -> None:
    device = Device(GPU)
    for slot in range(SLOTS):
        device.record(slot)
    device.wait(1)
    device.synchronize()
    assert log == [
        "event0 record side@cuda:1",
        "event1 record side@cuda:1",
        "event1 synchronize",
        "side@cuda:1 synchronize",
    ]


def test_operations_do_what_they_say(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, but for the pinning."""
    pinned: list[torch.Tensor] = []

    def pin_memory(cache: torch.Tensor) -> torch.Tensor:
        pinned.append(cache)
        return cache

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    device = Device(torch.device("cpu"))
    ids = device.upload(np.array([3, 1]))
    assert ids.tolist() == [3, 1]
    assert len(pinned) == 1
    chunk, here = device.memory(128), torch.arange(128, dtype=torch.uint8)
    assert chunk.dtype == torch.uint8
    device.copy(here, chunk)
    assert torch.equal(chunk, here)
    cache = torch.arange(40).view(5, 2, 4).transpose(1, 2)
    blocks = chunk.view(torch.int64).view(2, 4, 2)
    device.gather(cache, ids, blocks)
    assert torch.equal(blocks, cache[[3, 1]])
    device.scatter(blocks, ids.flip(0), cache)
    assert torch.equal(cache[[1, 3]], blocks)
    assert not device.is_pinned(here)


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("names", [{"swap_blocks_batch": "op"}, {}, None])
def test_the_batched_copy_is_vllms_where_it_has_one_for_cuda(
    names: dict[str, str] | None, is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: without vLLM."""
    operations, platforms = SimpleNamespace(**names or {}), SimpleNamespace(is_cuda_alike=lambda: is_cuda)
    vllm = None if names is None else SimpleNamespace(_custom_ops=operations)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platforms))
    operation: Any = device_copies._batched_copy()
    assert operation == (names["swap_blocks_batch"] if names and is_cuda else None)
