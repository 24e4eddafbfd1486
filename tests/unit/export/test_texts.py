"""Numbers are short, and about right."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvobs.export.texts import amount, duration, integer, percent, signed_amount


def examples(*numbers: float) -> Callable[[Any], Any]:
    """Always try these, too: they are near to where a text changes its form."""
    return lambda test: reduce(lambda made, number: example(number)(made), numbers, test)


@given(st.floats(0, 1e12))
@examples(999.6, 9.96, 99_960.0, 0.004)
def test_amounts_are_short_and_about_right(number: float) -> None:
    text = amount(number)
    assert len(text) <= 6
    if not text.startswith("<"):
        value = float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
        assert value == pytest.approx(number, rel=0.06, abs=0.006)


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


@given(st.floats(1e-5, 8e8))
@examples(192.0, 599.4, 599.6, 5939.0, 59.97, 0.9996, 1e-5)
def test_durations_are_short_and_about_right(seconds: float) -> None:
    text = duration(seconds)
    assert len(text) <= 6
    value, unit = text.split()
    assert float(value) * UNITS[unit] == pytest.approx(seconds, rel=0.06)


def test_unknown_value_is_not_shown_as_zero() -> None:
    assert (amount(None), duration(None), percent(None)) == ("-", "-", "-")
    assert (amount(0), duration(0), percent(0)) == ("0", "0", "0 %")
    assert duration(1e-9) == "<1 us"
    assert (integer(None), integer(9999), integer(10_000)) == ("-", "9999", "10k")
    assert (signed_amount(None), signed_amount(-0.05), signed_amount(2.0)) == ("-", "-0.05", "2.0")
