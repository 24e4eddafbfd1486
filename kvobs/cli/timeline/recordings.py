"""Read the recordings of an engine's processes: slices, lookups, loads and saves, and calls that had not ended."""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvobs.cli.timeline.snapshot import RingError, Snapshot, read, rows, unpack
from kvobs.probe.black_box import place_of
from kvobs.probe.ring_files import SUFFIX, is_written
from kvobs.telemetry.timeline.flight import OUTCOMES, OWN, STEP, What, layer_words

OPEN = "open"
UNREPORTED = "not reported"
"""The outcome of a load or save of a rank that got the same order again without having reported an end."""
RAISED = "raised"
NOTHING: dict[str, Any] = {}  # one for all: there may be millions
LAYERS = 1000  # the tracks of layer hooks are numbered from here: they overlap each other
TRANSFERS = {
    What.LOAD_BEGUN: ("load", False),
    What.LOAD_ENDED: ("load", True),
    What.SAVE_BEGUN: ("save", False),
    What.SAVE_ENDED: ("save", True),
    What.LOOKUP_BEGUN: ("lookup", False),
    What.LOOKUP_ENDED: ("lookup", True),
    What.RESUMED: ("resume", True),
}


@dataclass(frozen=True, slots=True)
class Slice:
    """A call, a step, or a connector's layers of a step; in ns since the epoch, ``end`` is None if still open."""

    track: int
    name: str
    start: int
    end: int | None
    args: dict[str, Any]


@dataclass(slots=True)
class Transfer:
    """A lookup, load, save or resumption in one process. A lookup has no connector, hence ``OWN``.

    ``begun`` is when its begin was recorded (None: overwritten since), ``start`` its begin, ``end`` None while in
    progress.
    """

    kind: str
    connector: int
    request: int
    begun: int | None
    start: int
    end: int | None = None
    tokens: int = 0
    outcome: str = OPEN

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.connector, self.request


class Process:
    """One process's recording, from ``first_ns`` to ``last_ns``.

    ``slices`` and ``transfers`` are in the order of their begin. Transfers in progress may have begun before
    ``first_ns``, the begin of the oldest record. ``read_ns`` is the time now if the process lives, else ``last_ns``.
    """

    def __init__(self, snapshot: Snapshot, *, is_alive: bool) -> None:
        about = snapshot.about
        self.is_alive = is_alive
        self.run: str = about["run"]
        self.engine: int = about["engine"]
        self.rank: int | None = about["rank"]
        self.pid: int = about["pid"]
        self.begun_ns: int = about["begun_ns"]
        self.connectors: list[str] = about["connectors"]
        self._hooks: list[str] = about["hooks"]
        self._layer_hooks: list[str] = about["layer_hooks"]
        self._wall_offset: int = about["wall_offset"]
        self.name = place_of(self.rank)
        self.slices: list[Slice] = []
        self.transfers: list[Transfer] = []
        self._open: dict[tuple[str, int, int], Transfer] = {}
        self._read(snapshot)
        in_layers = layer_words(len(self.connectors))
        # Layer hooks write their times into the live words as seconds.
        layer_times = np.rint(snapshot.live[:in_layers].view(np.float64) * 1e9).astype(np.int64)
        self.slices += self._in_layers(layer_times.tolist())
        self.slices.sort(key=lambda call: call.start)
        both: list[Slice | Transfer] = [*self.slices, *self.transfers]
        self.first_ns = min((record.start for record in both), default=self.begun_ns)
        self.last_ns = max((record.end or record.start for record in both), default=self.begun_ns)
        self.read_ns = max(time.time_ns(), self.last_ns) if is_alive else self.last_ns
        self._add_in_progress(snapshot.live[in_layers:].tolist())
        self.transfers.sort(key=lambda transfer: transfer.start)

    def _read(self, snapshot: Snapshot) -> None:
        for _, begun, spent, word, more, _ in snapshot.records.tolist():
            what, connector, position, n = unpack(word)
            start = begun + self._wall_offset
            end = start + spent if spent >= 0 else None
            if what in TRANSFERS:
                kind, is_end = TRANSFERS[what]
                if is_end:
                    self._end(Transfer(kind, connector, more, None, start, end, outcome=OUTCOMES[n]))
                else:
                    self._begin(Transfer(kind, connector, more, start, start, tokens=n))
            elif what is What.LAYERS:
                hook = self._hooks[position]
                args = {"calls": n, "total, ms": more / 1e6}
                self.slices.append(Slice(self._layer_track(hook, connector), f"{hook} x{n}", start, end, args))
            else:
                hook = self._hooks[position]
                name, args = hook, {RAISED: True} if more else NOTHING
                if hook == STEP:
                    steps = f"{more:,} steps" if more > 1 else STEP
                    name, args = STEP if n else f"{steps} without a forward", NOTHING
                self.slices.append(Slice(0 if connector == OWN else connector + 1, name, start, end, args))

    def _begin(self, begun: Transfer) -> None:
        earlier = self._open.get(begun.key)
        if earlier is not None:
            earlier.end, earlier.outcome = begun.start, UNREPORTED
        self._open[begun.key] = begun
        self.transfers.append(begun)

    def _end(self, ended: Transfer) -> None:
        begun = self._open.pop(ended.key, None)
        if begun is None:  # the record of its begin was overwritten
            self.transfers.append(ended)
        else:
            begun.start, begun.end, begun.outcome = ended.start, ended.end, ended.outcome

    def _layer_track(self, hook: str, connector: int) -> int:
        return LAYERS + self._layer_hooks.index(hook) * len(self.connectors) + connector

    def _in_layers(self, live: list[int]) -> Iterator[Slice]:
        """Return the calls of layer hooks that had not ended, at most one per hook."""
        width = len(self.connectors) + 1
        for i, hook in enumerate(self._layer_hooks):
            *begun, ended = live[i * width : (i + 1) * width]
            last = max(range(len(begun)), key=begun.__getitem__, default=0)
            if begun and begun[last] > ended:
                yield Slice(self._layer_track(hook, last), hook, begun[last] + self._wall_offset, None, NOTHING)

    def _add_in_progress(self, table: list[int]) -> None:
        """Add transfers in progress whose records are overwritten."""
        for word, start, request in rows(table):
            what, connector, _, n = unpack(word)
            kind, _ = TRANSFERS[what]
            transfer = Transfer(kind, connector, request, None, start + self._wall_offset, tokens=n)
            if transfer.key not in self._open:
                self.transfers.append(transfer)

    def keep_from(self, since_ns: int) -> None:
        """Forget calls and transfers that ended before this time; keep the others whole."""
        newest = {call.track: call for call in self.slices}
        self.slices = [
            call
            for call in self.slices
            if (call.start if call.end is None else call.end) >= since_ns
            or (call.end is None and newest[call.track] is call)
        ]
        self.transfers = [transfer for transfer in self.transfers if transfer.end is None or transfer.end >= since_ns]
        self.first_ns = max(self.first_ns, since_ns)

    @property
    def begin_ns(self) -> int:
        """The begin of the first slice or transfer."""
        return min([self.first_ns, *(records[0].start for records in (self.slices, self.transfers) if records)])

    @property
    def open(self) -> list[Slice]:
        """The last calls of each track that had not ended: those of connectors if any, otherwise all."""
        newest = {call.track: call for call in self.slices}
        calls = [call for call in newest.values() if call.end is None]
        return [call for call in calls if call.track] or calls

    @property
    def raised(self) -> list[Slice]:
        """The calls into connectors that ended with an exception."""
        return [call for call in self.slices if call.track and RAISED in call.args]

    def track_name(self, track: int) -> str:
        if track == 0:
            return "scheduler" if self.rank is None else "steps"
        if track < LAYERS:
            return self.connectors[track - 1]
        hook, connector = divmod(track - LAYERS, len(self.connectors))
        return f"{self.connectors[connector]}: {self._layer_hooks[hook]}"


