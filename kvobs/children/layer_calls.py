"""Time the hooks that vLLM calls for every layer of every step, and the steps' waits for loads and saves.

Between two layers only the clock is read: one reading ends a child's time and begins the next child's. The times of a
fan-out that is short as a whole are added to sums, which the end of the step counts at once; a longer one is kept, and
counted there call by call.
"""

import re
from collections.abc import Sequence
from time import perf_counter
from typing import Any, TypeAlias

from kvobs import faults
from kvobs.children.child import Child
from kvobs.clock import WALL_OFFSET
from kvobs.schema import signals
from kvobs.schema.spans import LAYER, LAYERS, LAYERS_DURATION, SLOWEST_LAYER, SLOWEST_LAYER_DURATION
from kvobs.telemetry.recorders import Telemetry
from kvobs.telemetry.recording.call_spans import CallEvent, CallSpans
from kvobs.telemetry.recording.recorder import SUM, Call, buckets
from kvobs.telemetry.timeline import ring

# The hooks as vLLM declares them.
ARGUMENTS = {"wait_for_layer_load": "layer_name", "save_kv_layer": "layer_name, kv_layer, attn_metadata"}
TAKES_KEYWORDS = {"save_kv_layer"}
_CALLS = re.compile(r" +c\d+\(")  # a line of a fan-out that calls a child

Readings: TypeAlias = tuple[float, ...]
"""Of the clock, in seconds: the start of a fan-out, and the end of each child's call."""


