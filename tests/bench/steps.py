"""All that a router adds to a decode step of 5 ms: the mean, the 95th and the 99th percentile.

vLLM's real scheduler, its ranks, and what passes between them, without a model: 8 requests decode, with 80 layers and 3
connectors of which no hook is empty. kvobs, kvobs with the exporter, and vLLM's own MultiConnector in turns, step by
step. CPU time of the process, so that neighbours are not measured, and the exporter's thread is; of the ranks, which in
truth run side by side, the slowest one's. The floor is vLLM's own router, which reads the clock before and after each
call into a connector and keeps nothing.

Every two seconds EngineCore looks at what takes time. With cold caches other things fill them before each part of a
step, and between two layers, as a model's Python and its data do. That is not counted.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from kvobs.probe.layer_calls import ARGUMENTS
from kvobs.telemetry.scheduler_telemetry import EVERY_NS
from kvobs.testing import BLOCK, Rig
from kvobs.testing.server import claim_port
from kvobs.vllm_api.hooks import HOOKS
from tests.bench.calls import CONNECTORS, PURE, BusyConnector, entries, probe_of, slowness
from tests.bench.growth import Stepping
from tests.bench.report import Budget, Line, Part

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(80)]
STEP_NS = 5_000_000
LASTS_NS = STEP_NS + 700_000
"""A step, with what is around its forward."""
LOOKS_EVERY = math.ceil(EVERY_NS / LASTS_NS)
"""Steps from one look to the next, in the engine's time."""
REQUESTS = 8
WARM_UP = 18
LOOK_EVERY = 18
"""Steps between two looks at the speed of the machine."""
FLOOR = "the clock read around each call"

ROUTERS: dict[str, tuple[str, bool]] = {
    "stock": ("stock", False),
    "kvobs": ("kvobs", False),
    "kvobs, exporter": ("kvobs", True),
    PURE: ("kvobs", False),
    FLOOR: ("stock", False),
}
"""Title -> router, and whether the exporter runs."""

DOCUMENT = json.dumps([{f"k{i}": [i, str(i), {"x": i * 1.5}]} for i in range(40)])
OTHER_THINGS = json.dumps([{f"key {i} {j}": [i, j / 3, str(j)] for j in range(12)} for i in range(700)])


class Step(NamedTuple):
    """The CPU time of one step in ns: of EngineCore, and of the slowest rank."""

    core: int
    worker: int


def look_by_its_time(engine: Rig, steps: int) -> None:
    """Let an engine look in its next step as if each of those before had taken as long as it would with a model."""
    engine.connector._telemetry._looked_ns = 0 if steps % LOOKS_EVERY == 0 else time.perf_counter_ns()


class Engine(Rig):
    """An engine, and how much CPU time its steps take."""

    is_cold = False

    def __init__(self, router: str, **more: Any) -> None:
        super().__init__(router, **more)
        self._is_kvobs = router == "kvobs"
        self.worked: list[int] = []
        self.steps = self.excluded = 0

    def read_clock(self) -> None:
        """Read the clock before and after each call that vLLM's own router makes into a connector."""
        for router in (self.connector, *self.workers):
            for connector, hook in product(router._connectors, HOOKS.keys() - ARGUMENTS.keys()):
                if hook in vars(Stepping) or hook in vars(BusyConnector):
                    setattr(connector, hook, between_readings(getattr(connector, hook)))
        for worker in self.workers:
            for hook, arguments in ARGUMENTS.items():
                names = ", ".join(arguments)
                scope: dict[str, Any] = {f"c{i}": getattr(c, hook) for i, c in enumerate(worker._connectors)}
                calls = "".join(f"    {name}({names})\n    clock()\n" for name in scope)
                exec(
                    f"def fan_out({names}):\n    clock()\n{calls}",
                    scope | {"clock": time.perf_counter},
                    scope,
                )
                setattr(worker, hook, scope["fan_out"])

    def step_ns(self) -> Step:
        """Run one step."""
        self.worked, self.steps = [], self.steps + 1
        if self._is_kvobs:
            look_by_its_time(self, self.steps)
        self._fill_caches(OTHER_THINGS)
        begin = self._now()
        self.step()
        return Step(self._now() - begin - sum(self.worked), max(self.worked))

    def _now(self) -> int:
        return time.process_time_ns() - self.excluded

    def _fill_caches(self, document: str) -> None:
        """Fill the caches with something else, if they are to be cold."""
        if self.is_cold:
            begin = time.process_time_ns()
            json.loads(document)
            self.excluded += time.process_time_ns() - begin

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> ModelRunnerOutput:
        self._fill_caches(OTHER_THINGS)
        begin = self._now()
        output = super()._work(worker, scheduled, samples)
        self.worked.append(self._now() - begin)
        return output

    def _forward(self, worker: Any, scheduled: Any) -> None:
        worker.start_load_kv(None)
        for layer in LAYERS:
            worker.wait_for_layer_load(layer)
            self._fill_caches(DOCUMENT)
            worker.save_kv_layer(layer, None, None)
        worker.wait_for_save()


