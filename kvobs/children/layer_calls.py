"""Time the hooks that vLLM calls for every layer of every step, and the steps' waits for loads and saves.

Between two layers only the clock is read: one reading ends a child's time and begins the next child's, and the readings
of a fan-out are stored together, in one piece of memory. They are counted in bulk later, at a tenth of the cost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from struct import Struct
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvobs import faults
from kvobs.children.child import Child
from kvobs.schema import signals
from kvobs.schema.spans import LAYER, LAYERS, LAYERS_DURATION, SLOWEST_LAYER, SLOWEST_LAYER_DURATION
from kvobs.telemetry.recorders import Telemetry
from kvobs.telemetry.recording.call_spans import CallEvent
from kvobs.telemetry.recording.journal import AT_MOST
from kvobs.telemetry.recording.recorder import SUM, WALL_OFFSET, Call, Durations
from kvobs.telemetry.timeline.flight import Flight

# The hooks as vLLM declares them.
ARGUMENTS = {"wait_for_layer_load": "layer_name", "save_kv_layer": "layer_name, kv_layer, attn_metadata"}
TAKES_KEYWORDS = {"save_kv_layer"}
_CALLS = re.compile(r" +c\d+\(")  # a line of a fan-out that calls a child
NOTICED_AT_MOST = AT_MOST  # calls passed to the tracer at a time: as many spans as a flush takes


class LayerCalls:
    """The calls of one layer hook into the children that implement it.

    vLLM calls ``fan_out``. The readings of one fan-out are a row: its start, and the end of each child's call.
    """

    def __init__(self, hook: str, children: Sequence[Child], telemetry: Telemetry) -> None:
        self.hook = hook
        self.children = [child for child in children if child.does(hook)]
        self._recorder = telemetry.recorder
        self._journal = telemetry.journal
        self._tracer = telemetry.tracer
        self._flight = telemetry.flight
        # Seconds are read and stored in three quarters of the time that ns take, and are exact to 4 ns when the machine
        # has been up for a year.
        self._row = Struct(f"{self._width}d")
        self._buffer = bytearray()  # the rows since the last drain
        self._first = 0  # where the running step begins in it
        self._steps: list[int] = []  # number of rows of each ended step with calls
        self._subjects: list[Any] = []  # the tracer's place of each of them
        self._live = self._flight.live_words(hook, [c.index for c in self.children]) if self._flight else []
        self._box = telemetry.recorder.box
        self.fan_out = self._unrolled()

    @property
    def _width(self) -> int:
        return len(self.children) + 1

    def _unrolled(self) -> Call:
        """Generate straight-line code: a loop is a third slower (bench: calls).

        Calls with keywords, which vLLM does not make, take a slower path.
        """
        names = ARGUMENTS[self.hook]
        keywords, general = "", ""
        if self.hook in TAKES_KEYWORDS:
            keywords, general = ", **kwargs", f"    if kwargs:\n        return general({names}, **kwargs)\n"
        numbers = range(len(self.children))
        bound = "".join(f", c{i}=c{i}" for i in numbers)
        # The child that is being called, for the flight recorder.
        marks = [f"        times[{at}] = t{i}\n" for i, at in enumerate(self._live)] or [""] * self._width
        bound += ", times=times" if self._live else ""
        calls = "".join(f"        c{i}({names})\n        t{i + 1} = clock()\n{marks[i + 1]}" for i in numbers)
        row = ", ".join(f"t{i}" for i in range(self._width))
        place = self._box.place_of_layers(self.hook)
        source = (
            f"def {self.hook}({names}{bound}, begun=begun, clock=clock, buffer=buffer, pack=pack{keywords}):\n{general}"
            f"    try:\n        t0 = begun[{place}] = clock()\n{marks[0]}{calls}        buffer += pack({row})\n"
            f"    except BaseException as error:\n        failed(locals(), error)\n        raise\n"
        )
        if not self.children:
            source = f"def {self.hook}({names}{keywords}):\n    pass\n"
        scope: dict[str, Any] = {f"c{i}": child.layer_call(self.hook) for i, child in enumerate(self.children)}
        scope |= {
            "begun": self._box.floats,
            "clock": perf_counter,
            "buffer": self._buffer,
            "pack": self._row.pack,
            "general": self._general,
            "failed": self._failed,
            "times": self._flight.layer_times if self._flight is not None else None,
        }
        exec(compile(source, f"<kvobs: {self.hook}>", "exec"), scope)
        fan_out: Any = scope[self.hook]
        called = (child.index for child in self.children)
        lines = {number: next(called) for number, line in enumerate(source.splitlines(), 1) if _CALLS.match(line)}
        self._box.watch(self.hook, fan_out.__code__, lines)
        return fan_out

    def _general(self, *args: Any, **kwargs: Any) -> None:
        for child in self.children:
            getattr(child, self.hook)(*args, **kwargs)

    def _failed(self, scope: dict[str, Any], error: BaseException) -> None:
        """Count the calls of a fan-out that a child's exception ended: the completed ones and the failed one."""
        try:
            if self._flight is not None:
                self._flight.layer_times[self._live[-1]] = perf_counter()
            readings = [scope[f"t{i}"] for i in range(len(self.children)) if f"t{i}" in scope]
            stamps = _ns(np.array([*readings, perf_counter()])).tolist()
            for child, begin, end in zip(self.children, stamps, stamps[1:-1], strict=False):
                self._recorder.add_call(child.index, self.hook, end - begin)
            failed = self.children[len(readings) - 1]
            self._recorder.failed(failed.index, self.hook, stamps[-2], stamps[-1] - stamps[-2], error)
        except Exception:
            faults.contain("record")

    def _rows(self, first: int, end: int | None = None) -> Durations:
        """Return what lies between two places of the buffer, in ns: a row for each fan-out."""
        return _ns(np.frombuffer(self._buffer[first:end]).reshape(-1, self._width))

    def spent_in_step(self) -> dict[int, int]:
        """Return each child's time in the running step, in ns."""
        sums = _spent(self._rows(self._first))
        return {child.index: spent for child, spent in zip(self.children, sums, strict=True)}

    @property
    def last_ns(self) -> int:
        """Return the end of the running step's last call, in ns since the epoch; 0 without one."""
        if len(self._buffer) == self._first:
            return 0
        return int(self._rows(-self._row.size)[-1, -1]) + WALL_OFFSET

    def close_step(self) -> bool:
        """End the running step; return whether the hook was called in it."""
        first, self._first = self._first, len(self._buffer)
        if first == self._first:
            return False
        self._steps.append((self._first - first) // self._row.size)
        self._subjects.append(self._tracer.step if self._tracer is not None else None)
        if self._flight is not None:
            self._note_in(self._flight, self._rows(first))
        return True

    def _note_in(self, flight: Flight, rows: Durations) -> None:
        """Write one flight record for the step's calls into each child."""
        starts, ends, took = rows[0].tolist(), rows[-1].tolist(), _spent(rows)
        for i, child in enumerate(self.children):
            flight.layers(child.index, self.hook, start=starts[i], end=ends[i + 1], calls=len(rows), took=took[i])

    def drain(self) -> dict[int, Durations]:
        """Count the calls of the steps since the last drain; return each child's time in each step with calls."""
        steps, self._steps = self._steps, []
        subjects, self._subjects = self._subjects, []
        if not steps:
            return {}
        stamps = self._rows(0, self._first).T.copy()
        del self._buffer[: self._first]
        self._first = 0
        spent = stamps[1:] - stamps[:-1]
        for child, durations in zip(self.children, spent, strict=True):
            self._recorder.add_calls(child.index, self.hook, durations)
        firsts = np.cumsum([0, *steps])
        if self._tracer is not None:
            for i, child in enumerate(self.children):
                self._trace(child, stamps[i], spent[i], firsts, subjects)
        sums = np.add.reduceat(spent, firsts[:-1], axis=1)
        return {child.index: sums[i] for i, child in enumerate(self.children)}

    def _trace(
        self, child: Child, starts: Durations, spent: Durations, firsts: Durations, subjects: Sequence[Any]
    ) -> None:
        """Pass a child's slow calls to the tracer, and a summary of each step if it gets all calls."""
        tracer, limit = self._tracer, self._recorder.slow_ns(self.hook)
        assert tracer is not None
        slow = (spent > limit).nonzero()[0]
        self._journal.drop(max(0, len(slow) - NOTICED_AT_MOST))
        for i in slow[:NOTICED_AT_MOST].tolist():
            step = int(firsts.searchsorted(i, "right")) - 1
            more, start = {LAYER: i - int(firsts[step])}, int(starts[i]) + WALL_OFFSET
            tracer.note(CallEvent(child.index, self.hook, start, int(spent[i]), True, "", subjects[step], more))
        if tracer.traces_all:
            ranges = zip(subjects, firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)
            for n, (subject, first, end) in enumerate(ranges):
                if self._journal.is_full:  # unneeded sums would be a third of this level's cost
                    self._journal.drop(len(subjects) - n)
                    break
                tracer.note(self._summary(child, starts[first:end], spent[first:end], subject))

    def _summary(self, child: Child, starts: Durations, spent: Durations, subject: Any) -> CallEvent:
        slowest = int(spent.argmax())
        more = {
            LAYERS: len(spent),
            LAYERS_DURATION: int(spent.sum()) / 1e9,
            SLOWEST_LAYER: slowest,
            SLOWEST_LAYER_DURATION: int(spent[slowest]) / 1e9,
        }
        took = int(starts[-1] + spent[-1] - starts[0])
        start = int(starts[0]) + WALL_OFFSET
        return CallEvent(child.index, self.hook, start, took, is_slow=False, subject=subject, more=more, is_many=True)


class Stalls:
    """Assigns the time of blocking calls to steps.

    A hook that was not called in a step (not implemented, or not replayed within a CUDA graph) is not observed: no data
    is not the same as a stall of 0.
    """

    def __init__(self, children: Sequence[Child], telemetry: Telemetry) -> None:
        self._loads = _Waits(signals.LOAD_STALL, "wait_for_layer_load", "start_load_kv", children, telemetry)
        self._saves = _Waits(signals.SAVE_STALL, "save_kv_layer", "wait_for_save", children, telemetry)

    @property
    def layer_calls(self) -> tuple[LayerCalls, LayerCalls]:
        """Return the layer hooks, to be bound to the connector."""
        return self._loads.layers, self._saves.layers

    @property
    def last_load_ns(self) -> dict[int, int]:
        """Return the time of the running step's last layer wait, in ns since the epoch, by child with layer hooks."""
        layers = self._loads.layers
        return dict.fromkeys([child.index for child in layers.children], layers.last_ns)

    def close_step(self, *, has_forward: bool, has_sync_loads: bool) -> dict[int, int]:
        """End a step; if a synchronous load was due, return the time of each child's loads within it, in ns.

        vLLM calls ``start_load_kv`` before the forward in that case, else after its launch. A step without a forward
        waits for nothing.
        """
        try:
            took = self._loads.spent_in_step() if has_sync_loads else {}
            # Without further calls: their code would be cold.
            for of, waits in (self._loads, has_forward and has_sync_loads), (self._saves, has_forward):
                of.ended.append((waits, of.layers.close_step(), [*map(_SUM, of.tallies)]))
        except Exception:
            faults.contain("record")
            return {}
        return took

    def flush(self) -> None:
        """Count the calls and stalls of the ended steps."""
        try:
            self._loads.flush()
            self._saves.flush()
        except Exception:
            faults.contain("record")


_SUM = itemgetter(SUM)

# Whether it waits, whether layers were called in it, and the total time of the other hook since the start, by child.
_Ended: TypeAlias = tuple[bool, bool, list[int]]


class _Waits:
    """A layer hook, and the once-a-step hook whose time is added to it."""

    def __init__(
        self, signal: signals.Signal, layer_hook: str, step_hook: str, children: Sequence[Child], telemetry: Telemetry
    ) -> None:
        self.layers = LayerCalls(layer_hook, children, telemetry)
        self._signal = signal
        self._recorder = telemetry.recorder
        self.tallies = [self._recorder.tally(child.index, step_hook) for child in children]
        # The ended steps, and before them the last one of the last flush.
        self.ended: list[_Ended] = [(False, False, [0] * len(children))]

    def spent_in_step(self) -> dict[int, int]:
        layers = self.layers.spent_in_step()
        _, _, before = self.ended[-1]
        return {child: layers.get(child, 0) + tally[SUM] - before[child] for child, tally in enumerate(self.tallies)}

    def flush(self) -> None:
        ended, self.ended = self.ended, self.ended[-1:]
        if len(ended) == 1:
            return
        spent = np.diff([totals for _, _, totals in ended], axis=0)
        waits, has_layers = (np.array([step[i] for step in ended[1:]]) for i in range(2))
        spent[~waits] = 0
        for child, took in self.layers.drain().items():
            spent[has_layers, child] += took
        for child, waited in enumerate(spent.T):
            self._recorder.observe_all(child, self._signal, waited[waited > 0])


def _spent(rows: Durations) -> list[int]:
    """Return the sum of each child's times."""
    spent: list[int] = (rows[:, 1:] - rows[:, :-1]).sum(axis=0).tolist()
    return spent


def _ns(seconds: npt.NDArray[np.float64]) -> Durations:
    return np.rint(seconds * 1e9).astype(np.int64)