class LayerCalls:
    """The calls of one layer hook into the children that implement it; vLLM calls ``fan_out``."""

    def __init__(self, hook: str, children: Sequence[Child], telemetry: Telemetry) -> None:
        self.hook = hook
        self.children = [child for child in children if child.does(hook)]
        self._zeros = [0] * len(children)
        self._last = 0.0  # reading of the ended step
        self._recorder = telemetry.recorder
        self._tracer = telemetry.tracer
        self._box = telemetry.recorder.box
        self._tallies = [(child.index, self._recorder.tally(child.index, hook)) for child in self.children]
        pairs = [(child.index, self._box.pair(child.index, hook)) for child in self.children]
        self._records = [(child, pair, ring.pack(pair, 0)) for child, pair in pairs]
        self._long: list[tuple[int, Readings]] = []  # fan-outs of this step, each after so many short ones
        self._every: list[Readings] = []  # all fan-outs of this step, where somebody needs them
        self.fan_out, self._read = self._unrolled()
        self._short, self._sums, _ = self._read()  # as they were when the step began

    def _unrolled(self) -> tuple[Call, Call]:
        """Return the fan-out, and a function: how many were short, each child's seconds in these, the last reading."""
        keeps_all = self._tracer is not None and self._tracer.traces_all
        place = self._box.place_of_layers(self.hook)
        source = _source(self.hook, len(self.children), place, keeps_all=keeps_all)
        scope: dict[str, Any] = {f"c{i}": child.layer_call(self.hook) for i, child in enumerate(self.children)}
        scope |= {
            "begun": self._box.floats,
            "clock": perf_counter,
            # Calls up to this are not slow, and in the first bucket.
            "limit": min(2 ** signals.CALL_DURATION.bounds[0], self._recorder.slow_ns(self.hook)) / 1e9,
            "long": self._long,
            "every": self._every,
            "general": self._general,
            "failed": self._failed,
        }
        exec(compile(source, f"<kvobs: {self.hook}>", "exec"), scope)
        fan_out, read = scope["unrolled"]()
        called = (child.index for child in self.children)
        lines = {number: next(called) for number, line in enumerate(source.splitlines(), 1) if _CALLS.match(line)}
        self._box.watch(self.hook, fan_out.__code__, lines)
        return fan_out, read

    def _general(self, *args: Any, **kwargs: Any) -> None:
        for child in self.children:
            getattr(child, self.hook)(*args, **kwargs)

    def _failed(self, scope: dict[str, Any], error: BaseException) -> None:
        """Count the calls of a fan-out that a child's exception ended: the completed ones and the failed one."""
        try:
            readings = [scope[f"t{i}"] for i in range(len(self.children)) if f"t{i}" in scope]
            stamps = [*map(_ns, readings), _ns(perf_counter())]
            for child, begin, end in zip(self.children, stamps, stamps[1:-1], strict=False):
                self._recorder.add_call(child.index, self.hook, begin, end - begin)
            failed = self.children[len(readings) - 1]
            self._recorder.failed(failed.index, self.hook, stamps[-2], stamps[-1] - stamps[-2], error)
        except Exception:
            faults.contain("record")

    def close_step(self) -> list[int]:
        """Count the calls of the step that ends; return the time of each connector in it, in ns."""
        whole = self._zeros[:]
        short, sums, self._last = self._read()
        calls, fan_outs = short - self._short, short - self._short + len(self._long)
        if fan_outs:
            for (i, tally), now, then in zip(self._tallies, sums, self._sums, strict=True):
                whole[i] = ns = int((now - then) * 1e9 + 0.5)  # `round` would take twice as long
                tally[0] += calls
                tally[SUM] += ns
            if self._long:
                self._count_long(whole)
            if self._tracer is not None and self._every:
                self._summarize(self._tracer)
            end_ns, more, note = _ns(self._last), ring.pack(0, fan_outs), self._box.note
            for i, pair, what in self._records:
                note(pair, end_ns - whole[i], whole[i], more | what)
            self._short, self._sums = short, sums
        else:
            self._last = 0.0
        return whole

    @property
    def last_ns(self) -> int:
        """Return the end of the ended step's last call, in ns since the epoch; 0 without one."""
        return _ns(self._last) + WALL_OFFSET if self._last else 0

    def _count_long(self, whole: list[int]) -> None:
        """Count the calls of the longer fan-outs, and add their times to those of the step."""
        long = self._long[:]
        del self._long[: len(long)]  # another thread may append
        slow_ns = self._recorder.slow_ns(self.hook)
        for n, (before, readings) in enumerate(long):
            stamps = [*map(_ns, readings)]
            for i, child in enumerate(self.children):
                start, took = stamps[i], stamps[i + 1] - stamps[i]
                whole[child.index] += took
                if self._recorder.add_call(child.index, self.hook, start, took) > slow_ns and self._tracer is not None:
                    more = {LAYER: before - self._short + n}
                    self._tracer.note(CallEvent(child.index, self.hook, start + WALL_OFFSET, took, True, more=more))

    def _summarize(self, tracer: CallSpans) -> None:
        """Pass a summary of the step's calls to a tracer that gets all calls."""
        every = self._every[:]
        del self._every[: len(every)]
        for i, child in enumerate(self.children):
            start, end = _ns(every[0][i]), _ns(every[-1][i + 1])
            took = [_ns(row[i + 1]) - _ns(row[i]) for row in every]
            slowest = max(took)
            more = {
                LAYERS: len(took),
                LAYERS_DURATION: sum(took) / 1e9,
                SLOWEST_LAYER: took.index(slowest),
                SLOWEST_LAYER_DURATION: slowest / 1e9,
            }
            event = CallEvent(child.index, self.hook, start + WALL_OFFSET, end - start, False, more=more, is_many=True)
            tracer.note(event)


