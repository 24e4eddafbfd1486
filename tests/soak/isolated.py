"""The soak of best-effort children: both of an engine's fail in random hooks, on random ranks, for random times.

What becomes of a load or save then is not predicted. But every request must end, once, every block must be free when
the engine is idle, no book may hold anything, and memory must stay flat.
"""

from collections import Counter, deque
from collections.abc import Callable
from random import Random

import pytest

from kvobs.testing import BLOCK, Script
from tests.soak import memory
from tests.soak.report import Result
from tests.support.best_effort import OF_SCHEDULER, OF_WORKER, Isolating
from tests.support.observed import KV, SYNC
from tests.support.rig import assert_nothing_is_left

AT_ONCE = 40
"""Requests of one storm; after it the engine goes idle."""
CALM_STEPS = 60
OFFERS = (KV, KV, SYNC, (0, False), [(None, False), KV])
WORDS = ("received", "saved", "failed")


class Storm:
    """One engine, and what happens to it."""

    def __init__(self, random: Random, patch: pytest.MonkeyPatch, *, lag: int) -> None:
        self.random = random
        self.children = [Script(f"storm{lag}-{name}") for name in ("a", "b")]
        for child in self.children:
            child.calls = deque(maxlen=0)  # type: ignore[assignment]
        options = {"other_class": "BestEffortConnector", "isolate": ["best", "other"], "lag": lag}
        self.engine = Isolating(patch, *self.children, **options)  # type: ignore[arg-type]
        self.faults: Counter[str] = Counter()
        self.added = 0
        self.ends: Counter[str] = Counter()  # of this storm's requests

    def step(self, seconds: float = 0.01) -> None:
        self.engine.step(seconds=seconds)
        outputs = self.engine.rig.request_outputs
        self.ends.update(each.request_id for each in outputs if each.finish_reason is not None)

    def run(self) -> list[str]:
        """Serve some requests, go idle, and return what is wrong."""
        requests = [f"s{self.added + i}" for i in range(AT_ONCE)]
        self.added += AT_ONCE
        waiting, aborted = list(requests), set[str]()
        while waiting:
            if self.random.random() < 0.4:
                self._send(waiting.pop())
            self._change(requests)
            if self.random.random() < 0.05:
                aborted |= self._abort([r for r in requests if self.engine.rig.status(r) != "gone"])
            self.step(seconds=self.random.choice([0.01, 0.01, 0.5, 3]))
        self._calm(requests)
        left = [request for request in requests if self.engine.rig.status(request) != "gone"]
        wrong = [f"{request} never ended" for request in requests if request not in aborted and not self.ends[request]]
        wrong += [f"{request} ended {n} times" for request, n in self.ends.items() if n > 1]
        wrong += [f"{request} is {self.engine.rig.status(request)}" for request in left]
        assert_nothing_is_left(self.engine.rig)
        self.ends.clear()
        for child in self.children:
            child.offers.clear()
            child.promises.clear()
        return wrong

    def _send(self, request: str) -> None:
        for child in self.children:
            child.offers[request] = self.random.choice(OFFERS)
            if self.random.random() < 0.3:
                child.promises.add(request)
        # Few prompts, so that some hit what vLLM has itself.
        tokens = self.random.choice([BLOCK + 4, 4 * BLOCK + 6])
        self.engine.rig.add(request, tokens=tokens, max_tokens=self.random.randint(1, 6))

    def _change(self, requests: list[str]) -> None:
        """Let children fail otherwise than before, or not at all, and report what they have, and have not."""
        for child in self.children:
            if self.random.random() < 0.15:
                hooks = self.random.sample([*OF_SCHEDULER, *OF_WORKER], self.random.randint(0, 3))
                self.faults.update(f"fails in {hook}" for hook in hooks)
                child.raises, child.raises_on = _failures(*hooks), self.random.choice([None, {0}, {1}])
            for rank in (0, 1):
                for request in self.random.sample(requests, 2):
                    if self.engine.rig.status(request) != "RUNNING":
                        child.say(rank, **{self.random.choice(WORDS): request})

    def _abort(self, live: list[str]) -> set[str]:
        if not live:
            return set()
        request = self.random.choice(live)
        self.faults["abort"] += 1
        self.engine.rig.abort(request)
        return {request}

    def _calm(self, requests: list[str]) -> None:
        """Let everything be reported; or nothing, after one more failure of each child: it must be given up then."""
        is_told = self.random.random() < 0.5
        for child in self.children:
            child.reports.clear()
            child.raises, child.raises_on = ({} if is_told else _failures("take_events")), None
            if not is_told:  # a save promised after that failure, and never reported, is held for ever, as in vLLM
                child.promises.clear()
        self.step()
        everything = " ".join(requests) if is_told else ""
        for _ in range(CALM_STEPS):
            for child in self.children:
                child.raises = {}
                for rank in (0, 1):
                    child.say(rank, received=everything, saved=everything)
            self.step(seconds=1)
        for child in self.children:
            child.reports.clear()


def _failures(*hooks: str) -> dict[str, Exception]:
    """Return exceptions of their own: one keeps the frames of every time that it is raised."""
    return {hook: ConnectionError("store is gone") for hook in hooks}


def run(requests: int, seed: int, show: Callable[[str], None]) -> Result:
    """Serve so many requests in storms, half of them with vLLM's asynchronous scheduling."""
    result = Result("Best-effort connectors", budget_mib=5)
    with result.measured():
        for lag in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                _live(Storm(Random(seed + lag), patch, lag=lag), requests // 2, result, show)
    return result


def _live(storm: Storm, requests: int, result: Result, show: Callable[[str], None]) -> None:
    shape = "async scheduling" if storm.engine.rig.lag else "sync scheduling"
    samples = result.memory.setdefault(shape, [])
    every = max(AT_ONCE, requests // 40)
    while storm.added < requests:
        for wrong in storm.run():
            result.wrong.append(f"{shape}: {wrong}")
        if storm.added // every > len(samples):
            storm.engine.rig.stats.clear()
            samples.append(memory.sample(storm.added))
            show(f"{shape}: {storm.added:,} of {requests:,} requests, {storm.engine.epoch:,} quarantines of the first")
    result.requests += storm.added
    result.faults += storm.faults
    result.faults["quarantines"] += sum(word.epoch for word in storm.engine.side.audience.isolation.states().values())
    assert storm.engine.epoch > storm.added // AT_ONCE, "that was no storm"
