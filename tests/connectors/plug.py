"""What a test needs to know of one connector: its configuration, the stand-in for its wire, and its books."""

from __future__ import annotations

import random
from typing import Any

from tests.connectors.memory import Memory, Truth


class Plug:
    """One child.

    Args:
        name: what it is called in the lives.
        seed: of the delays of its wire.

    A subclass stands in for the wire in ``install``, which runs before the connector is built.
    """

    makes_sync_loads = False
    is_a_lie = False  # what it loads is made up, on purpose

    def __init__(self, name: str = "", seed: int = 0, fail_rate: float = 0.0) -> None:
        self.name = name or type(self).__name__.lower()
        self.random = random.Random(f"{self.name} {seed}")
        self.fail_rate = fail_rate
        self.now = 0  # steps
        self.child: Any = None  # on the scheduler's side
        self.workers: dict[int, Any] = {}
        self.memories: dict[int, Memory] = {}
        self.truth = Truth()
        self.wrong_stores: list[str] = []
        self.stored = 0  # blocks that were compared
        self.loaded = 0
        self.cleared = 0  # how often the store was asked to delete what it holds

    def config(self) -> dict[str, Any]:
        """Return the child's entry in ``connectors``."""
        raise NotImplementedError

    def install(self, patch: Any) -> None:
        """Put the stand-ins in place."""

    def attach_worker(self, child: Any, memory: Memory, truth: Truth, rank: int) -> None:
        """Take a worker's side, before its KV caches are registered."""
        self.workers[rank], self.memories[rank], self.truth = child, memory, truth

    def attach_scheduler(self, child: Any) -> None:
        self.child = child

    def tick(self) -> None:
        """Let a step's time pass for the wire."""
        self.now += 1

    def delay(self) -> int:
        """Return how many steps something takes."""
        return self.random.choice((0, 1, 1, 2, 4))

    def may_fail(self, call: str) -> None:
        """Raise if the wire is to fail in this call."""

    def leftovers(self) -> list[str]:
        """Return what is left in the connector's own books, and in its store's, when the engine is idle."""
        return []

    def check_store(self, page_is_right: bool, what: str) -> None:
        """Count a store, and note it if it is wrong."""
        self.stored += 1
        if not page_is_right:
            self.wrong_stores.append(f"step {self.now}: {what}")
