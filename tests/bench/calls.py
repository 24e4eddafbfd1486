"""What a fan-out over children costs, kvobs's against vLLM's own: the same calls, in turns, in one process."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Histogram

from kvobs.testing import Rig
from tests.bench.report import Budget, Line, Part
from tests.engine.children_stats import IdleChild

CHILDREN = 3
ROUNDS = 41
CALLS = 2000
NAIVE_CALLS = 100


BUDGETS = {
    "wait_for_layer_load": Budget(2.5),
    "save_kv_layer": Budget(2.5),
    "wait_for_layer_load, empty in all": Budget(0.25),
    "save_kv_layer, empty in all": Budget(0.25),
}


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


def rig_of(router: str, *children: type[IdleChild], kvobs: dict[str, Any] | None = None, **more: Any) -> Rig:
    """Build a rig with children of these classes."""
    connectors = [
        {"kv_connector": child.__name__, "kv_connector_module_path": child.__module__, "kv_role": "kv_both"}
        for child in children
    ]
    return Rig(router, connectors=connectors, kvobs=kvobs, **more)


def layer_load(rig: Rig) -> timeit.Timer:
    return timer("wait('model.layers.0.self_attn.attn')", wait=rig.workers[0].wait_for_layer_load)


def layer_save(rig: Rig) -> timeit.Timer:
    return timer("save('model.layers.0.self_attn.attn', None, None)", save=rig.workers[0].save_kv_layer)


def timer(statement: str, **names: Any) -> timeit.Timer:
    """Count CPU time: neighbours on the machine can't get into it."""
    return timeit.Timer(statement, timer=time.thread_time_ns, globals=names)


CASES: dict[str, tuple[type[IdleChild], Callable[[Rig], timeit.Timer]]] = {
    "wait_for_layer_load": (BusyChild, layer_load),
    "save_kv_layer": (BusyChild, layer_save),
    "wait_for_layer_load, empty in all": (IdleChild, layer_load),
    "save_kv_layer, empty in all": (IdleChild, layer_save),
}


def measure() -> Part:
    lines = []
    for name, (child, case) in CASES.items():
        rigs = {router: rig_of(router, *[child] * CHILDREN) for router in ("stock", "kvobs")}
        timers = {router: case(rig) for router, rig in rigs.items()}
        lines.append(_compare(name, timers, rigs["kvobs"]))
    lines.append(_naive())
    return Part(f"A fan-out over {CHILDREN} connectors, CPU time of a call; baseline: vLLM's own", lines)


def _naive() -> Line:
    """Compare with what one would write first: a span and an observation with labels around every call."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=100_000))
    tracer = provider.get_tracer("naive")
    histogram = Histogram("naive_seconds", "Calls.", ["connector", "hook"], registry=CollectorRegistry())
    rig = rig_of("stock", *[BusyChild] * CHILDREN)
    calls = [(f"c{i}", child.wait_for_layer_load) for i, child in enumerate(rig.workers[0]._connectors)]

    def wait_for_layer_load(layer_name: str) -> None:
        for name, call in calls:
            begin = time.perf_counter()
            with tracer.start_as_current_span("wait_for_layer_load", attributes={"connector": name}):
                call(layer_name)
            histogram.labels(name, "wait_for_layer_load").observe(time.perf_counter() - begin)

    naive = timer("wait('model.layers.0.self_attn.attn')", wait=wait_for_layer_load)
    ours_rig = rig_of("kvobs", *[BusyChild] * CHILDREN)
    ours = layer_load(ours_rig)
    ratios, costs = [], []
    for _ in range(ROUNDS):
        ours_s = ours.timeit(CALLS) / CALLS
        flush(ours_rig)
        costs.append(naive.timeit(NAIVE_CALLS) / NAIVE_CALLS)
        ratios.append(costs[-1] / ours_s)
    provider.shutdown()
    naive_ns, times = statistics.median(costs), tuple(ratios)
    title = "a span and an observation per call, against kvobs"
    return Line(
        title, "ns", naive_ns, times, statistics.median(costs) / statistics.median(ratios), Budget(80, at_least=True)
    )


def flush(rig: Rig) -> None:
    """Count what was stamped, as a worker does every 100 ms."""
    stalls = rig.workers[0]._side.stalls
    stalls.close_step(has_forward=True, has_sync_loads=False)
    stalls.flush()


def _compare(name: str, timers: dict[str, timeit.Timer], ours: Rig) -> Line:
    """Time both in turns: what disturbs the machine disturbs both, and a ratio within a round keeps its meaning."""
    times: dict[str, list[float]] = {router: [] for router in timers}
    for turn in range(ROUNDS):
        order = list(timers.items())
        for router, timed in order if turn % 2 else reversed(order):
            times[router].append(timed.timeit(CALLS) / CALLS)
        flush(ours)
    stock, kvobs = statistics.median(times["stock"]), statistics.median(times["kvobs"])
    ratios = tuple(ours / theirs for ours, theirs in zip(times["kvobs"], times["stock"], strict=True))
    return Line(name, "ns", kvobs, ratios, baseline=stock, budget=BUDGETS[name])
