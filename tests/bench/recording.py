"""What a timeline adds to each call into a child: kvobs with and without one, in turns, in one process."""

from __future__ import annotations

import statistics
import tempfile
import timeit
from collections.abc import Callable

from kvobs.testing import Rig
from tests.bench.calls import CALLS, CHILDREN, ROUNDS, BusyChild, flush, layer_load, rig_of, timer
from tests.bench.report import Budget, Line, Part
from tests.bench.yardstick import slowness


def step_load(rig: Rig) -> timeit.Timer:
    return timer("load(None)", load=rig.workers[0].start_load_kv)


CASES: dict[str, tuple[Callable[[Rig], timeit.Timer], float]] = {
    "start_load_kv, and any hook of steps and requests": (step_load, 550),
    "wait_for_layer_load, and save_kv_layer": (layer_load, 60),
}
"""What to call, and the budget in ns."""


def measure() -> Part:
    lines = [_measure(title, *case) for title, case in CASES.items()]
    return Part("What a timeline adds to a call into a connector, CPU time", lines)


def _measure(title: str, case: Callable[[Rig], timeit.Timer], budget: float) -> Line:
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        timeline = {"timeline": {"dir": f"{folder}/timeline"}}
        rigs = [rig_of("kvobs", *[BusyChild] * CHILDREN, kvobs=more) for more in ({}, timeline)]
        timers = [case(rig) for rig in rigs]
        added = []
        for _ in range(ROUNDS):
            off, on = (one.timeit(CALLS) / CALLS for one in timers)
            for rig in rigs:
                flush(rig)
            added.append((on - off) / CHILDREN / slowness())
    return Line(title, "ns", statistics.median(added), tuple(added), None, Budget(budget))
