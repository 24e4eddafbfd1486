"""Hold a lookup's offers, the state of a load and of a promised save by rank, the reports, and what is in progress."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, takewhile
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from kvobs.state.cache_layout import Blocks

T = TypeVar("T")


class Offer(NamedTuple):
    """A connector's offer: ``tokens`` beyond those computed, loaded asynchronously or within the step."""

    connector_index: int
    tokens: int
    is_async: bool


NOBODY = -1
"""Instead of the connector that was chosen."""
NOTHING = Offer(NOBODY, 0, False)


class LookupResult(NamedTuple):
    """A complete lookup, until vLLM allocates."""

    offers: Sequence[Offer] = ()
    local: int = 0  # tokens that vLLM had computed itself
    left_open: Sequence[int] = ()  # connectors for which the lookup did not wait
    chosen: int = NOBODY  # the connector whose offer it chose
    is_first: bool = False  # no allocation of this request before had an offer
    is_read: bool = True  # False: vLLM ignores what the connectors answer about this request


NO_RESULT = LookupResult()


class ReportKind(IntEnum):
    """The kinds of reports about a request and a connector."""

    RECEIVED = 0  # the connector's async load has arrived on this rank
    FAILED = 1  # the load has failed here; it counts as an arrival without content
    UNMAPPED_BAD_BLOCKS = 2  # bad blocks that vLLM can't map to the request: the whole load has failed
    BAD_BLOCKS = 3  # bad blocks that were passed on to vLLM, which recomputes them; any connector may report them
    SAVED = 4  # the promised save is done here
    SYNC_DONE = 5  # this rank's step with a sync load has ended
    SYNC_FAILED = 6  # as SYNC_DONE, and the connector named bad blocks


class Report(NamedTuple):
    """What one rank reports at one time, of one kind, about loads or saves of one connector.

    ``time_ns`` is when they ended here, and ``began_ns`` when this rank got the order for each (0: unknown); both are
    wall-clock time (ns since the epoch) of this rank's host, and are not compared with times of another host.
    ``spent_ns`` is how long this rank took for each: from the order to the end (0: it reported before that), or how
    long its step waited for a synchronous load.
    """

    rank: int
    kind: ReportKind
    connector_index: int
    time_ns: int
    requests: tuple[str, ...]
    spent_ns: tuple[int, ...]
    began_ns: tuple[int, ...]


Times = tuple[int, int, int]
"""``time_ns``, ``spent_ns`` and ``began_ns`` of a report about one request: there is one for each load and rank."""


class UnexpectedReport(NamedTuple):
    """A report of a transfer that its connector does not own; ``kind`` is as in ``kvobs_unexpected_reports_total``."""

    connector_index: int
    kind: str
    request: str


class WrongBlocks(NamedTuple):
    """The number of a load's blocks with wrong bytes on one rank; ``writer`` is taken to have written them."""

    connector_index: int
    request: str
    blocks: int
    writer: int


class Slowest(NamedTuple):
    """The rank that took longest, and how much longer than the fastest."""

    rank: int
    skew_ns: int


class _OnRanks:
    """The common part of a load and a save: the expected ranks and their reports."""

    __slots__ = ("_slowest", "arrived_ns")

    expected: int
    arrived: dict[int, Times | None]  # by rank; None if it counts as arrived without a report
    arrived_ns: int  # when the last of these reports was read, by the scheduler's clock
    _slowest: Slowest  # once it is known

    @property
    def is_in(self) -> bool:
        return len(self.arrived) >= self.expected

    def complete(self, now_ns: int) -> list[int]:
        """Count every rank without a report as arrived now; return these ranks."""
        silent = [rank for rank in range(self.expected) if rank not in self.arrived]
        if silent:
            self.arrived |= dict.fromkeys(silent)
            self.arrived_ns = now_ns
        return silent

    @property
    def slowest(self) -> Slowest | None:
        """Compare how long each rank took; None if there is only one, or if not every expected one has reported."""
        if len(self.arrived) < max(2, self.expected):
            return None
        if not hasattr(self, "_slowest"):  # several observers ask at the end
            spent = self.spent_ns
            if len(spent) < len(self.arrived):
                return None
            longest = max(spent)
            self._slowest = Slowest([*self.arrived][spent.index(longest)], longest - min(spent))
        return self._slowest

    @property
    def spent_ns(self) -> list[int]:
        """How long each rank took that made a report, in ns."""
        return [times[1] for times in self.arrived.values() if times is not None]

    @property
    def reported(self) -> dict[int, Times]:
        """The times of each rank that made a report."""
        return {rank: times for rank, times in self.arrived.items() if times is not None}


