"""Copies between host memory and a stand-in for a device, and checks of every byte that has arrived."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kvobs.blocks import copy, plans
from kvobs.blocks import device as device_copies
from kvobs.blocks.copy import copy_kv_blocks
from kvobs.blocks.device import Copier
from kvobs.schema.signals import DIRECTIONS
from tests.support.caches import by_a_loop, memory, twin
from tests.support.lazy_device import GARBAGE, LazyDevice

Check = Callable[[], None]
Caches = dict[str, torch.Tensor]
Pairs = list[tuple[int, int]]


@contextmanager
def on(device: LazyDevice, chunk_bytes: int = 256, small_piece: int = 1, **limits: int) -> Iterator[Copier]:
    """Have every copy take place between host memory and this device."""
    copier = Copier(device, chunk_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "_device", lambda *_: torch.device("cuda", 0))
        patch.setattr(device_copies, "copier_of", lambda _: copier)
        patch.setattr(plans, "_SMALL_PIECE", dict.fromkeys(DIRECTIONS, small_piece))
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


def d2h(device: LazyDevice, src: Caches, dst: Caches, pairs: Pairs, dims: dict[str, int]) -> Check:
    expected = {name: by_a_loop(src[name], dst[name], pairs, dims[name]) for name in src}
    live = {name: on_the_way(device, cache) for name, cache in src.items()}
    copy_kv_blocks(live, dst, [s for s, _ in pairs], [d for _, d in pairs], "d2h", block_dim=dims)
    arrived = {name: memory(cache).clone() for name, cache in dst.items()}  # read at once, and not later
    with torch.inference_mode():
        for cache in live.values():
            device.current.queue(partial(memory(cache).fill_, GARBAGE))

    def check() -> None:
        for name in src:
            assert torch.equal(arrived[name], memory(expected[name])), f"{name}: not equal to that of a loop"

    return check


def h2d(
    device: LazyDevice, src: Caches, dst: Caches, pairs: Pairs, dims: dict[str, int], *, stays: bool = False
) -> Check:
    expected = {name: by_a_loop(src[name], dst[name], pairs, dims[name]) for name in src}
    live = {name: on_the_way(device, cache) for name, cache in dst.items()}
    src_ids, dst_ids = zip(*pairs, strict=True)
    copy_kv_blocks(src, live, src_ids, dst_ids, "h2d", block_dim=dims, source_stays=stays)
    for cache in () if stays else src.values():
        memory(cache).fill_(GARBAGE)
    read: dict[str, torch.Tensor] = {}

    def note(name: str, cache: torch.Tensor) -> None:
        read[name] = memory(cache).clone()

    for name, cache in live.items():
        device.current.queue(partial(note, name, cache))

    def check() -> None:
        device.current.synchronize()
        for name in src:
            assert torch.equal(read[name], memory(expected[name])), f"{name}: not equal to that of a loop"

    return check
