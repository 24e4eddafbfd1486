"""What a soak's books hold of one request: its orders, its open load and saves, and what was said of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.soak.plans import Orders, Plan


class Report(NamedTuple):
    """What a child says on one rank."""

    rank: int
    child: int
    kind: str  # "load", "failure", "save", or "holes": bad blocks of a load
    request: str


@dataclass
class Transfer:
    """An open load or promised save."""

    child: int
    expected: int  # ranks
    tokens: int = 0
    is_async: bool = True
    plan: Plan = field(default_factory=Plan)
    step: int = 0  # that takes a load to the workers
    arrived: set[int] = field(default_factory=set)
    failed: bool = False
    lost: int | None = None  # tokens, where not all of a failed load's are
    is_whole: bool = False  # failed as a whole: vLLM learns of it from the workers
    aborted: bool = False

    @property
    def is_in(self) -> bool:
        return len(self.arrived) >= self.expected


@dataclass
class Life:
    """One request that somebody still knows."""

    orders: Orders
    answers: dict[int, int] = field(default_factory=dict)  # of the last lookup: child -> tokens
    pending: set[int] = field(default_factory=set)  # children that said "not yet"
    outcomes: set[tuple[int, str]] = field(default_factory=set)  # (child, outcome) of its lookups so far
    counted: bool = False  # its offers are
    given: dict[int, int] = field(default_factory=dict)  # of this allocation: child -> tokens
    load: Transfer | None = None
    saves: dict[int, Transfer] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)  # children that reported a save before the end
    promised: list[int] = field(default_factory=list)
    finished: bool = False
    awaited: str = ""  # "received" or "sent": as what vLLM waits for the finished request
