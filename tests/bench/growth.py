"""What grows with the engine: waiting lookups, running requests, loads in progress, connectors, and ranks.

vLLM's real scheduler around kvobs and around vLLM's own MultiConnector, in turns, in one process; CPU time. Connectors
implement all hooks that are called, and do next to nothing in them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvobs.testing import BLOCK, Rig
from tests.bench.calls import CONNECTORS, BusyConnector, rig_of
from tests.bench.report import Budget, Part, against_stock

ROUNDS = 21
STEPS = 50
"""In one timing, of those that take microseconds."""
ENDING = 10
"""Loads that end in one step."""
PROMPT = BLOCK + 1
NOT_WAITING = {"wait_for": "earlier", "lookup_timeout_ms": 3_600_000.0}

Answer = tuple[int | None, bool]
Timed = Callable[[], float]
"""Runs once, and returns the microseconds that it took."""


class Stepping(BusyConnector):
    """Implements the hooks of a step. It has nothing of any prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return len(self.layer), False

    def update_connector_output(self, connector_output: Any) -> None:
        self.layer = ""

    def take_events(self) -> Any:
        return () if self.layer else []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, {self.layer} if self.layer else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {0} if self.layer else set()


class Loading(Stepping):
    """Has a block of the prompts of requests called ``load``; their loads end when they are ``due``."""

    due: ClassVar[set[str]] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return (BLOCK, True) if request.request_id.startswith("load") else (0, False)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, set(self.due) or None


class Late(Stepping):
    """Does not know yet of requests called ``wait``."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return (None, False) if request.request_id.startswith("wait") else (0, False)


class Later(Late):
    """Does not know yet of any request."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return None, bool(self.layer)


def waiting(router: str, n: int, connectors: int = CONNECTORS) -> Timed:
    """Time vLLM's ``schedule()`` while so many requests wait for the answer of the last connector."""
    return _scheduling(rig_of(router, *[Stepping] * (connectors - 1), Late), n)


def left_open(router: str, n: int) -> Timed:
    """Time the same with options not to wait, beside as many requests that load, whose lookups kvobs has left open.

    With vLLM's own router, which would wait, they have all been answered.
    """
    last = Later if router == "kvobs" else Late
    rig = rig_of(router, Loading, Stepping, last, kvobs=NOT_WAITING, blocks=4 * n)
    load(rig, n)
    return _scheduling(rig, n)


def load(rig: Rig, n: int) -> None:
    """Begin so many loads."""
    for i in range(n):
        rig.add(f"load{i}", PROMPT)
    rig.step()


def _scheduling(rig: Rig, n: int) -> Timed:
    for i in range(n):
        rig.add(f"wait{i}", PROMPT)
    return lambda: _us(rig.scheduler.schedule)


def running(router: str, n: int, connectors: int = CONNECTORS) -> Timed:
    """Time a step's hooks on the scheduler's side, with so many requests that decode."""
    return _stepping(rig_of(router, *[Stepping] * connectors), n)


def loading(router: str, n: int) -> Timed:
    """Time them with one request that decodes, and so many loads in progress."""
    rig = rig_of(router, Loading, *[Stepping] * (CONNECTORS - 1), blocks=4 * n)
    load(rig, n)
    return _stepping(rig, 1)


def _stepping(rig: Rig, n: int) -> Timed:
    connector, names = rig.connector, [f"r{i}" for i in range(n)]
    decoding = {"req_ids": names, "new_block_ids": [None] * n, "num_output_tokens": [5] * n}
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = dataclasses.replace(
        CachedRequestData.make_empty(), **decoding, num_computed_tokens=[*range(1000, 1000 + n)]
    )
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict.fromkeys(names, 1), n

    def steps() -> None:
        for _ in range(STEPS):
            connector.build_connector_meta(output)
            connector.update_connector_output(KVConnectorOutput())
            connector.get_kv_connector_stats()
            list(connector.take_events())

    return lambda: _us(steps) / STEPS


