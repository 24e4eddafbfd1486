"""Time the hooks that vLLM calls for every layer of every step, and the steps' waits for loads and saves.

Between two layers only the clock is read: one reading ends a child's time and begins the next child's. The times of a
fan-out that is short as a whole are added to sums, which the end of the step counts at once; a longer one is kept, and
counted there call by call.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from kvobs import faults
from kvobs.clock import WALL_OFFSET
from kvobs.probe import ring
from kvobs.probe.recorder import SUM, Call, CallEvent, Recorder, buckets
from kvobs.schema import signals
from kvobs.schema.spans import LAYER, LAYERS, LAYERS_DURATION, SLOWEST_LAYER, SLOWEST_LAYER_DURATION

# The hooks as vLLM declares them.
ARGUMENTS = {"wait_for_layer_load": "layer_name", "save_kv_layer": "layer_name, kv_layer, attn_metadata"}
TAKES_KEYWORDS = {"save_kv_layer"}
# The hook of each step whose time is added to the waits for layers, and the histogram of both.
WAITS = {
    "wait_for_layer_load": ("start_load_kv", signals.LOAD_STALL),
    "save_kv_layer": ("wait_for_save", signals.SAVE_STALL),
}

Readings: TypeAlias = tuple[float, ...]
"""Of the clock, in seconds: the start of a fan-out, and the end of each connector's call."""


class Target(NamedTuple):
    """A connector that implements a layer hook."""

    child: int
    call: Call  # counted by the fan-out
    recorded: Call  # that counts itself


class LayerCalls:
    """The calls of one layer hook into the connectors that implement it; vLLM calls ``fan_out``."""

    def __init__(self, hook: str, targets: Sequence[Target], recorder: Recorder) -> None:
        self.hook = hook
        self.targets = targets
        self._zeros = [0] * recorder.children
        self._last = 0.0  # reading of the ended step
        self._recorder = recorder
        self._tallies = [(target.child, recorder.tally(target.child, hook)) for target in targets]
        pairs = [(target.child, recorder.box.pair(target.child, hook)) for target in targets]
        self._records = [(child, pair, ring.pack(pair, 0)) for child, pair in pairs]
        self._long: list[tuple[int, Readings]] = []  # fan-outs of this step, each after so many short ones
        self._every: list[Readings] = []  # all fan-outs of this step, where the listener needs them
        self.fan_out, self._read = self._unrolled()
        self._short, self._sums, _ = self._read()  # as they were when the step began
        step_hook, signal = WAITS[hook]
        children = range(recorder.children)
        self._histograms = [(recorder.tally(i, step_hook), recorder.histogram(i, signal)) for i in children]
        self._bucket = buckets(signal)
        self._before = [0] * recorder.children  # the total time of the step's hook when the step began

    def _unrolled(self) -> tuple[Call, Call]:
        """Return the fan-out, and a function: how many were short, each one's seconds in these, the last reading."""
        box, recorder = self._recorder.box, self._recorder
        source, lines = _source(
            self.hook, len(self.targets), box.place_of_layers(self.hook), keeps_all=recorder.traces_all
        )
        scope: dict[str, Any] = {f"c{i}": target.call for i, target in enumerate(self.targets)}
        scope |= {
            "begun": box.floats,
            "clock": perf_counter,
            # Calls up to this are not slow, and in the first bucket.
            "limit": min(2 ** signals.CALL_DURATION.bounds[0], recorder.slow_ns(self.hook)) / 1e9,
            "long": self._long,
            "every": self._every,
            "general": self._general,
            "failed": self._failed,
        }
        exec(compile(source, f"<kvobs: {self.hook}>", "exec"), scope)
        fan_out, read = scope["unrolled"]()
        called = {number: self.targets[i].child for number, i in lines.items()}
        box.watch(self.hook, fan_out.__code__, called)
        return fan_out, read

    def _general(self, *args: Any, **kwargs: Any) -> None:
        for target in self.targets:
            target.recorded(*args, **kwargs)

    def _failed(self, scope: dict[str, Any], error: BaseException) -> None:
        """Count the calls of a fan-out that a child's exception ended: the completed ones and the failed one."""
        try:
            readings = [scope[f"t{i}"] for i in range(len(self.targets)) if f"t{i}" in scope]
            stamps = [*map(_ns, readings), _ns(perf_counter())]
            for target, begin, end in zip(self.targets, stamps, stamps[1:-1], strict=False):
                self._recorder.add_call(target.child, self.hook, begin, end - begin)
            failed = self.targets[len(readings) - 1]
            self._recorder.failed(failed.child, self.hook, stamps[-2], stamps[-1] - stamps[-2], error)
        except Exception:
            faults.contain("record")

    def close_step(self, waits: bool = False) -> list[int]:
        """Count the calls of the step that ends, and how long it waited; return the time of each connector, in ns.

        A step waits for its layers, and for the hook of each step if it ``waits`` for that; the time is of both.
        """
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
            if self._every:
                self._note_all()
            end_ns, more, note = int(self._last * 1e9), fan_outs << ring.CALLS_AT, self._recorder.box.note
            for i, pair, what in self._records:
                note(pair, end_ns - whole[i], whole[i], more | what)
            self._short, self._sums = short, sums
        else:
            self._last = 0.0
        for child, (tally, stalls) in enumerate(self._histograms):
            in_layers, before = whole[child], self._before[child]
            self._before[child] = total = tally[SUM]
            whole[child] += total - before
            if stall := whole[child] if waits else in_layers:
                stalls[self._bucket[(stall - 1).bit_length()]] += 1
                stalls[-1] += stall
        return whole

    @property
    def last_ns(self) -> int:
        """Return the end of the ended step's last call, in ns since the epoch; 0 without one."""
        return _ns(self._last) + WALL_OFFSET if self._last else 0

    def _count_long(self, whole: list[int]) -> None:
        """Count the calls of the longer fan-outs, and add their times to those of the step."""
        long = self._long[:]
        del self._long[: len(long)]  # another thread may append
        slow_ns, listener = self._recorder.slow_ns(self.hook), self._recorder.listener
        for n, (before, readings) in enumerate(long):
            stamps = [*map(_ns, readings)]
            for i, target in enumerate(self.targets):
                start, took = stamps[i], stamps[i + 1] - stamps[i]
                whole[target.child] += took
                if self._recorder.add_call(target.child, self.hook, start, took) > slow_ns and listener is not None:
                    more = {LAYER: before - self._short + n}
                    listener.note(CallEvent(target.child, self.hook, start + WALL_OFFSET, took, True, more=more))

    def _note_all(self) -> None:
        """Pass a summary of the step's calls to the listener, which receives every call."""
        every = self._every[:]
        del self._every[: len(every)]
        for i, target in enumerate(self.targets):
            took = [_ns(row[i + 1]) - _ns(row[i]) for row in every]
            start, end, slowest = _ns(every[0][i]), _ns(every[-1][i + 1]), max(took)
            more = {
                LAYERS: len(took),
                LAYERS_DURATION: sum(took) / 1e9,
                SLOWEST_LAYER: took.index(slowest),
                SLOWEST_LAYER_DURATION: slowest / 1e9,
            }
            event = CallEvent(target.child, self.hook, start + WALL_OFFSET, end - start, False, more=more, is_many=True)
            if self._recorder.listener is not None:
                self._recorder.listener.note(event)


