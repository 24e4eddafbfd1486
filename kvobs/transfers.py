"""One load, one promised save: what is known of it, rank by rank; and those that wait for a rank."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvobs.layout import Blocks
from kvobs.reports import Foreign


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
    is_abandoned: bool = False  # taken for done without a word of its child


class Finished(NamedTuple):
    """What the end of a request means: whether vLLM must hold its blocks, and what came to nothing."""

    holds: bool
    aborted: Load | None  # the load that was still open
    promised: dict[int, Save]  # by child, saves that are open now
    early: dict[int, Save]  # promised saves, by child, that had been reported before the promise
    foreign: list[Foreign]  # reports of saves that were never promised


class Stuck(NamedTuple):
    """A transfer that some ranks reported long ago and others never did."""

    kind: str  # "load" or "save"; in the aggregator also "failure": of a load that no rank says is over
    request: str
    missing: tuple[int, ...]  # ranks; none where it is not known which were to report


class Halves:
    """The transfers that some ranks have reported and others have not, the oldest first."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int, str], tuple[int, Load | Save]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def note(self, kind: str, child: int, request: str, transfer: Load | Save, now_ns: int) -> None:
        """Note that a first rank, not the only one expected, has reported a transfer of ``child``."""
        self._since[kind, child, request] = now_ns, transfer

    def forget(self, kind: str, child: int, request: str) -> None:
        """Note that a transfer is over."""
        self._since.pop((kind, child, request), None)

    def take_stuck(self, before_ns: int, ranks: int) -> list[tuple[int, Stuck]]:
        """Return what has been half reported since before this time, by child; each is handed out once.

        ``ranks`` is how many there are: fewer may be expected to report, and which is not known then.
        """
        found: list[tuple[int, Stuck]] = []
        for (kind, child, request), (since_ns, transfer) in self._since.items():
            if since_ns > before_ns:
                break
            silent = tuple(rank for rank in range(ranks) if rank not in transfer.arrived)
            found.append((child, Stuck(kind, request, silent if transfer.expected == ranks else ())))
        for child, stuck in found:
            self.forget(stuck.kind, child, stuck.request)
        return found
