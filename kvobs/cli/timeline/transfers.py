"""Put the lookups, loads and saves of an engine's processes together: one of each, with its part on every rank."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvobs.cli.timeline.recordings import OPEN, UNREPORTED, Process, Transfer
from kvobs.telemetry.timeline.flight import OWN

ON_RANKS = ("load", "save")


@dataclass(frozen=True)
class Part:
    """A load or save on one rank: ``start`` is when it got the order; None: unknown."""

    rank: int
    start: int | None
    end: int | None
    outcome: str

    @property
    def spent_ns(self) -> int | None:
        return None if self.start is None or self.end is None else self.end - self.start


@dataclass
class Joined:
    """A lookup, load, save or resumption over all processes of an engine; ``connector`` is empty for a lookup."""

    run: str
    engine: int
    kind: str
    connector: str
    request: int
    start: int
    end: int | None
    tokens: int
    outcome: str
    read_ns: int  # the time of the reading, or of the engine's last record if it has ended
    parts: list[Part] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)  # ranks that have not reported it, as far as recorded

    @property
    def is_open(self) -> bool:
        return self.end is None

    @property
    def spent_ns(self) -> int:
        """Return its duration, until now if it is in progress."""
        return max(0, (self.read_ns if self.end is None else self.end) - self.start)

    @property
    def slowest(self) -> tuple[int, int] | None:
        """Return the rank that took longest, and how much longer than the quickest.

        None if there is only one, or if it is not known how long each took. Ends are not compared: they are of the
        clocks of several machines.
        """
        took = {part.rank: part.spent_ns for part in self.parts if part.spent_ns is not None}
        if len(took) < max(2, len(self.parts)):
            return None
        rank = max(took, key=took.__getitem__)
        return rank, took[rank] - min(took.values())


def join(processes: Sequence[Process]) -> list[Joined]:
    """Return everything that requests waited for or had saved, in the order of its begin."""
    engines: dict[tuple[str, int], list[Process]] = defaultdict(list)
    for process in processes:
        engines[process.run, process.engine].append(process)
    return sorted((whole for members in engines.values() for whole in _of_engine(members)), key=lambda w: w.start)


def _of_engine(processes: Sequence[Process]) -> Iterator[Joined]:
    read_ns = max(process.read_ns for process in processes)
    schedulers = [process for process in processes if process.rank is None]
    ranks = {process.rank: process for process in processes if process.rank is not None}
    on_ranks = {rank: _by_key(process) for rank, process in ranks.items()}
    # On a machine without the scheduler the first rank's stand for the engine's.
    for process in schedulers or [*ranks.values()][:1]:
        for key, transfers in _by_key(process).items():
            joined = [_joined(process, transfer, read_ns) for transfer in transfers]
            if key[0] in ON_RANKS:
                for rank, by_key in on_ranks.items():
                    _add_rank(joined, rank, ranks[rank].first_ns, by_key.get(key, ()))
            if process.rank is not None:
                for whole in joined:
                    _conclude(whole)
            yield from joined


def _by_key(process: Process) -> dict[tuple[str, int, int], list[Transfer]]:
    by_key = defaultdict(list)
    for transfer in process.transfers:
        by_key[transfer.key].append(transfer)
    return by_key


def _joined(process: Process, transfer: Transfer, read_ns: int) -> Joined:
    connector = "" if transfer.connector == OWN else process.connectors[transfer.connector]
    return Joined(
        process.run, process.engine, transfer.kind, connector, transfer.request, transfer.start, transfer.end,
        transfer.tokens, transfer.outcome, read_ns,
    )  # fmt: skip


def _add_rank(joined: Sequence[Joined], rank: int, first_ns: int, transfers: Iterable[Transfer]) -> None:
    """Add a rank's records of successive loads or saves of one request."""
    starts = [whole.start for whole in joined]
    parts: dict[int, Part] = {}
    for transfer in transfers:
        at = max(0, bisect_right(starts, transfer.start) - 1)
        if transfer.end is None and at in parts and parts[at].end is not None and joined[at].kind == "save":
            continue  # it was reported before it was promised
        is_known = transfer.begun is not None or transfer.start != transfer.end
        outcome = UNREPORTED if transfer.end is None and not joined[at].is_open else transfer.outcome
        parts[at] = Part(rank, transfer.start if is_known else None, transfer.end, outcome)
    for at, whole in enumerate(joined):
        part = parts.get(at)
        if part is not None:
            whole.parts.append(part)
        # Wait for ranks whose recording shows the transfer open, or covers its start without showing it.
        if whole.is_open and (part.end is None if part is not None else first_ns <= whole.start):
            whole.waits_for.append(rank)


def _conclude(whole: Joined) -> None:
    """Derive the end over all ranks from their parts, where the scheduler's is not known."""
    whole.waits_for = [part.rank for part in whole.parts if part.end is None]
    if whole.waits_for:
        whole.end, whole.outcome = None, OPEN
    else:
        whole.end = whole.start + max(part.spent_ns or 0 for part in whole.parts)
        whole.outcome = next((part.outcome for part in whole.parts if part.outcome != "ok"), "ok")