def load(folder: Path, *, all_runs: bool = False, problems: list[str] | None = None) -> list[Process]:
    """Read the recordings of the run that began last, or of all; ``ValueError`` if none is there or can be read.

    ``problems`` gets a line for each file that can't be read beside others that can.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:
        raise ValueError(f"{folder} can't be read: {error.strerror}") from error
    processes: list[Process] = []
    unreadable: list[ValueError] = []
    for path in paths:
        try:
            processes += _load(path)
        except ValueError as error:
            unreadable.append(error)
    if unreadable and not processes:
        raise unreadable[0]
    if problems is not None:
        problems += map(str, unreadable)
    if not processes:
        raise ValueError(
            f"{folder} has no recordings (*{SUFFIX}); give the folder that was set as kvobs.timeline.dir when the "
            "engine started"
        )
    begun: dict[str, int] = {}
    for process in processes:
        begun[process.run] = min(begun.get(process.run, process.begun_ns), process.begun_ns)
    newest = max(processes, key=lambda process: process.begun_ns).run
    chosen = [process for process in processes if all_runs or process.run == newest]
    return sorted(chosen, key=lambda p: (begun[p.run], p.run, p.engine, -1 if p.rank is None else p.rank))


def _load(path: Path) -> list[Process]:
    """Read one file; it is empty if its process has only just begun."""
    try:
        is_alive = is_written(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return []
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                snapshot = read(memory)
        return [] if snapshot is None else [Process(snapshot, is_alive=is_alive)]
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except RingError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} can't be read: its content is invalid") from error


# Names


def process_names(processes: Sequence[Process]) -> list[str]:
    """Return the shortest distinct name for each process, such as "run 2, engine 0 rank 1"."""
    places = engine_names([(process.run, process.engine) for process in processes])
    return [
        f"{place} {process.name}" if "engine" in place else ", ".join(filter(None, (place, process.name)))
        for place, process in zip(places, processes, strict=True)
    ]


def engine_names(engines: Sequence[tuple[str, int]]) -> list[str]:
    """Return the run and the engine of each, where there are several."""
    runs = list(dict.fromkeys(run for run, _ in engines))
    has_engines = len({engine for _, engine in engines}) > 1
    return [
        ", ".join([f"run {runs.index(run) + 1}"] * (len(runs) > 1) + [f"engine {engine}"] * has_engines)
        for run, engine in engines
    ]


def request_name(request: int) -> str:
    """Return the hash of a request's id in 16 hexadecimal digits, of which a line of 80 columns has eight."""
    return f"{request & (1 << 64) - 1:016x}"
