"""The clock stands between the two of the machine."""

import time
from time import perf_counter_ns

import pytest

from kvobs import clock
from kvobs.clock import WALL_OFFSET, wall_ns


def test_the_clock_is_the_monotonic_one_at_a_fixed_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    before = perf_counter_ns()
    assert before + WALL_OFFSET <= wall_ns() <= perf_counter_ns() + WALL_OFFSET
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert wall_ns() >= before + WALL_OFFSET, "whatever becomes of the wall clock"
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: 5)
    assert wall_ns() == 5 + WALL_OFFSET
