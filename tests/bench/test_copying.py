"""The parts of the copying benchmarks that need no GPU."""

from __future__ import annotations

import random
import subprocess
import sys

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


def test_sizes_fit_and_ids_are_different_blocks_of_the_cache() -> None:
    measured = cases()
    assert len(set(measured)) == len(measured)
    assert {case.direction for case in measured if case.pinned} == {"d2h", "h2d"}
    for case in measured:
        ids = ids_of(random.Random(1), case)
        assert case.size <= MOST_BYTES
        assert len({i for i in ids if 0 <= i < case.cache_blocks}) == len(ids) == case.blocks
        assert all(i % case.run == at % case.run for at, i in enumerate(ids))


def test_a_row_has_a_cell_for_each_heading() -> None:
    case = Case("h2d", True, 64, 512, 8)
    cells = row(case, Times(5.0, 4.0), Times(50.0, 40.0), Times(4.0, 4.0)).strip("| ").split(" | ")
    assert cells[:4] == ["h2d", "pinned", "64 KiB", "512 in runs of 8"]
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
    like = copying_cuda.like
    monkeypatch.setattr(copying_cuda, "like", lambda cache, *, device, pinned=False: like(cache, device=device))
    monkeypatch.setattr(copying_cuda, "DTYPES", (torch.bfloat16, torch.float8_e4m3fn))
    assert copying_cuda.wrong_copies(torch.device("cpu")) == []
    monkeypatch.setattr(copying_cuda, "copy_kv_blocks", lambda *_, **__: None)
    wrong = copying_cuda.wrong_copies(torch.device("cpu"))
    assert len(set(wrong)) == 2 * 2 * 2 * 2 * 6 * 2
    assert "d2h of 5 blocks, small blocks, alike, torch.bfloat16, pageable" in wrong


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