def between_readings(call: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.perf_counter_ns

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock()
        answer = call(*args, **kwargs)
        clock()
        return answer

    return timed


class WithoutLayers(Stepping):
    """Has no hooks of layers, as most connectors."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...


class Case(NamedTuple):
    """An engine to be measured; ``steps`` of a round, and the budgets of kvobs's figures."""

    title: str
    connectors: tuple[type[Stepping], ...]
    ranks: int
    is_cold: bool
    rounds: int
    steps: int
    routers: tuple[str, ...]
    budgets: Mapping[str, float]


USUAL, BUSY = (WithoutLayers,) * 2, (Stepping,) * CONNECTORS
CASES = (
    Case(
        "2 without layer hooks, cold", USUAL, 1, True, 3, LOOKS_EVERY, ("stock", "kvobs"), {"mean": 1.004, "p99": 1.02}
    ),
    Case("2 without layer hooks, warm", USUAL, 1, False, 4, 2 * LOOKS_EVERY, ("stock", "kvobs"), {"mean": 1.0}),
    Case("cold, 1 rank", BUSY, 1, True, 3, LOOKS_EVERY, tuple(ROUTERS), {"mean": 1.008, "p99": 1.02}),
    Case("cold, 8 ranks", BUSY, 8, True, 2, LOOKS_EVERY, ("stock", "kvobs", "kvobs, exporter"), {"p99": 1.02}),
    Case("warm, 1 rank", BUSY, 1, False, 4, 2 * LOOKS_EVERY, tuple(ROUTERS), {"mean": 1.003, "p99": 1.02}),
)
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "p95": lambda values: percentile(values, 95),
    "p99": lambda values: percentile(values, 99),
}
ADDED = {True: (25, 10, None, None), False: (6, 0, None, None)}
"""Whether the caches are cold -> the budgets of what is added by hooks of EngineCore and a rank, in us."""


def measure() -> Part:
    lines = [line for case in CASES for line in _measure(case)]
    title = f"A decode step of 5 ms, {len(LAYERS)} layers, {CONNECTORS} busy connectors unless stated otherwise"
    return Part(f"{title}; baseline: vLLM's own", lines)


def _measure(case: Case) -> list[Line]:
    rounds = [_round(case) for _ in range(case.rounds)]
    lines = []
    for router in case.routers[1:]:
        budgets = {FLOOR: {}, PURE: {"mean": 1.03} if case.is_cold else {}}.get(router, case.budgets)
        for figure, of in FIGURES.items():
            times = {name: [of(_whole_ms(steps[name], slow)) for steps, slow in rounds] for name in ("stock", router)}
            budget = Budget(budgets[figure]) if figure in budgets else None
            lines.append(Line(f"{case.title}, {figure}, {router}", "ms", times[router], times["stock"], budget))
    added = [_added_us(*each) for each in rounds] if FLOOR in case.routers else []
    if added:
        names = ["EngineCore's hooks", "a rank's hooks", f"EngineCore: {FLOOR}", f"a rank: {FLOOR}"]
        for name, values, limit in zip(names, zip(*added, strict=True), ADDED[case.is_cold], strict=True):
            budget = Budget(limit) if limit is not None else None
            lines.append(Line(f"{case.title}, added by {name}", "us", values, budget=budget))
    return lines


def _round(case: Case) -> tuple[dict[str, list[Step]], float]:
    """Return the steps of each router, and how much slower than the reference the machine was."""
    engines = {name: _started(case, name) for name in case.routers}
    steps: dict[str, list[Step]] = {name: [] for name in engines}
    slow = []
    for number in range(WARM_UP + case.steps):
        for name in random.sample(list(engines), len(engines)):
            step = engines[name].step_ns()
            if number >= WARM_UP:
                steps[name].append(step)
        if not number % LOOK_EVERY:
            slow.append(slowness())
    for engine in engines.values():
        engine.connector.shutdown()
    return steps, statistics.median(slow)


def _started(case: Case, name: str) -> Engine:
    """Return an engine whose requests are past their prompts."""
    router, has_exporter = ROUTERS[name]
    options = {"exporter": {"port": claim_port(0)}} if has_exporter else None
    blocks = REQUESTS * (2 + (WARM_UP + case.steps) // BLOCK + 2)
    with probe_of(name):
        engine = Engine(router, connectors=entries(case.connectors), ranks=case.ranks, kvobs=options, blocks=blocks)
    engine.is_cold = case.is_cold
    if name == FLOOR:
        engine.read_clock()
    for i in range(REQUESTS):
        engine.add(f"r{i}", tokens=BLOCK, max_tokens=WARM_UP + case.steps + 10)
    engine.run(3)
    return engine


def _whole_ms(steps: Sequence[Step], slow: float) -> list[float]:
    return [(STEP_NS + (step.core + step.worker) / slow) / 1e6 for step in steps]


def _added_us(steps: dict[str, list[Step]], slow: float) -> tuple[float, ...]:
    """Return what is added to a step by EngineCore and by a rank, and by readings of the clock alone."""
    groups = steps["stock"], steps["kvobs"], steps[FLOOR]
    cores, workers = ([statistics.median(step[i] for step in group) / 1e3 / slow for group in groups] for i in (0, 1))
    return cores[1] - cores[0], workers[1] - workers[0], cores[2] - cores[0], workers[2] - workers[0]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
