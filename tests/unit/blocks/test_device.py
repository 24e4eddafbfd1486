"""Blocks between host memory and a device arrive bit by bit, whatever of what is queued runs late or early."""

import gc
import sys
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from vllm.v1.kv_offload.cpu import swap_blocks_triton

from kvobs.blocks import device as device_copies
from kvobs.blocks import plans
from kvobs.blocks.copy import prepare
from kvobs.blocks.device import SLOTS, Copier, Device
from tests.support.caches import BLOCK_SHAPES, DTYPES, caches
from tests.support.device_copies import d2h, h2d, on
from tests.support.lazy_device import LazyDevice, Stream, move
from tests.support.pending import Signalled, in_collections


@given(st.data(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([16, 100, 256, 4096]))
@settings(max_examples=300)
def test_every_byte_arrives(data: st.DataObject, eager: bool, pinned: bool, batched: bool, chunk_bytes: int) -> None:
    """Both ways in turns with the same buffers; any layout, any dtype, any ids; each layer its own."""
    device = LazyDevice(eager=eager, pinned=pinned, batched=batched, kernel=data.draw(st.sampled_from([None, move])))
    checks = []
    with on(device, chunk_bytes, data.draw(st.sampled_from([1, 1 << 20])), BATCH_PIECES=7, _MANY_PIECES=3):
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


KERNEL: dict[str, Any] = {"pinned": True, "batched": True, "kernel": move}
STAGED = ["upload", "upload", *["copy"] * 4]
SCATTERED = [(7, 0), (3, 2), (1, 4), (5, 6), (0, 7)]


@pytest.mark.parametrize("direction", [d2h, h2d])
@pytest.mark.parametrize(
    ("has", "limits", "calls"),
    [
        ({"pinned": True, "batched": True}, {"BATCH_PIECES": 10}, ["batch"] * 2),
        (KERNEL, {"BATCH_PIECES": 10, "_MANY_PIECES": 15, "small_piece": 65}, ["kernel"] * 2),
        (KERNEL, {"BATCH_PIECES": 10, "_MANY_PIECES": 16, "small_piece": 65}, ["batch"] * 2),
        ({"pinned": True}, {}, ["copy"] * 15),
        ({"pinned": True}, {"_FEW_PIECES": 14}, STAGED),
        ({"batched": True}, {}, STAGED),
    ],
)
def test_each_path_copies_right(has: dict[str, Any], limits: dict[str, int], calls: list[str], direction: Any) -> None:
    """Staged: five blocks of three layers, 15 x 64 bytes, in chunks of four."""
    device, layers = LazyDevice(**has), dense(8)
    with on(device, **limits):
        direction(device, layers, dense(8), SCATTERED, dict.fromkeys(layers, 0))()
    if "kernel" in calls and direction is d2h:
        calls = STAGED  # vLLM's kernel is slower than the copy engines in this direction
    kernel = {"d2h": "gather", "h2d": "scatter"}[direction.__name__]
    assert [call for call in device.calls if call != kernel] == calls
    # A layer whose blocks are in two chunks is gathered or scattered twice.
    assert device.calls.count(kernel) == (6 if "upload" in calls else 0)


def test_buffers_are_made_once_and_grow_for_a_block_that_is_larger() -> None:
    device = LazyDevice()
    with on(device, 256):
        for direction in (h2d, d2h, h2d):
            direction(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0))()
        assert device.allocated == 4 * 256
        one = {"a": torch.arange(2 * 1000, dtype=torch.float32).view(2, 1000)}
        first = h2d(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0))
        second = h2d(device, one, {"a": torch.zeros(3, 1000)}, [(0, 2), (1, 1)], {"a": 0})
        first()
        second()
        assert device.allocated == 4 * (256 + 4000)


