"""Random request lives, the same for the same seed, and what must hold in every one of them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.connectors.engine import Engine
from tests.connectors.faults import Faults
from tests.connectors.memory import BLOCK
from tests.connectors.plug import Plug

PATIENCE = 400
"""Steps without a new request after which one that is not done waits for ever; slow wires take 4 steps."""


@dataclass
class Ending:
    """What was found in one life."""

    wrong_uses: list[str] = field(default_factory=list)
    wrong_stores: dict[str, list[str]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)  # requests that never end
    pinned: int = 0  # GPU blocks that stay taken
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    cleared: dict[str, int] = field(default_factory=dict)
    died: str = ""
    stored: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0

    @property
    def faults(self) -> list[str]:
        """Return everything that is wrong, a line each."""
        lines = [f"died: {self.died}"] if self.died else []
        lines += self.wrong_uses[:3]
        lines += [f"{name} stored wrong KV: {line}" for name, all_ in self.wrong_stores.items() for line in all_[:3]]
        lines += [f"waits for ever: {request}" for request in self.waiting[:3]]
        lines += [f"{self.pinned} GPU blocks are not free"] if self.pinned else []
        lines += [f"{name} keeps {line}" for name, all_ in self.leftovers.items() for line in all_[:4]]
        lines += [f"{name} was cleared {count} times" for name, count in self.cleared.items() if count]
        return lines


class Prompts:
    """Prompts that share prefixes: a few stems, of which a request takes a part, and adds some of its own."""

    def __init__(self, rng: random.Random, stems: int = 3, length: int = 9 * BLOCK) -> None:
        self.random = rng
        self.stems = [[rng.randrange(250) for _ in range(length)] for _ in range(stems)]
        self.past: list[list[int]] = []

    def next(self) -> list[int]:
        if self.past and self.random.random() < 0.2:
            return list(self.random.choice(self.past))
        self.past.append(self._new())
        return list(self.past[-1])

    def _new(self) -> list[int]:
        stem = self.random.choice(self.stems)
        shared = self.random.choice((0, 2, 4, 6, 8, 9)) * BLOCK + self.random.choice((0, 0, 0, 5))
        own = self.random.choice((1, 3, BLOCK, 2 * BLOCK + 1, 3 * BLOCK))
        return stem[:shared] + [self.random.randrange(250) for _ in range(own)]


def live(
    engine: Engine, seed: int, *, requests: int = 24, aborts: float = 0.15, params: Any = None, seconds: float = 0.0
) -> Ending:
    """Run one life to its end and look at everything.

    Args:
        engine: freshly built.
        seed: of everything random.
        requests: how many.
        aborts: the share of steps in which a live request is aborted.
        seconds: for which a request may wait that nobody reports.
        params: called with a number and a generator, returns a request's ``kv_transfer_params``.
    """
    rng = random.Random(seed)
    prompts, ending, added = Prompts(rng), Ending(), 0
    try:
        while added < requests:
            for _ in range(rng.choice((0, 0, 1, 1, 2))):
                if added < requests:
                    extra = params(added, rng) if params else {}
                    engine.add(f"r{added}", prompts.next(), rng.choice((1, 2, 5, 30, 60)), **extra)
                    added += 1
            if engine.scheduler.requests and rng.random() < aborts:
                engine.abort(rng.choice(sorted(engine.scheduler.requests)))
            if rng.random() < 0.08:
                engine.forget()
            engine.step()
        settle(engine, seconds)
    except Exception as error:
        ending.died = f"{type(error).__name__}: {str(error)[:200]} (step {engine.steps})"
        ending.__cause__ = error  # type: ignore[attr-defined]
    examine(engine, ending)
    return ending


def settle(engine: Engine, seconds: float = 0.0) -> None:
    """Step until vLLM would stop, or nothing more is to be hoped for after so many steps and so much time."""
    begin, steps = time.monotonic(), 0
    while engine.is_busy and (steps < PATIENCE or time.monotonic() - begin < seconds):
        engine.step()
        steps += 1
        if seconds:
            time.sleep(0.001)  # as vLLM does while it waits for a transfer


def examine(engine: Engine, ending: Ending) -> None:
    """Take down what was found, and what is left if the engine is still alive."""
    ending.steps, ending.preemptions = engine.steps, engine.preemptions
    is_a_lie = any(plug.is_a_lie for plug in engine.plugs)
    ending.wrong_uses = [] if is_a_lie else engine.wrong_uses
    for plug in engine.plugs:
        ending.wrong_stores[plug.name] = [] if is_a_lie else plug.wrong_stores
        ending.cleared[plug.name] = plug.cleared
        ending.stored[plug.name], ending.loaded[plug.name] = plug.stored, plug.loaded
    if ending.died:
        return
    ending.waiting = [f"{r.request_id} ({r.status.name})" for r in engine.scheduler.requests.values()]
    ending.pinned = engine.held_blocks
    ending.leftovers = {plug.name: plug.leftovers() for plug in engine.plugs}


def build(router: str, plugs: list[Plug], patch: Any, faults: Faults | None = None, **options: Any) -> Engine:
    """Put the stand-ins in place, and what is to fail, and build the engine."""
    for plug in plugs:
        plug.install(patch)
    if faults is not None:
        faults.install(patch)
    engine = Engine(router, plugs, **options)
    if faults is not None:
        faults.live = lambda: set(engine.scheduler.requests)
    return engine
