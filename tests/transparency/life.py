"""What happens in one life of an engine: its shape, its connectors' characters, its requests, and their accidents.

A life is drawn from a source of randomness (a seed, or hypothesis, which can make a failing life smaller). Everything
that a connector answers later follows from the life alone, by ``dice``, never from which router runs it.
"""

import hashlib
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from vllm import __version__

from kvobs.testing import BLOCK
from tests.support.runners import Running

VERSION = tuple(map(int, __version__.split(".")[:2]))
TAKES_EQUAL_GROUPS = VERSION >= (0, 30)
"""Whether this vLLM takes several KV cache groups of one kind."""
STOCK_ASKS = VERSION >= (0, 30)
"""Whether vLLM's own router asks its connectors how many ranks report, or waits for all of them for ever."""

STREAMS = VERSION >= (0, 32)
"""Whether vLLM's scheduler keeps a stream whose turn ends while a step is under way."""

V2 = Running(is_v2=True)
FULL, PLAIN, LEAN = "full", "plain", "lean"
"""Shapes of a connector: every hook and HMA; every hook, without HMA; the hooks that vLLM cannot do without."""

RAISING = (
    *("update_state_after_alloc",) * 3,
    *("on_new_request", "get_num_new_matched_tokens", "build_connector_meta", "update_connector_output"),
    *("request_finished", "request_finished_all_groups", "take_events", "has_pending_push_work"),
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "save_kv_layer", "wait_for_save"),
    *("get_transfer_results", "get_kv_connector_stats", "build_connector_worker_meta", "clear_connector_metadata"),
)
"""Hooks in one of which a connector of some lives raises."""

RECEIVES, WITHDRAWS = "receives", "withdraws"
"""What a connector does to the output in ``update_connector_output``: reports its loads there, or takes saves back."""


@dataclass(frozen=True, slots=True)
class Character:
    """How one connector behaves; every number is a probability."""

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
    unchosen: float = 0.0  # a load of what its last lookup found, by request, when it is not chosen
    strays: float = 0.0  # a report about another's request, at each step
    raises: tuple[str, int] = ("", 0)  # at which call of which hook
    one_reports: bool = False  # one rank's report is enough, and the first alone reports


@dataclass(frozen=True, slots=True)
class Plan:
    """One request."""

    name: str  # if another alive one has it, the request waits for that one's end
    arrives: int
    family: int  # requests of one family begin with the same tokens
    shared: int
    prompt: int
    answer: int
    reads: bool = True  # else the request asks for nothing to be read from a cache
    aborted: int | None = None  # at this step
    aborted_late: bool = False  # while the workers are at it, not before
    priority: int = 0
    inputs: tuple[int, ...] = ()  # so many steps later the prompt is streamed in once more; the last ends the stream

    @property
    def length(self) -> int:
        return (self.prompt + self.answer) * max(1, len(self.inputs))


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
    connectors: tuple[Character, ...]
    plans: tuple[Plan, ...]
    resets: tuple[Reset, ...] = ()
    pauses: tuple[Pause, ...] = ()
    seed: int = 1
    running: Running = V2
    groups: int = 1
    slides: bool = False  # the last group keeps a sliding window only
    dcp: int = 1
    policy: str = "recompute"
    blocks: int = 40
    budget: int = 512
    most_running: int = 4
    by_priority: bool = False  # else first come, first served
    drafts: int = 0  # tokens that are drafted for each request and step
    one_reports: bool = False  # every connector says that one rank's report is enough, and the first alone reports

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
    may: dict[str, Any] = {
        "has_plain": has_plain,
        "has_strays": has_strays,
        "has_failures": has_failures,
        "groups": groups,
    }
    number = random.choice((1, 2, 2, 2, 3, 3))
    connectors = [_character(random, has_aggregator=executor == "mp", **may) for _ in range(number)]
    if random.random() < 0.12:
        raising = random.randrange(len(connectors))
        connectors[raising] = replace(connectors[raising], raises=(random.choice(RAISING), random.randint(1, 8)))
    plans = tuple(draw_plan(random, i) for i in range(random.randint(1, 7)))
    # Or else one waits for ever, and a stream keeps what it has while it waits.
    longest = max(plan.length for plan in plans), sum(plan.length for plan in plans if plan.inputs)
    largest = sum(longest) // BLOCK + 4
    resets = tuple(
        Reset(random.randint(1, 40), random.random() < 0.5, random.random() < 0.7)
        for _ in range(random.choice((0, 0, 0, 1, 2)))
    )
    pauses = tuple(
        Pause(step, step + random.randint(1, 6), random.random() < 0.5)
        for step in (random.randint(1, 20),)
        if random.random() < 0.15
    )
    is_async, is_v2 = random.random() < 0.5, random.choice((False, True))
    is_pipeline = ranks > 1 and dcp == 1 and random.random() < 0.4
    life = Life(
        seed=random.getrandbits(32) if seed is None else seed,
        groups=groups,
        slides=groups > 1 and dcp == 1 and (random.random() < 0.5 or not TAKES_EQUAL_GROUPS),
        dcp=dcp,
        policy=random.choice(("recompute", "recompute", "fail")),
        blocks=max(largest, random.choice((10, 14, 20, 40, 80))) * groups,
        budget=random.choice((24, 48, 64, 512)),
        by_priority=random.random() < 0.3,
        drafts=2 if random.random() < 0.25 else 0,
        running=Running(
            is_v2=is_v2,
            is_async=is_async,
            is_pipeline=is_pipeline,
            ranks=ranks,
            is_uni=executor == "uni",
            drafts=random.random() < 0.15,
            is_graph=random.random() < 0.3,
        ),
        one_reports=random.random() < 0.2 and STOCK_ASKS and all(connector.shape != LEAN for connector in connectors),
        connectors=tuple(connectors),
        plans=plans,
        resets=resets,
        pauses=pauses,
    )
    unchosen = [replace(connector, unchosen=random.choice((0.0, 0.9))) for connector in life.connectors]
    return replace(life, connectors=tuple(unchosen))


