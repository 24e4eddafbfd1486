"""The copies that kvobs is measured against copy just what is asked."""

import torch

from tests.bench import copying


def test_stocks_copies_are_right() -> None:
    src = {"a": torch.arange(24.0).view(6, 4)}
    expected = torch.zeros(6, 4)
    expected[[3, 0]] = src["a"][[1, 5]]
    with copying.stock_of_cuda() as stock:
        for direction in ("d2h", "h2d"):
            dst = {"a": torch.zeros(6, 4)}
            stock(src, dst, [1, 5], [3, 0], direction)
            assert torch.equal(dst["a"], expected)
    kv_first = {"a": torch.zeros(2, 6, 4)}
    copying.stock_of_kv_first({"a": torch.stack([src["a"], -src["a"]])}, kv_first, [1, 5], [3, 0], "d2h")
    assert torch.equal(kv_first["a"], torch.stack([expected, -expected]))