@dataclass(slots=True)
class Load(_OnRanks):
    """A load that vLLM admitted: ``tokens`` from one connector."""

    connector_index: int
    tokens: int
    is_async: bool
    expected: int  # ranks that report
    opened_ns: int = 0
    blocks: Blocks = ()  # that it fills
    size: int = 0  # in bytes, over all ranks
    arrived: dict[int, Times | None] = field(default_factory=dict)
    arrived_ns: int = 0
    local_tokens: int = 0  # before it, in vLLM's own cache
    rest_tokens: int = 1  # after it, which are computed in any case
    lost_tokens: int | None = None  # tokens lost by a failed load, if known to be fewer than all
    failed_on: set[int] = field(default_factory=set)  # ranks
    blamed_by: set[int] = field(default_factory=set)  # other connectors that reported a failure within it
    must_report_failure: bool = False  # the workers must report the failure to vLLM
    aborted: bool = False  # the request ended while it was open

    @property
    def failed(self) -> bool:
        return bool(self.failed_on)

    @property
    def recomputed_tokens(self) -> int:
        """The tokens of a failed load that vLLM computes, unless the failure ends the request."""
        # If one rank has lost all of it, another rank's bad blocks make no difference.
        return self.tokens if self.must_report_failure or self.lost_tokens is None else self.lost_tokens

    @property
    def outcome(self) -> str:
        return "failed" if self.failed else "aborted" if self.aborted else "ok"

    @property
    def duration_ns(self) -> int:
        """The duration from allocation to the last rank's receipt; of a sync load its time on the slowest rank."""
        if self.is_async:
            return max(0, self.arrived_ns - self.opened_ns)
        return max(self.spent_ns, default=0)


class Gain(NamedTuple):
    """Time that a load gained its request, in ns.

    ``saved_ns``: estimated time of computing its tokens; None without an estimate. ``waited_ns``: from allocation to
    the step that resumes the request; of a sync load, the time that its step waited. ``resume_ns``, of an async load:
    the part of ``waited_ns`` after its end on all ranks. ``prefills``: how many steps the estimate has learned from.
    """

    saved_ns: int | None
    waited_ns: int
    resume_ns: int | None = None
    prefills: int = 0

    @property
    def is_slower(self) -> bool:
        """Whether computing would have been faster."""
        return self.saved_ns is not None and self.waited_ns > self.saved_ns


@dataclass(slots=True)
class Save(_OnRanks):
    """One connector's save of one request. Reports may come before the promise (async scheduling)."""

    promised: bool = False
    done: bool = False
    expected: int = 1
    promised_ns: int = 0
    arrived: dict[int, Times | None] = field(default_factory=dict)
    arrived_ns: int = 0
    is_abandoned: bool = False  # counted as done without a report of its connector
    is_given_up: bool = False  # its connector has completed it on the scheduler's side, as MoRIIO does after a while

    @property
    def outcome(self) -> str:
        return "abandoned" if self.is_abandoned else "ok"

    @property
    def is_settled(self) -> bool:
        """Return whether no report is waited for."""
        return self.done or self.is_in or self.is_abandoned


class Finished(NamedTuple):
    """The result of a request's end: whether vLLM must hold its blocks, and which transfers were open or unexpected."""

    holds: bool
    aborted: Load | None  # the load that was still open
    promised: dict[int, Save]  # by connector, saves that are open now
    early: dict[int, Save]  # promised saves, by connector, that had been reported before the promise
    unexpected: list[UnexpectedReport]  # reports of saves that were never promised


