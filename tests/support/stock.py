"""A fault of vLLM's own router: kvobs passes the test, stock's class must fail it."""

import pytest


def wrong_in_stock(raises: type[Exception], reason: str) -> pytest.MarkDecorator:
    """Run for kvobs and for stock, where the test must fail in this way."""
    stock = pytest.param("stock", marks=pytest.mark.xfail(raises=raises, reason=reason, strict=True))
    return pytest.mark.parametrize("router", ["kvobs", stock])
