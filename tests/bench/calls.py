"""What a fan-out over children costs, kvobs's against vLLM's own: the same calls, in turns, in one process."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine.children_stats import IdleChild
from tests.rig import Rig

CHILDREN = 3
ROUNDS = 41
CALLS = 2000


@dataclass(frozen=True)
class Cost:
    """ns per call of the wrapper, medians over the rounds, and the ratio's median and quartiles."""

    hook: str
    stock_ns: float
    kvobs_ns: float
    ratio: float
    low: float
    high: float


class BusyChild(IdleChild):
    """Implements the hooks of layers and steps, and does next to nothing in them."""

    layer = ""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.layer = ""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.layer = layer_name

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.layer = layer_name

    def wait_for_save(self) -> None:
        self.layer = ""


def rig_of(router: str, child: type[IdleChild]) -> Rig:
    """Build a rig with three children of a class of this module."""
    entry = {"kv_connector": child.__name__, "kv_connector_module_path": __name__, "kv_role": "kv_both"}
    return Rig(router, connectors=[dict(entry) for _ in range(CHILDREN)])


def layer_load(rig: Rig) -> timeit.Timer:
    return timer("wait('model.layers.0.self_attn.attn')", wait=rig.workers[0].wait_for_layer_load)


def layer_save(rig: Rig) -> timeit.Timer:
    return timer("save('model.layers.0.self_attn.attn', None, None)", save=rig.workers[0].save_kv_layer)


def worker_step(rig: Rig) -> timeit.Timer:
    """Return the once-a-step hooks of a worker, in vLLM's order."""
    worker = rig.workers[0]
    meta = rig.scheduler.schedule().kv_connector_metadata

    def step() -> None:
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        worker.get_transfer_results(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        worker.get_kv_connector_kv_cache_events()
        worker.build_connector_worker_meta()
        worker.clear_connector_metadata()

    return timer("step()", step=step)


def timer(statement: str, **names: Any) -> timeit.Timer:
    """Count CPU time: neighbours on the machine can't get into it."""
    return timeit.Timer(statement, timer=time.thread_time_ns, globals=names)


CASES: dict[str, tuple[type[IdleChild], Callable[[Rig], timeit.Timer]]] = {
    "wait_for_layer_load": (BusyChild, layer_load),
    "save_kv_layer": (BusyChild, layer_save),
    "a worker's step": (BusyChild, worker_step),
    "wait_for_layer_load, empty in all": (IdleChild, layer_load),
    "save_kv_layer, empty in all": (IdleChild, layer_save),
    "a worker's step, empty in all": (IdleChild, worker_step),
}


def measure() -> list[Cost]:
    costs = []
    for name, (child, case) in CASES.items():
        rigs = {router: rig_of(router, child) for router in ("stock", "kvobs")}
        costs.append(_compare(name, {router: case(rig) for router, rig in rigs.items()}))
    return costs


def _compare(name: str, timers: dict[str, timeit.Timer]) -> Cost:
    """Time both in turns: what disturbs the machine disturbs both, and a ratio within a round keeps its meaning."""
    times: dict[str, list[float]] = {router: [] for router in timers}
    for turn in range(ROUNDS):
        order = list(timers.items())
        for router, timed in order if turn % 2 else reversed(order):
            times[router].append(timed.timeit(CALLS) / CALLS)
    ratios = [ours / theirs for ours, theirs in zip(times["kvobs"], times["stock"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Cost(name, statistics.median(times["stock"]), statistics.median(times["kvobs"]), middle, low, high)