def _source(hook: str, children: int, place: int, *, keeps_all: bool) -> str:
    """Write a fan-out as straight-line code: a loop is a third slower (bench: calls).

    Calls with keywords, which vLLM does not make, take a slower path. Seconds are read and added in three quarters of
    the time that ns take, and are exact to 4 ns when the machine has been up for a year. Two threads lose nothing:
    Python changes threads after a call or a jump backwards, and there is none among the additions.
    """
    arguments, numbers = ARGUMENTS[hook], range(children)
    more = ", **kwargs" if hook in TAKES_KEYWORDS else ""
    calls = "".join(f", c{i}=c{i}" for i in numbers)
    sums = "".join(f"s{i}, " for i in numbers)
    row = "".join(f"t{i}, " for i in (*numbers, children))
    if not children:
        return f"def unrolled():\n    return lambda {arguments}{more}: None, lambda: (0, (), 0.0)\n"
    lines = [
        "def unrolled():",
        f"    short, {sums}last = 0, {'0.0, ' * (children + 1)}",
        f"    def {hook}({arguments}{calls}, begun=begun, clock=clock, limit=limit{more}):",
        f"        nonlocal short, {sums}last",
        *([f"        if kwargs: return general({arguments}, **kwargs)"] if more else []),
        "        try:",
        f"            t0 = begun[{place}] = clock()",
        *(f"            c{i}({arguments})\n            t{i + 1} = clock()" for i in numbers),
        "        except BaseException as error:",
        "            failed(locals(), error)",
        "            raise",
        f"        last = t{children}",
        *([f"        every.append(({row}))"] if keeps_all else []),
        f"        if t{children} - t0 > limit:",
        f"            long.append((short, ({row})))",
        "        else:",
        "            short += 1",
        *(f"            s{i} += t{i + 1} - t{i}" for i in numbers),
        f"    return {hook}, lambda: (short, ({sums}), last)",
    ]
    return "\n".join(lines)


class Stalls:
    """Assigns the time of blocking calls to steps.

    A hook that was not called in a step (not implemented, or not replayed within a CUDA graph) is not observed: no data
    is not the same as a stall of 0.
    """

    def __init__(self, children: Sequence[Child], telemetry: Telemetry) -> None:
        self._loads = _Waits(signals.LOAD_STALL, "wait_for_layer_load", "start_load_kv", children, telemetry)
        self._saves = _Waits(signals.SAVE_STALL, "save_kv_layer", "wait_for_save", children, telemetry)
        self.layer_calls = self._loads.layers, self._saves.layers  # to be bound to the connector

    @property
    def last_load_ns(self) -> dict[int, int]:
        """Return the time of the ended step's last layer wait, in ns since the epoch, by child with layer hooks."""
        layers = self._loads.layers
        return dict.fromkeys([child.index for child in layers.children], layers.last_ns)

    def close_step(self, *, has_forward: bool, has_sync_loads: bool) -> dict[int, int]:
        """End a step; if a synchronous load was due, return the time of each child's loads within it, in ns.

        vLLM calls ``start_load_kv`` before the forward in that case, else after its launch. A step without a forward
        waits for nothing.
        """
        try:
            loads = self._loads.close_step(has_forward and has_sync_loads)
            self._saves.close_step(has_forward)
        except Exception:
            faults.contain("record")
            return {}
        return dict(enumerate(loads)) if has_sync_loads else {}


class _Waits:
    """A layer hook, and the once-a-step hook whose time is added to it."""

    def __init__(
        self, signal: signals.Signal, layer_hook: str, step_hook: str, children: Sequence[Child], telemetry: Telemetry
    ) -> None:
        self.layers = LayerCalls(layer_hook, children, telemetry)
        recorder = telemetry.recorder
        self._histograms = [
            (recorder.tally(child.index, step_hook), recorder.histogram(child.index, signal)) for child in children
        ]
        self._bucket = buckets(signal)
        self._before = [0] * len(children)  # the total time of the other hook when the step began

    def close_step(self, waits: bool) -> list[int]:
        """Count how long the step waited: for layers, and if it ``waits`` for the other hook, for both; return both."""
        whole = self.layers.close_step()
        for child, (tally, stalls) in enumerate(self._histograms):
            in_layers, before = whole[child], self._before[child]
            self._before[child] = total = tally[SUM]
            whole[child] += total - before
            if stall := whole[child] if waits else in_layers:
                stalls[self._bucket[(stall - 1).bit_length()]] += 1
                stalls[-1] += stall
        return whole


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