def _source(hook: str, targets: int, place: int, *, keeps_all: bool) -> tuple[str, dict[int, int]]:
    """Write a fan-out as straight-line code, and return which line calls which target: a loop is a third slower.

    Calls with keywords, which vLLM does not make, take a slower path. Seconds are read and added in three quarters of
    the time that ns take.
    """
    numbers, arguments = range(targets), ARGUMENTS[hook]
    more = ", **kwargs" if hook in TAKES_KEYWORDS else ""
    calls = "".join(f", c{i}=c{i}" for i in numbers)
    sums = "".join(f"s{i}, " for i in numbers)
    row = "".join(f"t{i}, " for i in (*numbers, targets))
    if not targets:
        return f"def unrolled():\n    return lambda {arguments}{more}: None, lambda: (0, (), 0.0)\n", {}
    lines = [
        "def unrolled():",
        f"    short, {sums}last = 0, {'0.0, ' * (targets + 1)}",
        f"    def {hook}({arguments}{calls}, begun=begun, clock=clock, limit=limit{more}):",
        f"        nonlocal short, {sums}last",
        *([f"        if kwargs: return general({arguments}, **kwargs)"] if more else []),
        "        try:",
        f"            t0 = begun[{place}] = clock()",
    ]
    called = {}
    for i in numbers:
        lines += [f"            c{i}({arguments})", f"            t{i + 1} = clock()"]
        called[len(lines) - 1] = i
    lines += [
        "        except BaseException as error:",
        "            failed(locals(), error)",
        "            raise",
        f"        last = t{targets}",
        *([f"        every.append(({row}))"] if keeps_all else []),
        f"        if t{targets} - t0 > limit:",
        f"            long.append((short, ({row})))",
        "        else:",
        "            short += 1",
        *(f"            s{i} += t{i + 1} - t{i}" for i in numbers),
        f"    return {hook}, lambda: (short, ({sums}), last)",
    ]
    return "\n".join(lines), called


class Stalls:
    """Assigns the time of blocking calls to steps.

    A hook that was not called in a step (not implemented, or not replayed within a CUDA graph) is not observed: no data
    is not the same as a stall of 0.
    """

    def __init__(self, targets: Mapping[str, Sequence[Target]], recorder: Recorder) -> None:
        """Measure the calls into the connectors that implement each layer hook."""
        self._loads, self._saves = (LayerCalls(hook, targets[hook], recorder) for hook in WAITS)
        self.last_load_ns: dict[int, int] = {}
        """The end of the last layer wait of a step with synchronous loads, in ns since the epoch, by connector."""
        self.fan_outs = {calls.hook: calls.fan_out for calls in (self._loads, self._saves)}

    def close_step(self, *, has_forward: bool, has_sync_loads: bool) -> dict[int, int]:
        """End a step; if a synchronous load was due, return the time of each connector's loads within it, in ns.

        vLLM calls ``start_load_kv`` before the forward in that case, else after its launch. A step without a forward
        waits for nothing.
        """
        self.last_load_ns = {}
        try:
            loads = self._loads.close_step(has_forward and has_sync_loads)
            self._saves.close_step(has_forward)
            if has_sync_loads:
                last_ns = self._loads.last_ns
                self.last_load_ns = dict.fromkeys([target.child for target in self._loads.targets], last_ns)
        except Exception:
            faults.contain("record")
            return {}
        return dict(enumerate(loads)) if has_sync_loads else {}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
