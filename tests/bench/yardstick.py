"""How fast this machine is, against the one on which the budgets in microseconds were set."""

from __future__ import annotations

import statistics
import timeit
from functools import cache

from tests.bench.calls import CALLS, CHILDREN, BusyChild, layer_load, rig_of
from tests.bench.report import Budget, Line, Part

REFERENCE_NS = 135
"""What stock's `wait_for_layer_load` over three children took there, warm."""

ROUNDS = 21
CALLS_NOW = 300


def measure() -> Part:
    ratios = tuple(ns / REFERENCE_NS for ns in _stock_ns())
    line = Line(
        "vLLM's own fan-out over 3 connectors", "ns", statistics.median(_stock_ns()), ratios, baseline=REFERENCE_NS
    )
    return Part("This machine; times with a budget are given as on the reference machine", [line])


def slowness() -> float:
    """Return by what factor this machine is slower than the reference right now: that may change within a second.

    A time divided by it can be held against a budget in microseconds.
    """
    return _stock().timeit(CALLS_NOW) / CALLS_NOW / REFERENCE_NS


@cache
def _stock() -> timeit.Timer:
    return layer_load(rig_of("stock", *[BusyChild] * CHILDREN))


@cache
def _stock_ns() -> tuple[float, ...]:
    return tuple(_stock().timeit(CALLS) / CALLS for _ in range(ROUNDS))


def scaled(limit: float) -> Budget:
    """Return a budget set on the reference machine, as it is on this one."""
    return Budget(limit * statistics.median(_stock_ns()) / REFERENCE_NS)
