"""What CUDA is asked for, in which order; its streams and events are recorded."""

from __future__ import annotations

import subprocess
import sys
import types
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvobs.blocks.accelerator import SLOTS, Cuda

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
    device = Cuda(GPU)
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
    device = Cuda(GPU)
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
    device = Cuda(torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("cuda", "operation", "expected"), [(True, "op", "op"), (False, "op", None), (True, None, None)]
)
def test_the_batched_copy_is_vllms_where_it_has_one_for_cuda(
    monkeypatch: pytest.MonkeyPatch, log: list[str], cuda: bool, operation: str | None, expected: str | None
) -> None:
    operations = types.ModuleType("vllm._custom_ops")
    if operation:
        operations.swap_blocks_batch = operation  # type: ignore[attr-defined]
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cuda_alike=lambda: cuda)  # type: ignore[attr-defined]
    vllm = types.ModuleType("vllm")
    vllm._custom_ops = operations  # type: ignore[attr-defined]
    for module in (vllm, operations, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Any = Cuda(GPU).batched_copy
    assert found == expected


def test_without_vllm_there_is_no_batched_copy() -> None:
    hidden = "import sys; sys.modules['vllm'] = None; from kvobs.blocks.accelerator import _batched_copy; "
    hidden += "assert _batched_copy() is None"
    subprocess.run([sys.executable, "-c", hidden], check=True, timeout=300)
