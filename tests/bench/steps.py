"""What recording adds to a worker's step of about 5 ms: 80 layers, each with a wait, some work and a save, and a flush.

CPU time of the thread, so that neighbours are not measured; kvobs and vLLM's own MultiConnector in turns, the
difference in per cent of the step.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from typing import Any

from tests.bench.calls import CHILDREN, BusyChild, rig_of, slowness
from tests.bench.report import Budget, Line, Part
from tests.engine.children_stats import IdleChild

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(80)]
STEP_NS = 5_000_000
STEPS_PER_FLUSH = 20  # one in 100 ms
ROUNDS = 45

# What a layer's own Python does between the hooks: enough to push the hooks' code and data out of the nearest cache.
DOCUMENT = json.dumps([{f"k{i}": [i, str(i), {"x": i * 1.5}]} for i in range(40)])

MIXES = {
    "3 connectors": ((BusyChild,) * CHILDREN, 1.0),
    "3 connectors, the hooks of 2 are empty": ((BusyChild, IdleChild, IdleChild), 0.4),
}


class Worker:
    """One worker's connector, and how far it is from the next flush."""

    def __init__(self, router: str, children: tuple[type[IdleChild], ...]) -> None:
        self.rig = rig_of(router, *children)
        self.connector = self.rig.workers[0]
        self.meta = self.rig.scheduler.schedule().kv_connector_metadata
        self.steps = 0

    def step_ns(self) -> int:
        """Run one step; return its CPU time."""
        self.steps += 1
        connector, meta = self.connector, self.meta
        if hasattr(meta, "flush"):
            meta = dataclasses.replace(meta, flush=self.steps % STEPS_PER_FLUSH == 0)
        connector.bind_connector_metadata(meta)
        begin = time.thread_time_ns()
        for layer in LAYERS:
            connector.wait_for_layer_load(layer)
            json.loads(DOCUMENT)
            connector.save_kv_layer(layer, None, None)
        connector.get_kv_connector_stats()
        spent = time.thread_time_ns() - begin
        connector.clear_connector_metadata()
        return spent


def measure(rounds: int = ROUNDS) -> Part:
    lines = [_measure(title, *mix, rounds) for title, mix in MIXES.items()]
    return Part("A worker's step of 5 ms, 80 layers, as on the reference machine", lines)


def _measure(title: str, children: Any, budget: float, rounds: int) -> Line:
    workers = {router: Worker(router, children) for router in ("stock", "kvobs")}
    for worker in workers.values():
        worker.step_ns()
    shares: list[float] = []
    for _ in range(rounds):
        plain: list[float] = []
        flushing = 0.0
        for _ in range(STEPS_PER_FLUSH):
            spent = {router: workers[router].step_ns() for router in random.sample(sorted(workers), len(workers))}
            added = (spent["kvobs"] - spent["stock"]) / slowness()
            if workers["kvobs"].steps % STEPS_PER_FLUSH:
                plain.append(added)
            else:
                flushing = added
        # Step by step, and the median of those: a neighbour that comes in between is in one of them only.
        usual = statistics.median(plain)
        shares.append(100 * (usual + (flushing - usual) / STEPS_PER_FLUSH) / STEP_NS)
    added_us = statistics.median(shares) / 100 * STEP_NS / 1e3
    return Line(f"added: {title} ({added_us:+.1f} us)", "% of 5 ms", shares, budget=Budget(budget))
