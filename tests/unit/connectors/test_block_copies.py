"""Each connector gets an operation: kvobs's in host memory, else vLLM's; what it moved is counted."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector import utils as stock

from kvobs.connectors.block_copies import BlockCopies, block_dims
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from tests.support.numbers import taken

BLOCKS = 16


class Vllms:
    """Stands for vLLM's operation, and does what it does on a device."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, src: Any, dst: Any, src_ids: Any, dst_ids: Any, direction: str) -> None:
        self.calls.append((src_ids, dst_ids, direction))


def counted(recorder: Recorder, index: int, direction: str) -> int:
    place = signals.PROCESS_WIDTH + index * signals.CONNECTOR_WIDTH + signals.slot(signals.BLOCK_COPY_BYTES, direction)
    return taken(recorder).counts.get(place, 0)


def caches(fill: float = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {layer: torch.full((BLOCKS, 2, 4), fill, dtype=torch.float16, device=device) for layer in ("a", "b")}


def test_in_host_memory_kvobs_does_the_work() -> None:
    recorder, vllms = Recorder(2), Vllms()
    src, dst = caches(1), caches()
    BlockCopies(recorder, BLOCKS).operation(1, vllms)(src, dst, [3, 4], [9, 1], "h2d")
    assert vllms.calls == []
    assert [int(dst["b"][i].sum()) for i in range(BLOCKS)] == [0, 8, *[0] * 7, 8, *[0] * 6]
    assert counted(recorder, 1, "h2d") == 2 * 2 * 2 * 4 * 2  # blocks, layers, shape of a block, bytes


def test_layers_of_several_sizes_are_counted_at_their_sizes() -> None:
    recorder = Recorder(1)
    src, dst = (caches() | {"b": torch.zeros((BLOCKS, 3), dtype=torch.float16)} for _ in range(2))
    BlockCopies(recorder, BLOCKS).operation(0, Vllms())(src, dst, [3], [9], "h2d")
    assert counted(recorder, 0, "h2d") == (2 * 4 + 3) * 2


@pytest.mark.parametrize(("is_stock", "device"), [(True, "cpu"), (False, "meta"), (True, "meta")])
def test_elsewhere_and_on_demand_vllm_does(is_stock: bool, device: str) -> None:
    recorder, vllms = Recorder(1), Vllms()
    copy = BlockCopies(recorder, BLOCKS, is_stock=is_stock).operation(0, vllms)
    copy(caches(device=device), caches(), [3], [9], direction="d2h")
    assert vllms.calls == [([3], [9], "d2h")]
    assert counted(recorder, 0, "d2h") == 2 * 16


def test_copies_that_vllm_leaves_out_are_not_counted() -> None:
    recorder = Recorder(1)
    copy = BlockCopies(recorder, BLOCKS, is_stock=True).operation(0, stock.copy_kv_blocks)
    copy(caches(1), caches(), [1, 2], [3], "d2h")
    copy(caches(1), caches(), [], [], "d2h")
    assert counted(recorder, 0, "d2h") == 0


def test_vllms_own_can_copy_nothing_on_this_platform() -> None:
    """Why it is kvobs's in host memory: with vLLM's the engine ends."""
    copy = BlockCopies(Recorder(1), BLOCKS, is_stock=True).operation(0, stock.copy_kv_blocks)
    with pytest.raises(TypeError, match="not callable"):
        copy(caches(1), caches(), [1], [3], "d2h")


def test_impossible_copies_are_refused_and_not_counted() -> None:
    recorder = Recorder(1)
    copy = BlockCopies(recorder, BLOCKS).operation(0, Vllms())
    with pytest.raises(ValueError, match="block 16 is out of range"):
        copy(caches(1), caches(), [16], [3], "d2h")
    assert counted(recorder, 0, "d2h") == 0


def test_keys_and_values_may_come_first() -> None:
    src, dst = ({"a": torch.arange(2.0 * BLOCKS).view(2, BLOCKS) * factor} for factor in (1, 0))
    recorder = Recorder(1)
    BlockCopies(recorder, BLOCKS).operation(0, Vllms())(src, dst, [5], [2], "d2h")
    assert dst["a"].nonzero().tolist() == [[0, 2], [1, 2]]
    assert counted(recorder, 0, "d2h") == 2 * 4


@given(st.integers(3, 9), st.integers(1, 3), st.integers(1, 30), st.booleans(), st.booleans())
def test_blocks_are_known_by_their_number(blocks: int, per: int, others: int, kv_first: bool, swapped: bool) -> None:
    """One side is the KV cache, its kernel's blocks ``per`` to a block; the other is the connector's, of any size."""

    def cache(n: int) -> dict[str, torch.Tensor]:
        return {"a": torch.empty((2, n, 5) if kv_first else (n, blocks, 5), device="meta")}

    sides = [cache(blocks * per), cache(others)]
    src, dst = sides[::-1] if swapped else sides
    assert block_dims(src, dst, blocks) == {"a": int(kv_first)}


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_where_few_blocks_make_both_look_alike_blocks_come_first(blocks: int) -> None:
    few = {"a": torch.empty((2, 2, 5), device="meta")}
    assert block_dims(few, few, blocks) == {"a": 0}
