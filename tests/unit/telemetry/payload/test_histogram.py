"""Quantiles are those that Prometheus computes."""

from __future__ import annotations

import math
from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from kvobs.schema.signals import LOAD_DURATION
from kvobs.telemetry.payload.histogram import bucket_of, quantile

BOUNDS = (*LOAD_DURATION.buckets, math.inf)
COUNTS = st.lists(st.integers(0, 50), min_size=len(BOUNDS), max_size=len(BOUNDS))


@given(COUNTS, st.floats(0, 1))
def test_a_quantile_is_linear_between_the_bounds(counts: list[int], q: float) -> None:
    cumulative = [float(n) for n in accumulate(counts)]
    rank = q * cumulative[-1]
    assume(rank not in (0, *cumulative))  # else there may be two bounds to choose from
    assert quantile(dict(zip(BOUNDS, cumulative, strict=True)), q) == pytest.approx(
        np.interp(rank, [0, *cumulative[:-1]], [0, *BOUNDS[:-1]])
    )


@given(st.lists(st.integers(0, 2**36), min_size=1, max_size=40), st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_observation_it_is_about(seen: list[int], percent: int) -> None:
    cumulative = [sum(ns * 1e-9 <= bound for ns in seen) for bound in BOUNDS]
    found = quantile(dict(zip(BOUNDS, map(float, cumulative), strict=True)), percent / 100)
    observed = sorted(seen)[math.ceil(percent * len(seen) / 100) - 1] * 1e-9
    at = next(i for i, bound in enumerate(BOUNDS) if observed <= bound)
    assert found is not None
    assert (0, *BOUNDS)[min(at, len(BOUNDS) - 2)] <= found * (1 + 1e-9)
    assert found <= BOUNDS[min(at, len(BOUNDS) - 2)] * (1 + 1e-9)


@pytest.mark.parametrize("buckets", [{}, {1.0: 0.0, math.inf: 0.0}, {1.0: 3.0}, {math.inf: 3.0}])
def test_without_observations_or_bounds_there_is_no_quantile(buckets: dict[float, float]) -> None:
    assert quantile(buckets, 0.5) is None


def test_a_scrape_in_the_middle_of_an_update_still_has_quantiles() -> None:
    assert quantile({1.0: 5.0, 2.0: 4.0, math.inf: 4.0}, 0.5) == 0.5


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 100))
def test_the_bucket_of_a_quantile_is_that_of_the_observation(counts: list[int], percent: int) -> None:
    observed = [bucket for bucket, n in enumerate(counts) for _ in range(n)]
    expected = observed[math.ceil(percent / 100 * len(observed)) - 1] if observed else None
    assert bucket_of(list(accumulate(counts)), percent / 100) == expected
