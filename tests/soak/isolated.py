"""The soak of best-effort connectors: both of an engine's fail in random hooks, on random ranks, for random times.

What becomes of a load or save then is not predicted. But every request must end, once, every block must be free when
the engine is idle, no book may hold anything, and memory must stay flat.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.soak import memory
from tests.soak.report import Result
from tests.support.best_effort import OF_SCHEDULER, OF_WORKER
from tests.support.observed import Clocked
from tests.support.rig import assert_nothing_is_left
from tests.support.runners import Running
from tests.transparency import engine
from tests.transparency.connectors import STAGES, Stage
from tests.transparency.life import Character, Life, draw_plan
from tests.transparency.record import Cause, Run

AT_ONCE = 40
"""Requests of one storm; after it the engine goes idle."""
CALM_STEPS = 60
HOOKS = (*OF_SCHEDULER, *OF_WORKER, "request_finished_all_groups")
CONNECTOR = Character(
    hits=0.7,
    asynchronous=0.6,
    pending=0.2,
    fails=0.2,
    promises=0.3,
    promises_aborted=True,
    slow=0.5,
    chats=0.1,
    strays=0.02,
)


class Failing(Run):
    """In place of a record: raises in some hooks of connectors."""

    def __init__(self) -> None:
        super().__init__("kvobs")
        self.hooks: dict[str, set[str]] = {}  # by connector and process

    def note(self, who: str, hook: str, *arguments: Any) -> None:
        if hook in self.hooks.get(who, ()):
            self.seen[f"fails in {hook}"] += 1
            raise ConnectionError("store is gone")

    def mark(self, cause: Cause, *arguments: Any) -> None:
        """Keep nothing: memory must stay flat."""


class Storm(Clocked):
    """One engine, and what happens to it."""

    def __init__(self, name: str, random: Random, patch: pytest.MonkeyPatch, running: Running) -> None:
        self.random, self.failing, self.added = random, Failing(), 0
        life = Life((CONNECTOR, CONNECTOR), (), running=running, seed=random.getrandbits(32), blocks=60, most_running=8)
        STAGES[name] = stage = Stage(life, self.failing)
        self.make_rig = lambda _router, *, kvobs, **_: engine.Engine(stage, name, "kvobs", kvobs)
        names = ["best", "other"]
        super().__init__(patch, engine.entries_of(life, name), {"names": names, "best_effort": names})
        self.isolation = self.rig.connector._side.targets.isolation
        self.ends: Counter[str] = Counter()

    def step(self, steps: int = 1, seconds: float = 1) -> None:
        for _ in range(steps):
            super().step(1, seconds)
            self.ends.update(each.request_id for each in self.rig.request_outputs if each.finish_reason is not None)

    def serve(self) -> list[str]:
        """Serve some requests, go idle, and return what is wrong."""
        now = self.failing.step
        plans = [
            replace(draw_plan(self.random, i), name=f"s{i}", arrives=now + 2 * i, aborted=None, inputs=())
            for i in range(AT_ONCE)
        ]
        plans = [replace(p, aborted=p.arrives + 5) if self.random.random() < 0.1 else p for p in plans]
        self.rig.plan(plans)
        self.added += AT_ONCE
        while self.rig.to_come:
            self._change()
            self.step(seconds=self.random.choice([0.01, 0.01, 0.5, 3]))
        self._calm()
        wrong = [f"{p.name} never ended" for p in plans if p.aborted is None and not self.ends[p.name]]
        wrong += [f"{name} ended {n} times" for name, n in self.ends.items() if n > 1]
        self.ends.clear()
        assert_nothing_is_left(self.rig)
        return wrong

    def _change(self) -> None:
        """Let connectors fail otherwise than before, or not at all."""
        for index in (0, 1):
            if self.random.random() < 0.15:
                hooks = set(self.random.sample(HOOKS, self.random.randint(0, 3)))
                ranks = self.random.choice([(0, 1), (0,), (1,)])
                failing = {f"connector {index} rank {rank}": hooks if rank in ranks else set() for rank in (0, 1)}
                self.failing.hooks |= failing | {f"connector {index} scheduler": hooks if 0 in ranks else set()}

    def _calm(self) -> None:
        """Let nothing fail any more, after one more failure of each: what it never reports is given up then."""
        self.failing.hooks = {f"connector {connector} scheduler": {"take_events"} for connector in (0, 1)}
        self.step()
        self.failing.hooks = {}
        self.step(CALM_STEPS)
        for worker in self.rig.workers:
            for connector in worker._connectors:  # of requests whose ids are used again
                connector.half.forget()


def run(requests: int, seed: int, show: Callable[[str], None]) -> Result:
    """Serve so many requests in storms, half of them with vLLM's asynchronous scheduling."""
    result = Result("Best-effort connectors", budget_mib=5)
    with result.measured():
        for is_async in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                running = Running(is_async=is_async, is_v2=is_async, ranks=2)
                _live(Storm(f"storm {running}", Random(seed + is_async), patch, running), requests // 2, result, show)
    return result


def _live(storm: Storm, requests: int, result: Result, show: Callable[[str], None]) -> None:
    shape = str(storm.rig.running)
    samples = result.memory.setdefault(shape, [])
    every = max(AT_ONCE, requests // 40)
    while storm.added < requests:
        for wrong in storm.serve():
            result.wrong.append(f"{shape}: {wrong}")
        if storm.added // every > len(samples):
            storm.rig.stats.clear()
            samples.append(memory.sample(storm.added))
            show(f"{shape}: {storm.added:,} of {requests:,} requests")
    result.requests += storm.added
    result.faults += storm.failing.seen
    quarantines = sum(word.epoch for word in storm.isolation.states().values())
    result.faults["quarantines"] += quarantines
    assert quarantines > storm.added // AT_ONCE, "that was no storm"
