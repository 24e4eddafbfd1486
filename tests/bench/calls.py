"""What a call into connectors costs: kvobs's fan-out against vLLM's own."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Histogram

from kvobs.connector import MultiConnector
from kvobs.probe import native
from kvobs.testing import Rig
from tests.bench.report import Budget, Line, Part, against_stock
from tests.engine.connectors_stats import IdleConnector

CONNECTORS = 3
ROUNDS = 41
CALLS = 2000
NAIVE_CALLS = 100
CALLS_NOW = 300

REFERENCE_NS = 135
"""What stock's `wait_for_layer_load` over three connectors took on the machine on which budgets in us were set."""

LAYER = "model.layers.0.self_attn.attn"


class BusyConnector(IdleConnector):
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


PURE = "kvobs, probe in Python"
"""The router that counts without the compiled probe."""


def rig_of(router: str, *connectors: type[IdleConnector], kvobs: dict[str, Any] | None = None, **more: Any) -> Rig:
    """Build a rig with connectors of these classes."""
    with probe_of(router):
        rig = Rig(router.partition(",")[0], connectors=entries(connectors), kvobs=kvobs, **more)
    bind_hooks(rig)
    return rig


def bind_hooks(rig: Rig) -> None:
    """Bind the hooks of kvobs's routers, as the first step does: before it each call takes a detour."""
    for router in (rig.connector, *rig.workers):
        if isinstance(router, MultiConnector):
            router._bind_again(begins=True)


def probe_of(router: str) -> AbstractContextManager[object]:
    """Let what is built in this context have the router's probe; the compiled one must be there."""
    assert native.choice().is_native, native.choice().reason
    return patch.object(native, "choice", lambda: native.Choice(is_native=router != PURE))


def entries(connectors: Iterable[type[IdleConnector]]) -> list[dict[str, Any]]:
    return [
        {"kv_connector": connector.__name__, "kv_connector_module_path": connector.__module__, "kv_role": "kv_both"}
        for connector in connectors
    ]


def layer_load(rig: Rig) -> timeit.Timer:
    return timer(f"call('{LAYER}')", rig.workers[0].wait_for_layer_load)


def layer_save(rig: Rig) -> timeit.Timer:
    return timer(f"call('{LAYER}', None, None)", rig.workers[0].save_kv_layer)


def timer(statement: str, call: Callable[..., object]) -> timeit.Timer:
    """Count CPU time: neighbours on the machine can't get into it."""
    return timeit.Timer(statement, timer=time.thread_time_ns, globals={"call": call})


def close_step(rig: Rig) -> None:
    """Count what was added up, as a worker does at the end of a step."""
    rig.workers[0]._side.waits.close_step(has_forward=True, has_sync_loads=False)


def timed(rig: Rig, case: Callable[[Rig], timeit.Timer], *, is_kvobs: bool = True) -> Callable[[], float]:
    """Return a function that measures a call's nanoseconds."""
    call = case(rig)

    def measured() -> float:
        ns = call.timeit(CALLS) / CALLS
        if is_kvobs:
            close_step(rig)
        return ns

    return measured


CASES: dict[str, tuple[type[IdleConnector], Callable[[Rig], timeit.Timer], Budget]] = {
    "wait_for_layer_load": (BusyConnector, layer_load, Budget(1.6)),
    "save_kv_layer": (BusyConnector, layer_save, Budget(0.6)),
    "wait_for_layer_load, empty in all": (IdleConnector, layer_load, Budget(0.26)),
    "save_kv_layer, empty in all": (IdleConnector, layer_save, Budget(0.26)),
}


def measure() -> Part:
    lines = []
    for name, (index, case, budget) in CASES.items():
        for router, allowed in (("kvobs", budget), *([(PURE, None)] if index is BusyConnector else [])):
            calls = {"stock": timed(rig_of("stock", *[index] * CONNECTORS), case, is_kvobs=False)}
            calls["kvobs"] = timed(rig_of(router, *[index] * CONNECTORS), case)
            title = name if router == "kvobs" else f"{name}, probe in Python"
            lines.append(against_stock(title, "ns", calls, ROUNDS, allowed))
    lines.insert(2, _floor())
    return Part(f"A fan-out over {CONNECTORS} connectors, CPU time of a call; baseline: vLLM's own", [*lines, _naive()])


def _floor() -> Line:
    """Read the clock before the first call and after each, and keep nothing of it."""
    rig, scope = busy_rig("stock"), dict[str, Any](clock=time.perf_counter_ns)
    scope |= {f"c{i}": connector.wait_for_layer_load for i, connector in enumerate(rig.workers[0]._connectors)}
    calls = "".join(f"    c{i}(layer_name)\n    clock()\n" for i in range(CONNECTORS))
    exec(f"def fan_out(layer_name):\n    clock()\n{calls}", scope)
    read, stock = timer(f"call('{LAYER}')", scope["fan_out"]), layer_load(rig)
    times = {"kvobs": lambda: read.timeit(CALLS) / CALLS, "stock": lambda: stock.timeit(CALLS) / CALLS}
    return against_stock("wait_for_layer_load, only the clock read, in Python", "ns", times, ROUNDS)


def _naive() -> Line:
    """Compare with what one would write first: a span and an observation with labels around every call."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=100_000))
    tracer = provider.get_tracer("naive")
    histogram = Histogram("naive_seconds", "Calls.", ["connector", "hook"], registry=CollectorRegistry())
    rig = rig_of("stock", *[BusyConnector] * CONNECTORS)
    calls = [(f"c{i}", connector.wait_for_layer_load) for i, connector in enumerate(rig.workers[0]._connectors)]

    def wait_for_layer_load(layer_name: str) -> None:
        for name, call in calls:
            begin = time.perf_counter()
            with tracer.start_as_current_span("wait_for_layer_load", attributes={"connector": name}):
                call(layer_name)
            histogram.labels(name, "wait_for_layer_load").observe(time.perf_counter() - begin)

    naive, ours = timer(f"call('{LAYER}')", wait_for_layer_load), timed(busy_rig(), layer_load)
    costs, baselines = [], []
    for _ in range(ROUNDS):
        baselines.append(ours())
        costs.append(naive.timeit(NAIVE_CALLS) / NAIVE_CALLS)
    provider.shutdown()
    title = "a span and an observation per call, against kvobs"
    return Line(title, "ns", costs, baselines, Budget(80, at_least=True))


def busy_rig(router: str = "kvobs", /, **options: Any) -> Rig:
    return rig_of(router, *[BusyConnector] * CONNECTORS, kvobs=options or None)


def measure_machine() -> Part:
    """Compare the speed of this machine with that of the reference."""
    line = Line("vLLM's own fan-out over 3 connectors", "ns", _stock_ns(), [REFERENCE_NS] * len(_stock_ns()))
    return Part("This machine; times with a budget are given as on the reference machine", [line])


def slowness() -> float:
    """Return by what factor this machine is slower than the reference right now: that may change within a second.

    A time divided by it can be held against a budget in microseconds.
    """
    return _stock().timeit(CALLS_NOW) / CALLS_NOW / REFERENCE_NS


def scaled(limit: float) -> Budget:
    """Return a budget set on the reference machine, as it is on this one."""
    return Budget(limit * statistics.median(_stock_ns()) / REFERENCE_NS)


@cache
def _stock() -> timeit.Timer:
    return layer_load(busy_rig("stock"))


@cache
def _stock_ns() -> tuple[float, ...]:
    return tuple(_stock().timeit(CALLS) / CALLS for _ in range(21))
