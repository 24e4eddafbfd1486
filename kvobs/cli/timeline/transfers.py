"""Put the lookups, loads and saves of an engine's processes together: one of each, with its part on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvobs.cli.timeline.recordings import OPEN, UNREPORTED, Process, Transfer
from kvobs.telemetry.timeline.flight import OWN

Key = tuple[str, int, int]  # kind, child, request
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
    read_ns: int
    """The time of the reading, or of the engine's last record if it has ended."""
    parts: list[Part] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    """The ranks that have not reported it, as far as that is recorded."""

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
    return sorted((one for own in engines.values() for one in _of_engine(own)), key=lambda one: one.start)


def _of_engine(processes: Sequence[Process]) -> Iterator[Joined]:
    read_ns = max(process.read_ns for process in processes)
    schedulers = [process for process in processes if process.rank is None]
    ranks = [process for process in processes if process.rank is not None]
    on_ranks = [(process, _by_key(process)) for process in ranks]
    # On a machine without the scheduler the first rank's stand for the engine's.
    for process in schedulers or ranks[:1]:
        for key, own in _by_key(process).items():
            found = [_joined(process, one, read_ns) for one in own]
            if key[0] in ON_RANKS:
                for other, by_key in on_ranks:
                    _add_rank(found, other, by_key.get(key, ()))
            if process.rank is not None:
                for one in found:
                    _conclude(one)
            yield from found


def _by_key(process: Process) -> dict[Key, list[Transfer]]:
    found: dict[Key, list[Transfer]] = defaultdict(list)
    for one in process.transfers:
        found[one.kind, one.child, one.request].append(one)
    return found


def _joined(process: Process, one: Transfer, read_ns: int) -> Joined:
    connector = "" if one.child == OWN else process.children[one.child]
    return Joined(
        process.run, process.engine, one.kind, connector, one.request, one.start, one.end, one.tokens, one.outcome,
        read_ns,
    )  # fmt: skip


def _add_rank(found: Sequence[Joined], process: Process, own: Iterable[Transfer]) -> None:
    """Add a rank's records of successive loads or saves of one request."""
    assert process.rank is not None
    starts = [one.start for one in found]
    parts: dict[int, Part] = {}
    for one in own:
        at = max(0, bisect_right(starts, one.start) - 1)
        if one.end is None and at in parts and parts[at].end is not None and found[at].kind == "save":
            continue  # it was reported before it was promised
        is_known = one.begun is not None or one.start != one.end
        outcome = UNREPORTED if one.end is None and not found[at].is_open else one.outcome
        parts[at] = Part(process.rank, one.start if is_known else None, one.end, outcome)
    for at, whole in enumerate(found):
        part = parts.get(at)
        if part is not None:
            whole.parts.append(part)
        # Wait for ranks whose recording shows the transfer open, or covers its start without showing it.
        if whole.is_open and (part.end is None if part is not None else process.first_ns <= whole.start):
            whole.waits_for.append(process.rank)


def _conclude(one: Joined) -> None:
    """Derive the end over all ranks from their parts, where the scheduler's is not known."""
    one.waits_for = [part.rank for part in one.parts if part.end is None]
    if one.waits_for:
        one.end, one.outcome = None, OPEN
    else:
        one.end = one.start + max(part.spent_ns or 0 for part in one.parts)
        one.outcome = next((part.outcome for part in one.parts if part.outcome != "ok"), "ok")