def working(router: str, connectors: int) -> Timed:
    """Time a step's hooks on the worker's side, without those of layers."""
    rig = rig_of(router, *[Stepping] * connectors)
    worker, meta = rig.workers[0], rig.scheduler.schedule().kv_connector_metadata

    def steps() -> None:
        for _ in range(STEPS):
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            worker.start_load_kv(None)
            worker.wait_for_save()
            worker.get_transfer_results(set())
            worker.get_block_ids_with_load_errors()
            worker.get_kv_connector_stats()
            worker.build_connector_worker_meta()
            worker.clear_connector_metadata()

    return lambda: _us(steps) / STEPS


def ending(router: str, ranks: int, *, on_rank: bool = False) -> Timed:
    """Time the step in which loads end on all ranks: in EngineCore, or on one of the ranks."""
    rig = rig_of(router, Loading, *[Stepping] * (CONNECTORS - 1), ranks=ranks)
    if router == "stock":  # kvobs has replaced vLLM's own where it is looked up
        rig.aggregator = stock.KVOutputAggregator.from_connector(rig.connector, ranks)
    timed = (
        [(rig.workers[0], hook) for hook in ("start_load_kv", "get_transfer_results", "build_connector_worker_meta")]
        if on_rank
        else [(rig.aggregator, "aggregate"), (rig.connector, "update_connector_output")]
    )
    spent: list[float] = []
    for owner, name in timed:
        setattr(owner, name, _noting(getattr(owner, name), spent))

    def step() -> float:
        load(rig, ENDING)
        Loading.due = set(rig.scheduler.requests)
        spent.clear()
        rig.step()
        us, Loading.due = sum(spent), set()
        rig.run(4)
        assert not rig.scheduler.requests
        rig.scheduler.reset_prefix_cache()  # the next ones have the same prompts
        return us

    return step


def _noting(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return ``call`` with the microseconds of each call appended to ``spent``."""

    def noting(*args: Any) -> Any:
        begin = time.thread_time_ns()
        answer = call(*args)
        spent.append((time.thread_time_ns() - begin) / 1e3)
        return answer

    return noting


def _us(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


class Case(NamedTuple):
    """What is timed; ``prepare`` gets the router."""

    title: str
    prepare: Callable[[str], Timed]
    budget: Budget | None = None


CASES = (
    Case("schedule(), 100 waiting lookups", partial(waiting, n=100)),
    Case("schedule(), 500 waiting lookups", partial(waiting, n=500)),
    Case("schedule(), 2,000 waiting lookups", partial(waiting, n=2000), Budget(1.2)),
    Case("schedule(), 500 waiting lookups, 1 connector", partial(waiting, n=500, connectors=1)),
    Case("schedule(), 500 waiting lookups, 16 connectors", partial(waiting, n=500, connectors=16)),
    Case("schedule(), 100 waiting lookups, as many open", partial(left_open, n=100)),
    Case("schedule(), 500 waiting lookups, as many open", partial(left_open, n=500)),
    Case("schedule(), 2,000 waiting lookups, as many open", partial(left_open, n=2000), Budget(1.5)),
    *(Case(f"scheduler's step hooks, {n:,} running", partial(running, n=n)) for n in (1, 100, 2000, 20_000)),
    Case("scheduler's step hooks, 2,000 loads in progress", partial(loading, n=2000)),
    *(Case(f"scheduler's step hooks, connectors: {n}", partial(running, n=100, connectors=n)) for n in (1, 8, 16)),
    *(Case(f"a worker's step hooks, connectors: {n}", partial(working, connectors=n)) for n in (1, 3, 8, 16)),
    *(Case(f"EngineCore, {ENDING} loads end, ranks: {n}", partial(ending, ranks=n)) for n in (1, 8, 64)),
    Case(f"a rank, {ENDING} loads end", partial(ending, ranks=1, on_rank=True)),
)


def measure(say: Callable[[str], None], rounds: int = ROUNDS) -> Part:
    lines = []
    for case in CASES:
        say(f"  {case.title}")
        routers = {router: case.prepare(router) for router in ("stock", "kvobs")}
        lines.append(against_stock(case.title, "us", routers, rounds, case.budget))
    usual = f"{CONNECTORS} connectors unless stated otherwise"
    return Part(f"What grows with the engine, {usual}, CPU time; baseline: vLLM's own", lines)
