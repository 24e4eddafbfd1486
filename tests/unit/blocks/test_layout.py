"""Runs are as long as they can be, and copy just what the pairs say."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kvobs.blocks.layout import find_runs, without_duplicates

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40)


@given(PAIRS)
def test_last_copy_to_a_destination_counts(pairs: list[tuple[int, int]]) -> None:
    src, dst = without_duplicates(np.array([s for s, _ in pairs]), np.array([d for _, d in pairs]))
    assert dst.tolist() == sorted({d for _, d in pairs})
    assert dict(zip(dst.tolist(), src.tolist(), strict=True)) == {d: s for s, d in pairs}


@given(PAIRS)
def test_runs_are_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    runs = find_runs(np.array([s for s, _ in pairs]), np.array([d for _, d in pairs]))
    assert [(run.src + i, run.dst + i) for run in runs for i in range(run.length)] == pairs
    for one, other in itertools.pairwise(runs):
        assert (one.src + one.length, one.dst + one.length) != (other.src, other.dst)
