"""What a best-effort child costs that fails as soon as it is tried again: p95 of an engine's step, against a quiet one.

A whole step in one process: vLLM's scheduler, two workers of 80 layers, every hop pickled. CPU time of the thread. The
clock of the quarantine runs so fast that the child is out for eight steps, back for one, and out again.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any
from unittest.mock import patch

from kvobs.testing import Rig
from tests.bench.calls import BusyChild
from tests.bench.report import Budget, Line, Part
from tests.bench.steps import DOCUMENT, LAYERS

ROUNDS = 9
STEPS = 120
OUT_STEPS = 8


class BestEffortChild(BusyChild):
    """May be left out; fails at the end of a step while ``fails``."""

    requires_kv_delivery = False
    fails = False

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self.fails:
            raise ConnectionError("no store")


class BestEffortSibling(BestEffortChild):
    """Never fails."""


class Engine:
    """An engine that decodes one request for ever."""

    def __init__(self) -> None:
        connectors = [
            {"kv_connector": child.__name__, "kv_connector_module_path": child.__module__, "kv_role": "kv_both"}
            for child in (BestEffortChild, BestEffortSibling, BestEffortSibling)
        ]
        kvobs = {"names": ["a", "b", "c"], "isolate": ["a", "b", "c"]}
        self.rig = Rig("kvobs", connectors=connectors, kvobs=kvobs, ranks=2, policy="recompute", blocks=512)
        self.now_ns = 0
        self.requests = 0
        for worker in self.rig.workers:
            self._add_layers(worker)

    @property
    def isolation(self) -> Any:
        return self.rig.connector._side.isolation

    def _add_layers(self, worker: Any) -> None:
        """Have the rig's one layer be all of them."""
        wait, save = worker.wait_for_layer_load, worker.save_kv_layer

        def layers(_name: str) -> None:
            for layer in LAYERS:
                wait(layer)
                json.loads(DOCUMENT)
                save(layer, None, None)

        worker.wait_for_layer_load = layers

    def step_ns(self) -> int:
        if not self.rig.scheduler.requests:
            self.requests += 1
            self.rig.add(f"r{self.requests}", max_tokens=100)
        self.now_ns += self.isolation._states[0].length_ns // OUT_STEPS
        with patch("kvobs.routing.isolation.wall_ns", lambda: self.now_ns):
            begin = time.thread_time_ns()
            self.rig.step()
            return time.thread_time_ns() - begin


def measure(rounds: int = ROUNDS) -> Part:
    engines = {"quiet": Engine(), "flapping": Engine()}
    for worker in engines["flapping"].rig.workers:
        worker._connectors[0].fails = True
    ratios, p95s = [], {name: [] for name in engines}  # type: ignore[var-annotated]
    for _ in range(rounds):
        spent: dict[str, list[int]] = {name: [] for name in engines}
        for _ in range(STEPS):
            for name in random.sample(sorted(engines), len(engines)):
                spent[name].append(engines[name].step_ns())
        p95 = {name: statistics.quantiles(times, n=20)[-1] for name, times in spent.items()}
        for name, ns in p95.items():
            p95s[name].append(ns / 1e6)
        ratios.append(p95["flapping"] / p95["quiet"])
    epochs = engines["flapping"].isolation.states()[0].epoch
    if epochs < rounds * STEPS / (OUT_STEPS + 4):
        raise RuntimeError(f"only {epochs} quarantines in {rounds * STEPS} steps: that is no flapping")
    quiet, flapping = (statistics.median(p95s[name]) for name in ("quiet", "flapping"))
    line = Line("p95 of a step", "ms", flapping, tuple(ratios), quiet, Budget(1.02))
    return Part("A best-effort connector that fails whenever it is tried; baseline: one that does not", [line])
