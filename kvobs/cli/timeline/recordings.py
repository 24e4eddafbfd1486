"""Read the recordings of an engine's processes: slices, lookups, loads and saves, and calls that had not ended."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvobs.telemetry.timeline import open_table
from kvobs.telemetry.timeline.flight import OUTCOMES, OWN, STEP, What, layer_words, unpack
from kvobs.telemetry.timeline.ring import RingError, Snapshot, read
from kvobs.telemetry.timeline.ring_files import SUFFIX, is_written

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
    """A call, a step, or a child's layers of a step. Times are ns since the epoch; ``end`` is None if still open."""

    track: int
    name: str
    start: int
    end: int | None
    args: dict[str, Any]


@dataclass(slots=True)
class Transfer:
    """A lookup, load, save or resumption in one process. A lookup has no child, hence ``OWN``.

    ``begun`` is when its begin was recorded (None: overwritten since), ``start`` its begin, ``end`` None while in
    progress.
    """

    kind: str
    child: int
    request: int
    begun: int | None
    start: int
    end: int | None = None
    tokens: int = 0
    outcome: str = OPEN


class Process:
    """One process's recording, from ``first_ns`` to ``last_ns``.

    ``slices`` and ``transfers`` are in the order of their begin. Transfers in progress may have begun before
    ``first_ns``, the begin of the oldest record. ``read_ns`` is the time now if the process lives, else ``last_ns``.
    """

    def __init__(self, path: Path, snapshot: Snapshot, *, is_alive: bool) -> None:
        about = snapshot.about
        self.path = path
        self.is_alive = is_alive
        self.run: str = about["run"]
        self.engine: int = about["engine"]
        self.rank: int | None = about["rank"]
        self.pid: int = about["pid"]
        self.begun_ns: int = about["begun_ns"]
        self.children: list[str] = about["connectors"]
        self._hooks: list[str] = about["hooks"]
        self._layer_hooks: list[str] = about["layer_hooks"]
        self._wall_offset: int = about["wall_offset"]
        self.slices: list[Slice] = []
        self.transfers: list[Transfer] = []
        self._open: dict[tuple[str, int, int], Transfer] = {}
        self._read(snapshot)
        in_layers = layer_words(len(self.children))
        self.slices += self._in_layers(_in_ns(snapshot.live[:in_layers]))
        self.slices.sort(key=lambda one: one.start)
        both: list[Slice | Transfer] = [*self.slices, *self.transfers]
        self.first_ns = min((one.start for one in both), default=self.begun_ns)
        self.last_ns = max((one.end or one.start for one in both), default=self.begun_ns)
        self.read_ns = max(time.time_ns(), self.last_ns) if is_alive else self.last_ns
        self._add_in_progress(snapshot.live[in_layers:].tolist())
        self.transfers.sort(key=lambda one: one.start)

    def _add_in_progress(self, table: list[int]) -> None:
        """Add transfers in progress whose records are overwritten."""
        for word, start, request in open_table.rows(table):
            what, child, _, n = unpack(word)
            kind, _ = TRANSFERS[what]
            if (kind, child, request) not in self._open:
                self.transfers.append(Transfer(kind, child, request, None, start + self._wall_offset, tokens=n))

    def keep_from(self, since_ns: int) -> None:
        """Forget calls and transfers that ended before this time; keep the others whole."""
        newest = {one.track: one for one in self.slices}
        self.slices = [
            one
            for one in self.slices
            if (one.start if one.end is None else one.end) >= since_ns or (one.end is None and newest[one.track] is one)
        ]
        self.transfers = [one for one in self.transfers if one.end is None or one.end >= since_ns]
        self.first_ns = max(self.first_ns, since_ns)

    @property
    def begin_ns(self) -> int:
        """The begin of the first slice or transfer."""
        slices, transfers = ([one.start for one in several[:1]] for several in (self.slices, self.transfers))
        return min([self.first_ns, *slices, *transfers])

    @property
    def name(self) -> str:
        return "scheduler" if self.rank is None else f"rank {self.rank}"

    @property
    def open(self) -> list[Slice]:
        """The last calls of each track that had not ended: those of children if any, otherwise all."""
        newest = {one.track: one for one in self.slices}
        found = [one for one in newest.values() if one.end is None]
        return [one for one in found if one.track] or found

    @property
    def raised(self) -> list[Slice]:
        """The calls into connectors that ended with an exception."""
        return [one for one in self.slices if one.track and RAISED in one.args]

    def track_name(self, track: int) -> str:
        if track == 0:
            return "scheduler" if self.rank is None else "steps"
        hook, child = divmod(track - LAYERS, len(self.children)) if track >= LAYERS else (None, track - 1)
        return self.children[child] + ("" if hook is None else f": {self._layer_hooks[hook]}")

    def _read(self, snapshot: Snapshot) -> None:
        for _, begun, spent, word, more, _ in snapshot.records.tolist():
            what, child, position, n = unpack(word)
            start = begun + self._wall_offset
            end = start + spent if spent >= 0 else None
            if what in TRANSFERS:
                kind, is_end = TRANSFERS[what]
                if is_end:
                    self._end(Transfer(kind, child, more, None, start, end, outcome=OUTCOMES[n]))
                else:
                    self._begin(Transfer(kind, child, more, start, start, tokens=n))
            elif what is What.LAYERS:
                hook = self._hooks[position]
                args = {"calls": n, "total, ms": more / 1e6}
                self.slices.append(Slice(self._layer_track(hook, child), f"{hook} x{n}", start, end, args))
            else:
                hook = self._hooks[position]
                name, args = hook, {RAISED: True} if more else NOTHING
                if hook == STEP:
                    steps = f"{more:,} steps" if more > 1 else STEP
                    name, args = STEP if n else f"{steps} without a forward", NOTHING
                self.slices.append(Slice(0 if child == OWN else child + 1, name, start, end, args))

    def _begin(self, one: Transfer) -> None:
        replaced = self._open.get((one.kind, one.child, one.request))
        if replaced is not None:
            replaced.end, replaced.outcome = one.start, UNREPORTED
        self._open[one.kind, one.child, one.request] = one
        self.transfers.append(one)

    def _end(self, ended: Transfer) -> None:
        one = self._open.pop((ended.kind, ended.child, ended.request), None)
        if one is None:  # the record of its begin was overwritten
            self.transfers.append(ended)
        else:
            one.start, one.end, one.outcome = ended.start, ended.end, ended.outcome

    def _layer_track(self, hook: str, child: int) -> int:
        return LAYERS + self._layer_hooks.index(hook) * len(self.children) + child

    def _in_layers(self, live: list[int]) -> Iterator[Slice]:
        """Return the calls of layer hooks that had not ended, at most one per hook."""
        width = len(self.children) + 1
        for i, hook in enumerate(self._layer_hooks):
            *begun, ended = live[i * width : (i + 1) * width]
            last = max(range(len(begun)), key=begun.__getitem__, default=0)
            if begun and begun[last] > ended:
                yield Slice(self._layer_track(hook, last), hook, begun[last] + self._wall_offset, None, NOTHING)


