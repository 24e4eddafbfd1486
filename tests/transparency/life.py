"""What happens in one life of an engine: its shape, its connectors' characters, its requests, and their accidents.

A life is drawn from a source of randomness (a seed, or hypothesis, which can make a failing life smaller). Everything
that a connector answers later follows from the life alone, by ``dice``, never from which router runs it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Any

from vllm import __version__

BLOCK = 16

VERSION = tuple(map(int, __version__.split(".")[:2]))
TAKES_EQUAL_GROUPS = VERSION >= (0, 30)
"""Whether this vLLM takes several KV cache groups of one kind."""
STOCK_ASKS = VERSION >= (0, 30)
"""Whether vLLM's own router asks its children how many ranks report, or waits for all of them for ever."""

FULL, PLAIN, LEAN = "full", "plain", "lean"
"""Shapes of a child: every hook and HMA; every hook, without HMA; the hooks that vLLM cannot do without."""

RECEIVES, WITHDRAWS = "receives", "withdraws"
"""What a child does to the output in ``update_connector_output``: reports its loads there, or takes saves back."""


@dataclass(frozen=True, slots=True)
class Character:
    """How one child behaves; every number is a probability."""

    shape: str = FULL
    hits: float = 0.0
    asynchronous: float = 0.0
    pending: float = 0.0  # "not yet", at each lookup
    ragged: float = 0.0  # an async hit that ends within a block
    fails: float = 0.0  # a load, by request
    bad_blocks: float = 0.0  # a load, by block
    offers_again: float = 0.0  # the same hit after its load failed
    promises: float = 0.0
    promises_aborted: bool = False
    tails: float = 0.0
    slow: float = 0.0  # how long loads and saves take, up to 8 steps
    block_frees: float = 0.0
    chats: float = 0.0  # stats, events, worker metadata
    writes: str | None = None
    strays: float = 0.0  # a report about another's request, at each step


@dataclass(frozen=True, slots=True)
class Plan:
    """One request."""

    name: str
    arrives: int
    family: int  # requests of one family begin with the same tokens
    shared: int
    prompt: int
    answer: int
    reads: bool = True  # else the request asks for nothing to be read from a cache
    aborted: int | None = None  # at this step
    aborted_late: bool = False  # while the workers are at it, not before


