"""What a fan-out over idle children costs, kvobs's against vLLM's own: the same calls, in turns, in one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def idle(router: str) -> Rig:
    entry = {
        "kv_connector": "IdleChild",
        "kv_connector_module_path": "tests.engine.children",
        "kv_role": "kv_both",
    }
    return Rig(router, connectors=[dict(entry) for _ in range(CHILDREN)])


def layer_load(rig: Rig) -> Callable[[], Any]:
    wait = rig.workers[0].wait_for_layer_load
    return lambda: wait("model.layers.0.self_attn.attn")


def layer_save(rig: Rig) -> Callable[[], Any]:
    save = rig.workers[0].save_kv_layer
    return lambda: save("model.layers.0.self_attn.attn", None, None)


def worker_step(rig: Rig) -> Callable[[], Any]:
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

    return step


CASES = {"wait_for_layer_load": layer_load, "save_kv_layer": layer_save, "a worker's step": worker_step}


def measure() -> list[Cost]:
    rigs = {router: idle(router) for router in ("stock", "kvobs")}
    return [_compare(name, {router: case(rig) for router, rig in rigs.items()}) for name, case in CASES.items()]


def _compare(name: str, calls: dict[str, Callable[[], Any]]) -> Cost:
    """Time both in turns: what disturbs the machine disturbs both, and a ratio within a round keeps its meaning."""
    times: dict[str, list[float]] = {router: [] for router in calls}
    gc.disable()
    try:
        for turn in range(ROUNDS):
            order = list(calls.items())
            for router, call in order if turn % 2 else reversed(order):
                times[router].append(_ns_per_call(call))
    finally:
        gc.enable()
    ratios = [ours / theirs for ours, theirs in zip(times["kvobs"], times["stock"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Cost(name, statistics.median(times["stock"]), statistics.median(times["kvobs"]), middle, low, high)


def _ns_per_call(call: Callable[[], Any]) -> float:
    begin = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - begin) / CALLS