def _character(
    random: Random, *, has_plain: bool, has_strays: bool, has_failures: bool, has_aggregator: bool, groups: int
) -> Character:
    """Draw a connector of a life whose connectors may do these things at all."""

    def rate(*choices: Any) -> Any:
        return random.choice(choices)

    shape = rate(FULL, PLAIN) if has_plain else rate(FULL, FULL, LEAN)
    return Character(
        shape=shape,
        hits=rate(0.0, 0.4, 0.9),
        asynchronous=rate(0.0, 0.5, 1.0),
        pending=rate(0.0, 0.0, 0.3, 0.6),
        ragged=rate(0.0, 0.3),
        fails=rate(0.0, 0.5) if has_failures else 0.0,
        # vLLM itself ends on bad blocks where there are several groups.
        bad_blocks=rate(0.0, 0.5) if has_failures and groups == 1 else 0.0,
        offers_again=rate(0.0, 0.0, 0.0, 0.5) if has_failures else 0.0,
        promises=rate(0.0, 0.5, 1.0),
        promises_aborted=random.random() < 0.15,
        tails=rate(0.0, 0.0, 0.3),
        slow=rate(0.0, 0.5, 1.0),
        block_frees=rate(0.0, 0.0, 0.2),
        chats=rate(0.0, 0.3),
        # Where vLLM calls update_connector_output in some steps only, such a connector waits for ever by itself.
        writes=rate(None, None, RECEIVES, WITHDRAWS) if has_aggregator and shape != LEAN else None,
        strays=rate(0.0, 0.1) if has_strays else 0.0,
    )


def draw_plan(random: Random, number: int) -> Plan:
    family = random.randint(0, 1)
    shared = random.choice((0, 16, 32, 64))
    arrives = random.choice((0, 0, 1, 3, 6, 12))
    aborted = arrives + random.randint(0, 12) if random.random() < 0.35 else None
    has_inputs = random.random() < 0.12 and STREAMS
    return Plan(
        name=f"r{random.randrange(number) if number and random.random() < 0.15 else number}",
        arrives=arrives,
        family=family,
        shared=shared,
        prompt=random.choice((5, 17, 33, 48, 64, 70, 96, 120)),
        answer=random.choice((1, 2, 5) if has_inputs else (1, 2, 5, 20, 45)),
        reads=random.random() < 0.9,
        aborted=aborted,
        aborted_late=random.random() < 0.3,
        priority=random.randint(0, 2),
        inputs=tuple(sorted(random.sample(range(1, 30), random.randint(1, 3)))) if has_inputs else (),
    )
