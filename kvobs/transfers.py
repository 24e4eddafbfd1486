"""One load, one promised save: what is known of it, rank by rank."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvobs.layout import Blocks


class Slowest(NamedTuple):
    """The rank that was last, and how long after the first."""

    rank: int
    skew_ns: int


class _OnRanks:
    """What a load and a save have in common: ranks that report, and when they did."""

    __slots__ = ()

    expected: int
    arrived: dict[int, int]

    @property
    def is_in(self) -> bool:
        return len(self.arrived) >= self.expected

    @property
    def slowest(self) -> Slowest | None:
        """Compare the ranks; None where there is one only."""
        if len(self.arrived) <= 1:
            return None
        rank = max(self.arrived, key=self.arrived.__getitem__)
        return Slowest(rank, self.arrived[rank] - min(self.arrived.values()))


@dataclass(slots=True)
class Load(_OnRanks):
    """A load that vLLM admitted: ``tokens`` from child ``child``."""

    child: int
    tokens: int
    is_async: bool
    expected: int  # ranks that report
    opened_ns: int = 0
    blocks: Blocks = ()  # that it fills
    arrived: dict[int, int] = field(default_factory=dict)  # rank -> time of its report; what a sync load took there
    lost_tokens: int | None = None  # of a failed load, where it is known that not all are lost
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> when it began and ended there
    failed_on: set[int] = field(default_factory=set)  # ranks
    trace: Any = None  # the tracer's own
    needs_echo: bool = False  # vLLM must be told of the failure through its workers
    aborted: bool = False  # its request ended while it was open

    @property
    def failed(self) -> bool:
        return bool(self.failed_on)

    @property
    def duration_ns(self) -> int:
        """From allocation to the last rank's receipt; of a sync load what it took on the slowest rank."""
        last = max(self.arrived.values(), default=0)
        return max(0, last - self.opened_ns) if self.is_async else last


@dataclass(slots=True)
class Save(_OnRanks):
    """What is known of one child's save of one request. Reports may come before the promise (async scheduling)."""

    promised: bool = False
    done: bool = False
    expected: int = 1
    promised_ns: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    trace: Any = None