def _in_ns(layer_times: npt.NDArray[np.int64]) -> list[int]:
    """Return the times that layer hooks wrote into the live words as seconds."""
    return np.rint(layer_times.view(np.float64) * 1e9).astype(np.int64).tolist()


def load(folder: Path, *, all_runs: bool = False, problems: list[str] | None = None) -> list[Process]:
    """Read the recordings of the run that began last, or of all.

    Args:
        folder: where they are.
        all_runs: read all.
        problems: gets a line for each file that can't be read beside others that can.

    Raises:
        ValueError: there are none, or none can be read; the message names the first file.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:
        raise ValueError(f"{folder} can't be read: {error.strerror}") from error
    found: list[Process] = []
    unreadable: list[ValueError] = []
    for path in paths:
        try:
            process = _load(path)
        except ValueError as error:
            unreadable.append(error)
        else:
            found += [process] if process is not None else []
    if unreadable and not found:
        raise unreadable[0]
    if problems is not None:
        problems += map(str, unreadable)
    if not found:
        raise ValueError(
            f"{folder} has no recordings (*{SUFFIX}); give the folder that was set as kvobs.timeline.dir when the "
            "engine started"
        )
    newest = max(found, key=lambda process: process.begun_ns).run
    chosen = [process for process in found if all_runs or process.run == newest]
    runs = sorted({one.run for one in chosen}, key=lambda run: min(one.begun_ns for one in chosen if one.run == run))
    return sorted(chosen, key=lambda one: (runs.index(one.run), one.engine, -1 if one.rank is None else one.rank))


def _load(path: Path) -> Process | None:
    try:
        is_alive = is_written(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # its process has only just begun
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                snapshot = read(memory)
        return None if snapshot is None else Process(path, snapshot, is_alive=is_alive)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except RingError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} can't be read: its content is invalid") from error
