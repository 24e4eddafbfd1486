"""The parts of the copying benchmarks that need no GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.bench import copying, copying_cuda
from tests.bench.copying_cuda import HEADINGS, MOST_BYTES, Case, Times, cases, ids_of, row


def test_without_a_gpu_it_names_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, copying_cuda.__file__], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no CUDA device here: nothing to copy to or from\n"


def test_sizes_fit_and_each_is_measured_once() -> None:
    found = cases()
    assert len(set(found)) == len(found)
    assert all(case.size <= MOST_BYTES for case in found)
    assert {(case.direction, case.pinned) for case in found} == {(w, p) for w in ("d2h", "h2d") for p in (False, True)}
    assert {case.block_kib for case in found} == {4, 16, 64, 256, 1024}
    assert {case.blocks for case in found} == {1, 8, 64, 512, 4096}


@pytest.mark.parametrize("run", [1, 8])
def test_ids_are_different_blocks_of_the_cache(run: int) -> None:
    case = Case("d2h", False, 4, 512, run)
    ids = ids_of(random.Random(1), case)
    assert len(set(ids)) == 512
    assert all(0 <= i < case.cache_blocks for i in ids)
    assert all(ids[i] % run == i % run for i in range(512))


def test_a_row_has_a_cell_for_each_heading() -> None:
    case = Case("h2d", True, 64, 512, 8)
    cells = row(case, Times(5.0, 4.0), Times(50.0, 40.0), Times(4.0, 4.0)).strip("| ").split(" | ")
    assert dict(zip(HEADINGS[:4], cells, strict=False)) == {
        "direction": "h2d",
        "host memory": "pinned",
        "block": "64 KiB",
        "blocks": "512 in runs of 8",
    }
    assert cells[4:] == ["5.000", "4.000", "50.000", "40.000", "4.000", "53.7", "1.25", "10.0"]
    assert len(cells) == len(HEADINGS)


@pytest.mark.parametrize("dtype", copying_cuda.DTYPES)
def test_caches_lie_elsewhere_as_they_lie_here(dtype: torch.dtype) -> None:
    for _, cache, dim in copying_cuda.layouts(dtype, 7):
        there = copying_cuda.like(cache, device="cpu")
        assert there.stride() == cache.stride()
        assert cache.shape[dim] == 7
        assert torch.equal(copying_cuda.bits(there), copying_cuda.bits(cache))


def test_a_copy_that_goes_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within host memory, which is enough to see that it compares what it should."""
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(copying_cuda, "like", partial(without_pinning, copying_cuda.like))
    monkeypatch.setattr(copying_cuda, "DTYPES", (torch.bfloat16, torch.float8_e4m3fn))
    assert copying_cuda.wrong_copies(torch.device("cpu")) == []
    monkeypatch.setattr(copying_cuda, "copy_kv_blocks", lambda *_, **__: None)
    wrong = copying_cuda.wrong_copies(torch.device("cpu"))
    assert len(set(wrong)) == 2 * 2 * 2 * 2 * 6 * 2
    assert "d2h of 5 blocks, small blocks, alike, torch.bfloat16, pageable" in wrong


def without_pinning(
    like: Callable[..., torch.Tensor], *arguments: Any, pinned: bool = False, **more: Any
) -> torch.Tensor:
    return like(*arguments, **more)


def test_stocks_copies_are_right_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that kvobs is measured against copy just what is asked."""
    src = {"a": torch.arange(24.0).view(6, 4)}
    expected = torch.zeros(6, 4)
    expected[[3, 0]] = src["a"][[1, 5]]
    with copying.stock_of_cuda() as stock:
        for copy in (stock, copying_cuda._stock_statements):
            for direction in ("d2h", "h2d"):
                dst = {"a": torch.zeros(6, 4)}
                copy(src, dst, [1, 5], [3, 0], direction)
                assert torch.equal(dst["a"], expected)
    kv_first = {"a": torch.zeros(2, 6, 4)}
    copying.stock_of_kv_first({"a": torch.stack([src["a"], -src["a"]])}, kv_first, [1, 5], [3, 0], "d2h")
    assert torch.equal(kv_first["a"], torch.stack([expected, -expected]))