@dataclass(frozen=True, slots=True)
class Reset:
    """A reset of the prefix cache, and of the connector's."""

    step: int
    running: bool
    connector: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which the scheduler takes up no request, or no new one."""

    step: int
    until: int
    of_all: bool


@dataclass(frozen=True, slots=True)
class Life:
    seed: int
    is_async: bool  # AsyncScheduler, one step ahead
    runner: str  # "v1" or "v2"
    executor: str  # "uni": one worker in the scheduler's process; "mp": an aggregator, and all is pickled
    ranks: int
    groups: int
    slides: bool  # the last group keeps a sliding window only
    dcp: int
    policy: str
    blocks: int
    budget: int
    drafting: bool  # the step is closed after a draft model's forward
    graph: bool  # a full graph is replayed: no layer hooks
    one_reports: bool  # every child says that one rank's report is enough, and the first alone reports
    children: tuple[Character, ...]
    plans: tuple[Plan, ...]
    resets: tuple[Reset, ...]
    pauses: tuple[Pause, ...] = ()

    @property
    def block(self) -> int:
        """The tokens that a block id stands for."""
        return BLOCK * self.dcp

    def dice(self, *what: object) -> float:
        """Return a number in [0, 1) that follows from the life and ``what``."""
        digest = hashlib.blake2b(repr((self.seed, *what)).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") / 2**56

    def happens(self, probability: float, *what: object) -> bool:
        return probability > 0 and self.dice(*what) < probability


def from_seed(seed: int) -> Life:
    return draw(Random(seed), seed)


def draw(random: Random, seed: int | None = None) -> Life:
    """Draw a life; most have no stray report, so that they can be compared to their end."""
    executor, ranks = random.choice((("uni", 1), ("mp", 1), ("mp", 2), ("mp", 2)))
    has_plain = random.random() < 0.2
    groups = 1 if has_plain or random.random() < 0.7 else 2
    dcp = 2 if random.random() < 0.2 and (groups == 1 or TAKES_EQUAL_GROUPS) else 1
    has_strays, has_failures = random.random() < 0.15, random.random() < 0.5
    limits = _Limits(has_plain, has_strays, has_failures, executor == "mp", groups)
    children = tuple(_character(random, limits) for _ in range(random.choice((1, 2, 2, 2, 3, 3))))
    plans = tuple(_plan(random, i) for i in range(random.randint(1, 7)))
    largest = max(plan.prompt + plan.answer for plan in plans) // BLOCK + 4  # or else that one waits for ever
    resets = tuple(
        Reset(random.randint(1, 40), random.random() < 0.5, random.random() < 0.7)
        for _ in range(random.choice((0, 0, 0, 1, 2)))
    )
    pauses = tuple(
        Pause(step, step + random.randint(1, 6), random.random() < 0.5)
        for step in (random.randint(1, 20),)
        if random.random() < 0.15
    )
    return Life(
        seed=random.getrandbits(32) if seed is None else seed,
        is_async=random.random() < 0.5,
        runner=random.choice(("v1", "v2")),
        executor=executor,
        ranks=ranks,
        groups=groups,
        slides=groups > 1 and dcp == 1 and (random.random() < 0.5 or not TAKES_EQUAL_GROUPS),
        dcp=dcp,
        policy=random.choice(("recompute", "recompute", "fail")),
        blocks=max(largest, random.choice((10, 14, 20, 40, 80))) * groups,
        budget=random.choice((24, 48, 64, 512)),
        drafting=random.random() < 0.15,
        graph=random.random() < 0.3,
        one_reports=random.random() < 0.2 and STOCK_ASKS and all(child.shape != LEAN for child in children),
        children=children,
        plans=plans,
        resets=resets,
        pauses=pauses,
    )


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the children of one life may do at all."""

    has_plain: bool
    has_strays: bool
    has_failures: bool
    has_aggregator: bool
    groups: int


def _character(random: Random, limits: _Limits) -> Character:
    def rate(*choices: Any) -> Any:
        return random.choice(choices)

    shape = rate(FULL, PLAIN) if limits.has_plain else rate(FULL, FULL, LEAN)
    return Character(
        shape=shape,
        hits=rate(0.0, 0.4, 0.9),
        asynchronous=rate(0.0, 0.5, 1.0),
        pending=rate(0.0, 0.0, 0.3, 0.6),
        ragged=rate(0.0, 0.3),
        fails=rate(0.0, 0.5) if limits.has_failures else 0.0,
        # vLLM itself ends on bad blocks where there are several groups.
        bad_blocks=rate(0.0, 0.5) if limits.has_failures and limits.groups == 1 else 0.0,
        offers_again=rate(0.0, 0.0, 0.0, 0.5) if limits.has_failures else 0.0,
        promises=rate(0.0, 0.5, 1.0),
        promises_aborted=random.random() < 0.15,
        tails=rate(0.0, 0.0, 0.3),
        slow=rate(0.0, 0.5, 1.0),
        block_frees=rate(0.0, 0.0, 0.2),
        chats=rate(0.0, 0.3),
        # Where vLLM calls update_connector_output in some steps only, such a child waits for ever by itself.
        writes=rate(None, None, RECEIVES, WITHDRAWS) if limits.has_aggregator and shape != LEAN else None,
        strays=rate(0.0, 0.1) if limits.has_strays else 0.0,
    )


def _plan(random: Random, number: int) -> Plan:
    family = random.randint(0, 1)
    shared = random.choice((0, 16, 32, 64))
    arrives = random.choice((0, 0, 1, 3, 6, 12))
    aborted = arrives + random.randint(0, 12) if random.random() < 0.35 else None
    return Plan(
        name=f"r{number}",
        arrives=arrives,
        family=family,
        shared=shared,
        prompt=random.choice((5, 17, 33, 48, 64, 70, 96, 120)),
        answer=random.choice((1, 2, 5, 20, 45)),
        reads=random.random() < 0.9,
        aborted=aborted,
        aborted_late=random.random() < 0.3,
    )