def test_after_a_failure_nothing_is_left_in_the_queue() -> None:
    device = LazyDevice()
    layers, pairs, dims = dense(8), SCATTERED, dict.fromkeys("012", 0)
    with on(device) as copier, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "record", lambda _: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            h2d(device, dense(8), dense(8), pairs, dims)
        assert all(side.done == side.queued for side in device._sides)
        assert not copier._lock.locked()
        patch.undo()
    with on(device):
        d2h(device, layers, dense(8), pairs, dims)()


def test_prepared_buffers_are_those_of_the_first_copy() -> None:
    device, caches = LazyDevice(), {"a": torch.zeros(2, 3, 1000, dtype=torch.uint8)}
    with on(device):
        for place, allocated in (("cpu", 0), ("cuda:0", 4 * 2000)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "device", torch.device(place))
                prepare(caches, block_dim=1)
            assert device.allocated == allocated
        prepare({})
        h2d(device, caches, {"a": caches["a"] + 1}, [(0, 2), (1, 1)], {"a": 1})()
    assert device.allocated == 4 * 2000


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(
    ("has", "limits", "waits"),
    [
        (KERNEL, {}, True),
        (KERNEL, {"_MANY_PIECES": 15, "small_piece": 65}, True),
        ({"pinned": True}, {}, True),
        ({}, {"chunk_bytes": 512}, False),  # two chunks
        ({}, {"chunk_bytes": 511}, True),  # three
    ],
)
def test_the_host_waits_where_it_must(has: dict[str, Any], limits: dict[str, int], waits: bool, stays: bool) -> None:
    """A third chunk has to wait for the first; else the host waits only for a source that may change at return."""
    device = LazyDevice(**has)
    with on(device, **limits):
        check = h2d(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0), stays=stays)
    assert (device.current.done > 0) == (waits and not (stays and has))
    check()


def bounced(copier: Copier, path: Any, layers: Any, runs: Any) -> None:
    """Copy from memory that is freed while its bytes are on the way."""
    chunks = [copier._device.pinned(layer.src.nbytes).view_as(layer.src).copy_(layer.src) for layer in layers]
    DIRECTLY(copier, path, [layer._replace(src=chunk) for layer, chunk in zip(layers, chunks, strict=True)], runs)


UPLOAD, DIRECTLY = Copier._upload, Copier._directly


@pytest.mark.parametrize(
    ("where", "name", "mistake", "has", "says"),
    [
        (Copier, "_memory_of", lambda self, _, size: self._device.memory(size), {}, "allocated on the caller's own"),
        (Copier, "_upload", lambda *args: UPLOAD(*args)[:1] * SLOTS, {}, "memory of another stream"),
        (Copier, "_directly", bounced, {"pinned": True, "batched": True}, "equal"),
        (device_copies, "choose", lambda *_, **__: plans.CopyPath.SINGLE, {}, "the host waits for pageable memory"),
        (LazyDevice, "ordered", lambda _: nullcontext(), {}, "queued before or after the block"),
        (Stream, "wait_stream", lambda *_: None, {}, "equal"),
        (LazyDevice, "wait", lambda *_: None, {}, "equal"),
    ],
)
def test_a_mistake_with_streams_is_found(where: Any, name: str, mistake: Any, has: dict[str, Any], says: str) -> None:
    """By words of the stand-in or by bytes that are not equal."""
    device = LazyDevice(**has)
    with on(device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, mistake)
        with pytest.raises(AssertionError, match=says):
            h2d(device, dense(8), dense(8), SCATTERED, dict.fromkeys("012", 0), stays=True)()


