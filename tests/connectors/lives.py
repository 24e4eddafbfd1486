"""Random request lives, the same for the same seed, and what must hold in every one of them."""

import random
import time
from typing import Any

from tests.connectors.engine import Engine
from tests.connectors.files import HF3FS, DecodeBench, Example
from tests.connectors.flexkv import FlexKV
from tests.connectors.lmcache_mp import LMCacheMP
from tests.connectors.lmcache_v1 import LMCacheV1
from tests.connectors.memory import BLOCK
from tests.connectors.mooncake_store import AsyncMooncakeStore, MooncakeStore
from tests.connectors.offloading import Offloading, Tiering
from tests.connectors.plug import Plug
from tests.connectors.simple_cpu import LazySimpleCPU, SimpleCPU
from tests.support.rig import forget_unused

PLUGS: dict[str, type[Plug]] = {
    "offloading": Offloading,
    "offloading-tiering": Tiering,
    "lmcache-mp": LMCacheMP,
    "lmcache-v1": LMCacheV1,
    "mooncake-store": MooncakeStore,
    "mooncake-store-async": AsyncMooncakeStore,
    "simple-cpu": SimpleCPU,
    "simple-cpu-lazy": LazySimpleCPU,
    "flexkv": FlexKV,
    "hf3fs": HF3FS,
    "example": Example,
    "decode-bench": DecodeBench,
}
"""All connectors that store, by name."""
SETTINGS: dict[str, dict[str, Any]] = {
    "hf3fs": {"blocks": 70},  # no preemption: see test_stock_faults.py
    "example": {"blocks": 70, "budget": 1024},  # it takes a prompt for computed when its first chunk is
}
"""What of an engine must be different for a connector."""

PATIENCE = 400
"""Steps without a new request after which one that is not done waits for ever; slow wires take 4 steps."""


class Ending:
    """What was found in one life; of an engine that died, no more than what was wrong before."""

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        plugs = engine.plugs
        is_a_lie = any(plug.is_a_lie for plug in plugs)
        self.died = "" if error is None else f"{type(error).__name__}: {str(error)[:200]} (step {engine.steps})"
        self.wrong_uses = [] if is_a_lie else engine.wrong_uses
        self.wrong_stores = {plug.name: [] if is_a_lie else plug.wrong_stores for plug in plugs}
        self.cleared = {plug.name: plug.cleared for plug in plugs if plug.cleared}
        self.stored = {plug.name: plug.stored for plug in plugs}
        self.loaded = {plug.name: plug.loaded for plug in plugs}
        alive = engine.scheduler.requests.values() if error is None else ()
        self.waiting = [f"{request.request_id} ({request.status.name})" for request in alive]  # that never end
        self.pinned = engine.held_blocks if error is None else 0  # GPU blocks that stay taken
        self.leftovers = {plug.name: plug.leftovers() for plug in plugs} if error is None else {}

    @property
    def faults(self) -> list[str]:
        lines = [f"died: {self.died}"] if self.died else []
        lines += self.wrong_uses[:3]
        lines += [f"{name} stored wrong KV: {line}" for name, all_ in self.wrong_stores.items() for line in all_[:3]]
        lines += [f"waits for ever: {request}" for request in self.waiting[:3]]
        lines += [f"{self.pinned} GPU blocks are not free"] if self.pinned else []
        lines += [f"{name} keeps {line}" for name, all_ in self.leftovers.items() for line in all_[:4]]
        lines += [f"{name} was cleared {count} times" for name, count in self.cleared.items()]
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
        stem = self.random.choice(self.stems)
        shared = self.random.choice((0, 2, 4, 6, 8, 9)) * BLOCK + self.random.choice((0, 0, 0, 5))
        own = self.random.choice((1, 3, BLOCK, 2 * BLOCK + 1, 3 * BLOCK))
        self.past.append(stem[:shared] + [self.random.randrange(250) for _ in range(own)])
        return list(self.past[-1])


def live(engine: Engine, seed: int, *, requests: int = 24, seconds: float = 0.0) -> Ending:
    """Run one life of a fresh engine to its end; a request that nobody reports may wait for some seconds."""
    rng = random.Random(seed)
    prompts, added = Prompts(rng), 0
    try:
        while added < requests:
            for _ in range(rng.choice((0, 0, 1, 1, 2))):
                if added < requests:
                    engine.add(f"r{added}", prompts.next(), rng.choice((1, 2, 5, 30, 60)))
                    added += 1
            if engine.scheduler.requests and rng.random() < 0.15:
                engine.abort(rng.choice(sorted(engine.scheduler.requests)))
            if rng.random() < 0.08:
                forget_unused(engine)
            engine.step()
        settle(engine, seconds)
    except Exception as error:
        return Ending(engine, error)
    return Ending(engine)


def settle(engine: Engine, seconds: float = 0.0) -> None:
    """Step until vLLM would stop, or nothing more is to be hoped for after so many steps and so much time."""
    begin, steps = time.monotonic(), 0
    while engine.is_busy and (steps < PATIENCE or time.monotonic() - begin < seconds):
        engine.step()
        steps += 1
        if seconds:
            time.sleep(0.001)  # as vLLM does while it waits for a transfer


def make(name: str, seed: int = 0, **options: Any) -> Plug:
    """Return a fresh plug; ``name+x`` is the same class once more under another name."""
    return PLUGS[name.partition("+")[0]](name, seed, **options)


def build(router: str, plugs: list[Plug], patch: Any, **options: Any) -> Engine:
    for plug in plugs:
        plug.install(patch)
    return Engine(router, plugs, **options)