class Settled(NamedTuple):
    """What the reports of a step have settled, before the connectors see it."""

    loads: list[str]  # requests whose load is complete on every expected rank
    saves: list[str]  # requests whose promised saves are all complete
    unexpected: list[UnexpectedReport]  # reports of transfers that their connectors do not own


class Closed(NamedTuple):
    """What is over after the connectors have seen it, and what vLLM is to read of it."""

    loads: list[tuple[str, Load]]
    saves: list[tuple[str, int, Save]]  # with the connector that had promised
    received: set[str]  # complete loads, and releases that vLLM expects among them
    sent: set[str]  # finished requests whose blocks may be released


class Stuck(NamedTuple):
    """A transfer that some ranks reported long ago and others never did."""

    kind: str  # "load" or "save"; in the aggregator also "failure": of a load without any final report
    request: str
    missing: tuple[int, ...]  # ranks; empty if the expected ranks are unknown


def named_ranks(missing: Sequence[int]) -> str:
    """Return the ranks that a stuck transfer misses, as text."""
    return f"rank {', '.join(map(str, missing))}" if missing else "all expected ranks"


@dataclass(slots=True)
class RequestTransfers:
    """The load and the saves of one live request."""

    candidate: tuple[int, bool] | None = None  # the last lookup's winner: connector, is_async
    owner: int | None = None  # set at an allocation with tokens > 0, kept until the request is forgotten
    load: Load | None = None
    saves: dict[int, Save] = field(default_factory=dict)
    tails: set[int] = field(default_factory=set)  # connectors that accepted the partial last block
    finished: bool = False
    holds: bool = False  # at the request's end vLLM was asked to keep its blocks
    awaited: bool = False  # vLLM keeps the finished request until it is reported again
    held_tokens: int = 0  # whose KV blocks are held for the promised saves

    @property
    def is_settled(self) -> bool:
        return self.load is None and all(save.done for save in self.saves.values())


class InProgress(Generic[T]):
    """What is in progress, the oldest first: as the requests with a lookup, load, resume or save of one connector."""

    __slots__ = ("_held", "_late", "changes", "recent", "tokens")

    def __init__(self) -> None:
        self.changes: set[InProgress[T]] = set()
        """Where this is put once something has begun or ended, for who empties it; several may share one."""
        self.recent: dict[T, int] = {}  # when each began
        self._late: dict[T, int] = {}  # those that ``take_late`` has returned: all older than the others
        self._held: dict[T, int] = {}
        self.tokens = 0  # whose KV blocks are held for all of them

    def __len__(self) -> int:
        return len(self._late) + len(self.recent)

    def __contains__(self, request: object) -> bool:
        return request in self.recent or request in self._late

    @property
    def oldest_ns(self) -> int:
        """Return when the oldest began, in ns; 0 without any."""
        return next(chain(self._late.values(), self.recent.values()), 0)

    def begin(self, request: T, now_ns: int, tokens: int = 0) -> None:
        """Add a request; one that is in already stays as it is."""
        if request not in self:
            self.recent[request] = now_ns
            self.changes.add(self)
            if tokens:
                self._held[request] = tokens
                self.tokens += tokens

    def begin_again(self, request: T, began_ns: int, tokens: int) -> None:
        """Add a request that has ended too early, with its earlier begin."""
        self.begin(request, began_ns, tokens)
        self.recent = dict(sorted(self.recent.items(), key=itemgetter(1)))

    def end(self, request: T) -> None:
        """Remove a request, if it is in."""
        if self.recent.pop(request, None) is not None or self._late.pop(request, None) is not None:
            self.tokens -= self._held.pop(request, 0)
            self.changes.add(self)

    def take_late(self, before_ns: int) -> list[tuple[T, int, int]]:
        """Return the requests that began at a time, or earlier, with start and held tokens; each is returned once."""
        late = dict(takewhile(lambda item: item[1] <= before_ns, self.recent.items()))
        for request in late:
            del self.recent[request]
        self._late |= late
        return [(request, began_ns, self._held.get(request, 0)) for request, began_ns in late.items()]

    def begun_before(self, time_ns: int) -> list[T]:
        """Return the requests that began at a time, or earlier."""
        return [request for request, began_ns in chain(self._late.items(), self.recent.items()) if began_ns <= time_ns]