def test_calls_do_not_overlap() -> None:
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

    sides = iter(range(9))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorded(log, f"side{next(sides)}@{device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded(log, f"current@{device}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Recorded(log, f"event{next(events)}"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for operation in ("_batched_copy", "_kernel_copy"):  # vLLM can't be imported with such streams
        monkeypatch.setattr(device_copies, operation, lambda: None)
    return log


@pytest.mark.parametrize("fails", [False, True])
def test_side_streams_wait_for_the_current_one_and_it_for_them_whatever_happens(log: list[str], fails: bool) -> None:
    device = Device(GPU)
    with suppress(RuntimeError), device.ordered(), device.on(1):
        log.append("work")
        if fails:
            raise RuntimeError
    assert log == [
        *(f"side{slot}@cuda:1 wait_stream current@cuda:1" for slot in range(SLOTS)),
        *("enter side1@cuda:1", "work", *(() if fails else ["leave side1@cuda:1"])),
        *(f"current@cuda:1 wait_stream side{slot}@cuda:1" for slot in range(SLOTS)),
    ]


def test_marks_are_of_the_slots_streams_and_the_host_waits_for_them(log: list[str]) -> None:
    device = Device(GPU)
    for slot in range(SLOTS):
        device.record(slot)
    device.wait(1)
    device.synchronize()
    records = [f"event{slot} record side{slot}@cuda:1" for slot in range(SLOTS)]
    assert log == [*records, "event1 synchronize", *(f"side{slot}@cuda:1 synchronize" for slot in range(SLOTS))]


def test_a_tensor_is_asked_once_whether_it_is_pinned(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: next(answers))
    device, caches = Device(GPU), [torch.zeros(2), torch.zeros(2)]
    assert [device.is_pinned(cache) for cache in [*caches, *caches]] == [True, False, True, False]
    del caches[0]
    assert len(device._is_pinned) == 1


def test_the_end_of_a_tensor_loses_no_signal(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that it ran would swallow what a signal's handler raises."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    device = Device(GPU)
    with in_collections():
        for _ in range(100):
            cycle: list[Any] = [torch.zeros(2)]
            cycle.append(cycle)
            device.is_pinned(cycle[0])
            del cycle
            with pytest.raises(Signalled):
                gc.collect(0)
    assert device._is_pinned == {}


def test_operations_do_what_they_say(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, but for the pinning."""
    pinned: list[torch.Tensor] = []

    def pin_memory(cache: torch.Tensor) -> torch.Tensor:
        pinned.append(cache)
        return cache

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: (args, kwargs))
        assert Device.pinned(None, 5) == ((5,), {"dtype": torch.uint8, "pin_memory": True})  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("is_cuda", "is_rocm"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("names", [{"swap_blocks_batch": "op"}, {}, None])
def test_copies_of_many_pieces_are_vllms_where_it_has_them(
    names: dict[str, str] | None, has_triton: bool, is_cuda: bool, is_rocm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: without vLLM."""
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, is_cuda_alike=lambda: is_cuda or is_rocm)
    operations = SimpleNamespace(**names or {})
    modules: dict[str, Any] = {
        "vllm": SimpleNamespace(_custom_ops=operations),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.triton_utils": SimpleNamespace(HAS_TRITON=has_triton),
        "vllm.v1.kv_offload.cpu.swap_blocks_triton": operations,
    }
    for module, stands in modules.items():
        monkeypatch.setitem(sys.modules, module, None if names is None else stands)
    batched: Any = device_copies._batched_copy()
    assert batched == ("op" if names and (is_cuda or is_rocm) else None)
    kernel: Any = device_copies._kernel_copy()
    assert (kernel is not None) == bool(names and has_triton and is_cuda)


def test_the_kernel_gets_pinned_columns_and_steps_of_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory the host would wait. Here a pinned copy has the opposite sign."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.neg)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    monkeypatch.setattr(swap_blocks_triton, "swap_blocks_batch", lambda *columns, **how: calls.append((columns, how)))
    kernel: Any = device_copies._kernel_copy()
    for size, step in ((8, 8), (4096, 4096), (4104, 8192), (8192, 8192), (28664, 8192)):
        kernel(torch.tensor([16, 32]), torch.tensor([48, 64]), torch.tensor([8, size]))
        columns, how = calls.pop()
        assert [column.tolist() for column in columns] == [[-16, -32], [-48, -64], [-8, -size]]
        assert how == {"bytes_per_chunk": step}
