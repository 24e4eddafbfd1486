"""Blocks arrive bit by bit as a plain loop would copy them, or nothing moves and the error says why."""

import copy
import itertools
import re
import subprocess
import sys
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from kvobs.blocks.copy import _device, _layer, copy_kv_blocks
from kvobs.blocks.layout import tensor_view
from tests.bench.copying import stock_of_cuda
from tests.support.caches import BLOCK_SHAPES, DTYPES, by_a_loop, caches, memory


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(BLOCK_SHAPES), st.integers(1, 12), st.integers(1, 12))
def test_every_byte_arrives_and_no_other_changes(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...], src_blocks: int, dst_blocks: int
) -> None:
    """Any layout, any dtype, any ids: scattered, in runs, duplicates."""
    block_dim = data.draw(st.integers(0, len(shape)))
    layers = ["a", "b"]
    src = {layer: data.draw(caches(src_blocks, dtype, shape, block_dim)) for layer in layers}
    dst = {layer: data.draw(caches(dst_blocks, dtype, shape, block_dim)) for layer in layers}
    pairs = data.draw(st.lists(st.tuples(st.integers(0, src_blocks - 1), st.integers(0, dst_blocks - 1)), max_size=20))
    expected = {layer: by_a_loop(src[layer], dst[layer], pairs, block_dim) for layer in layers}
    before = {layer: memory(cache).clone() for layer, cache in src.items()}
    copy_kv_blocks(src, dst, [s for s, _ in pairs], [d for _, d in pairs], "d2h", block_dim=block_dim)
    for layer in layers:
        assert torch.equal(memory(dst[layer]), memory(expected[layer]))
        assert torch.equal(memory(src[layer]), before[layer])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20), st.sampled_from((torch.int64, torch.int32))
)
def test_within_one_cache_all_is_read_before_any_is_written(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    cache = {"a": torch.arange(10 * 2, dtype=dtype).view(10, 2).clone()}
    expected = cache["a"].clone()
    for s, d in pairs:
        expected[d] = cache["a"][s]
    copy_kv_blocks(cache, {"a": cache["a"].view(10, 2)}, [s for s, _ in pairs], [d for _, d in pairs], "h2d")
    assert torch.equal(cache["a"], expected)


A, B, C = torch.zeros(4, 2), torch.ones(6, 2), torch.ones(3, 2)
WIDE = torch.zeros(4, 2, dtype=torch.complex128)
WRONG: dict[str, tuple[Any, str]] = {
    "direction": (({"a": A}, {"a": B}, [0], [0], "up"), "direction is 'up', allowed: 'h2d', 'd2h'"),
    "more ids here": (
        ({"a": A}, {"a": B}, [0, 1], [0], "d2h"),
        "2 source blocks can't be copied to 1 destination blocks",
    ),
    "no ids here": (({"a": A}, {"a": B}, [], [0], "h2d"), "0 source blocks can't be copied to 1 destination blocks"),
    "layer only here": (({"a": A, "b": A}, {"a": B}, [0], [0], "d2h"), "layers without a destination: b"),
    "layer only there": (({"a": A}, {"a": B, "c": B}, [0], [0], "d2h"), "layers without a source: c"),
    "too high": (({"a": A}, {"a": B}, [4], [0], "h2d"), "a: source block 4 is out of range, allowed: 0 to 3"),
    "negative": (({"a": A}, {"a": B}, [-1], [3], "d2h"), "a: source block -1 is out of range, allowed: 0 to 3"),
    "negative there": (({"a": A}, {"a": B}, [0, 1], [-1, 2], "h2d"), "a: destination block -1 is out of range"),
    "later layer": (
        ({"a": A, "b": A}, {"a": B, "b": C}, [1], [3], "d2h"),
        "b: destination block 3 is out of range, allowed: 0 to 2",
    ),
    "shape": (({"a": A[:, :1]}, {"a": B}, [0], [0], "d2h"), "a: a block has shape (1,) in the source, (2,) in the"),
    "dtype": (({"a": A}, {"a": B.double()}, [0], [0], "h2d"), "a: torch.float32 in the source, torch.float64 in the"),
    "list": (({"a": [A]}, {"a": B}, [0], [0], "h2d"), "a: a cache must be one tensor, found list"),
    "device": (({"a": A.to("meta")}, {"a": B}, [0], [0], "d2h"), "a: d2h copies from a CUDA device to host memory, "),
    "wide": (({"a": WIDE}, {"a": WIDE}, [0], [0], "h2d"), "a: elements of 16 bytes, torch.complex128, allowed: 1"),
    "fraction": (({"a": A}, {"a": B}, [0.5], [0], "h2d"), "source block ids must be whole numbers in a list, found f"),
    "nested": (({"a": A}, {"a": B}, [[0]], [0], "h2d"), "source block ids must be whole numbers in a list, found i"),
}
STOCK_COPIES = ("direction", "more ids here", "layer only here", "layer only there", "negative", "later layer", "shape")


@pytest.mark.parametrize(
    ("router", "case"),
    [
        *(("kvobs", case) for case in WRONG),
        *(("staged", case) for case in WRONG if case != "device"),
        *(pytest.param("stock", case, marks=pytest.mark.xfail(strict=True)) for case in STOCK_COPIES),
    ],
)
def test_a_problem_is_named_before_a_byte_moves(router: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the way to a device, with host memory in its place; stock with the statements that it runs on CUDA."""
    (src, dst, *rest), says = copy.deepcopy(WRONG[case])
    before = copy.deepcopy(dst)
    if router == "staged":
        monkeypatch.setattr("kvobs.blocks.copy._device", lambda *_: torch.device("cpu"))
    says = "" if router == "stock" else re.escape(says)
    with stock_of_cuda() as stock, pytest.raises(ValueError, match=f"^{says}"):
        (stock if router == "stock" else copy_kv_blocks)(src, dst, *rest)
    assert all(torch.equal(cache, before[name]) for name, cache in dst.items())


@pytest.mark.parametrize(
    ("block_dim", "says"),
    [
        (2, "a: has no dimension 2 for its blocks, shape (4, 2)"),
        (-1, "a: has no dimension -1 for its blocks, shape (4, 2)"),
        ({"a": 7}, "a: has no dimension 7 for its blocks, shape (4, 2)"),
        ({"b": 0}, "layers without a block_dim: a"),
    ],
)
def test_a_layer_without_that_dimension_is_named(block_dim: int | dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        copy_kv_blocks({"a": A}, {"a": B}, [0], [0], "h2d", block_dim=block_dim)


PLACES = ["cpu", "cuda:0", "cuda:1", "meta", "xpu:0"]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(PLACES, PLACES)))
def test_copy_is_between_host_memory_and_a_cuda_device(src: str, dst: str, direction: str) -> None:
    allowed = (src, dst) == ("cpu", "cpu") or {
        "h2d": src == "cpu" and dst.startswith("cuda"),
        "d2h": src.startswith("cuda") and dst == "cpu",
    }[direction]
    here, there = caches_at(src), caches_at(dst)
    if allowed:
        found = _device([("a", here["a"], there["a"])], direction)
        assert found == (None if src == dst else torch.device(dst if src == "cpu" else src))
        return
    routes = {"h2d": "from host memory to a CUDA device", "d2h": "from a CUDA device to host memory"}
    with pytest.raises(ValueError, match=f"^a: {direction} copies {routes[direction]}, found {src} to {dst}$"):
        copy_kv_blocks(here, there, [0], [0], direction)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (["cuda:0", "cuda:1"], "b: on cuda:1, but a on cuda:0"),
        (["cuda:0", "cpu"], "b: h2d copies from host memory to a CUDA device, found cpu to cpu"),
        (["cpu", "cuda:0"], "a: h2d copies from host memory to a CUDA device, found cpu to cpu"),
    ],
)
def test_all_layers_are_on_one_device(places: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        copy_kv_blocks(caches_at("cpu", "cpu"), caches_at(*places), [0], [0], "h2d")


def caches_at(*places: str) -> dict[str, torch.Tensor]:
    """Return caches that say they are there, without bytes."""
    with FakeTensorMode():
        return {name: torch.empty(4, 2, device=place) for name, place in zip("ab", places, strict=False)}


def test_aligned_bytes_are_copied_eight_at_a_time() -> None:
    cache = torch.zeros(65, dtype=torch.uint8)
    even, odd = cache[:64].view(8, 8), cache[1:].view(8, 8)
    assert [_layer("a", *sides, 0).layout.unit for sides in ((even, even), (odd, even), (even, odd))] == [8, 1, 1]


def test_a_storage_that_begins_elsewhere_is_copied_by_element() -> None:
    """Torch refuses to read eight bytes at a time there, after all that was queued before."""
    raw = torch.zeros(80, dtype=torch.uint8).numpy()
    odd = torch.from_numpy(raw[4:68]).view(torch.int32)[1:9].view(4, 2)
    layout = _layer("a", odd, odd, 0).layout
    tensor_view(odd, layout.dst, layout.unit).fill_(7)
    assert (odd.data_ptr() % 8, layout.unit, int(odd.sum())) == (0, 4, 56)


def test_nothing_to_copy_is_no_error() -> None:
    copy_kv_blocks({"a": torch.zeros(4, 0)}, {"a": torch.zeros(4, 0)}, [0], [1], "h2d")
    copy_kv_blocks({}, {}, [], [], "h2d")
    copy_kv_blocks({"a": A}, {"a": B}, [], [], "d2h")


def test_in_host_memory_it_needs_only_torch_and_numpy() -> None:
    code = """
import sys
sys.modules["vllm"] = sys.modules["prometheus_client"] = sys.modules["pydantic"] = None
import torch
from kvobs.blocks.copy import copy_kv_blocks
cache = torch.ones(4, 2)
copy_kv_blocks({"a": cache}, {"a": cache.clone()}, [0], [1], "d2h")
assert not torch.cuda.is_initialized()
assert "kvobs.blocks.staged" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("router", ["kvobs", pytest.param("stock", marks=pytest.mark.xfail(strict=True))])
def test_keys_and_values_first_are_not_taken_for_blocks(router: str) -> None:
    src, dst = {"a": torch.arange(16.0).view(2, 8)}, {"a": torch.full((2, 8), -1.0)}
    with stock_of_cuda() as stock:
        copies = partial(copy_kv_blocks, block_dim=1) if router == "kvobs" else stock
        copies(src, dst, [1], [0], "d2h")
    assert dst["a"][:, 0].tolist() == [1, 9]
    assert dst["a"][:, 1:].eq(-1).all()
