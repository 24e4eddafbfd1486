"""What the children of a soak do about each request, drawn at random: loads, saves, and every kind of fault."""

from random import Random
from typing import NamedTuple

NEVER = 10**9
"""Steps after which a child reports that never does: it is made to when the soak is over, and the books must close."""

LATE = 20
"""Steps from which a report counts as late."""

Steps = tuple[int | None, ...]
"""By rank, after how many steps it reports; None where it is not one of those that do."""


class Plan(NamedTuple):
    """What one child does about one request."""

    blocks: int = 0  # offered at a lookup
    is_async: bool = False
    loads: int = 1  # offered at most: a failed load is not retried for ever
    not_yet: int = 0  # lookups answered so before the first answer
    received: Steps = ()
    fails: str = ""  # "whole": the load is reported as failed; "blocks": some of its blocks are
    fails_on: tuple[int, ...] = ()  # ranks
    good_blocks: int = 0  # of a load whose blocks fail: so many come before the first bad one
    again: int = 0  # steps after which each rank repeats its report; 0 for not at all
    promises: bool = False
    saved: Steps = ()
    stray: str = ""  # "load", "save" or "failure": reported without having been asked to
    stranger: bool = False  # what is stray is about a request that nobody knows


class Orders(NamedTuple):
    """One request: its length, its end, and what each child does about it."""

    prompt: int
    max_tokens: int
    is_alone: bool  # its prompt is its own
    abort_after: int | None  # steps
    plans: tuple[Plan, ...]


def draw(random: Random, ranks: int, reporters: tuple[int, ...]) -> Orders:
    """Draw one request's orders; ``reporters`` says of each child on how many ranks it reports."""
    return Orders(
        prompt=random.randint(8, 96),
        max_tokens=random.choice((1, 1, 2, 2, 4, 12, 24, 40)),
        is_alone=random.random() < 0.7,
        abort_after=random.choice((0, 1, 2, 5, 10, 15, 20)) if random.random() < 0.08 else None,
        plans=tuple(_plan(random, ranks, n) for n in reporters),
    )


def never(child: int, children: int, plan: Plan) -> Orders:
    """Return the orders of a request that only one child cares about."""
    plans = tuple(plan if i == child else Plan() for i in range(children))
    return Orders(prompt=20, max_tokens=1, is_alone=True, abort_after=None, plans=plans)


def silent(ranks: int) -> tuple[Plan, ...]:
    """Return the plans that pin blocks until the end: a load and a save, that no rank reports, or all but one."""
    nobody = (NEVER,) * ranks
    all_but_one = (1,) * (ranks - 1) + (NEVER,)
    return (
        Plan(blocks=1, is_async=True, received=nobody),
        Plan(blocks=1, is_async=True, received=all_but_one),
        Plan(promises=True, saved=nobody),
        Plan(promises=True, saved=all_but_one),
    )


def _plan(random: Random, ranks: int, reporters: int) -> Plan:
    chance = random.random
    plan = Plan(not_yet=random.randint(1, 3) if chance() < 0.08 else 0)
    if chance() < 0.3:
        loads = random.choice((1, 1, 2))
        plan = plan._replace(
            blocks=random.randint(1, 4),
            is_async=chance() < 0.75,
            loads=loads,
            received=_steps(random, ranks, reporters),
            # Of a request that loads twice a repeated report looks like the next load's.
            again=random.randint(1, 12) if loads == 1 and chance() < 0.1 else 0,
        )
        if chance() < 0.1:
            plan = plan._replace(
                fails=random.choice(("whole", "blocks")) if plan.is_async else "blocks",
                fails_on=_some(random, plan.received),
                good_blocks=random.randint(0, 3),
            )
    elif chance() < 0.03:
        plan = plan._replace(stray=random.choice(("load", "failure")), stranger=chance() < 0.3)
    if chance() < 0.25:
        plan = plan._replace(promises=True, saved=_steps(random, ranks, reporters))
    elif chance() < 0.02 and not plan.stray:
        plan = plan._replace(stray="save", stranger=chance() < 0.3)
    return plan


def _steps(random: Random, ranks: int, reporters: int) -> Steps:
    usual = random.randint(0, 4)
    steps: list[int | None] = [usual + random.randint(0, 1) for _ in range(ranks)]
    if random.random() < 0.04:
        steps[random.randrange(ranks)] = random.randint(LATE, 4 * LATE)
    silent_ranks = random.sample(range(ranks), ranks - reporters)
    return tuple(None if rank in silent_ranks else after for rank, after in enumerate(steps))


def _some(random: Random, steps: Steps) -> tuple[int, ...]:
    """Return one or all of the ranks that report."""
    ranks = tuple(rank for rank, after in enumerate(steps) if after is not None)
    return ranks if random.random() < 0.5 else (random.choice(ranks),)
