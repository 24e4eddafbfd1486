"""Time the hooks that vLLM calls for every layer of every step, and the steps' waits for loads and saves."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvobs import faults
from kvobs.clock import WALL_OFFSET
from kvobs.page.calls import pack
from kvobs.probe.pure import Call, Wait
from kvobs.probe.recorder import SUM, CallEvent, Recorder, buckets
from kvobs.schema.signals import LOAD_STALL, SAVE_STALL
from kvobs.schema.spans import LAYER, LAYERS, LAYERS_DURATION, SLOWEST_LAYER, SLOWEST_LAYER_DURATION

# The hooks as vLLM declares them; save_kv_layer also takes keywords.
ARGUMENTS = {"wait_for_layer_load": ("layer_name",), "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata")}
# Where no connector implements one: with `*args` it would take twice as long.
NOTHING: dict[str, Call] = {
    "wait_for_layer_load": lambda layer_name: None,  # noqa: ARG005 - vLLM may name them
    "save_kv_layer": lambda layer_name, kv_layer, attn_metadata, **kwargs: None,  # noqa: ARG005
}
# The hook of each step whose time is added to the waits for layers, and the histogram of both.
WAITS = {
    "wait_for_layer_load": ("start_load_kv", LOAD_STALL),
    "save_kv_layer": ("wait_for_save", SAVE_STALL),
}


class LayerCall(NamedTuple):
    """A connector that implements a layer hook, and its call."""

    connector_index: int
    call: Call


class LayerCalls:
    """The calls of one layer hook into the connectors that implement it; vLLM calls ``fan_out``."""

    def __init__(self, hook: str, targets: Sequence[LayerCall], recorder: Recorder) -> None:
        self.hook, self.targets = hook, targets
        self._recorder = recorder
        self._fan_outs = recorder.page.fan_outs(hook)
        self._before = 0  # fan-outs, when the step began
        self.last_ns = 0
        """When the ended step's last layer ended, in ns since the epoch; 0 without one."""
        self._every: dict[int, list[tuple[int, int]]] = {}  # of this step, where the listener needs them
        timed = tuple(recorder.target(i, hook, call, partial(self._notice, i)) for i, call in targets)
        probe, self.fan_out = recorder.probe, NOTHING[hook]
        if targets:
            self.fan_out = probe.fan_out(timed, self._fan_outs)
        of_layers = dict(zip([target.connector_index for target in targets], timed, strict=True))
        step_hook, signal = WAITS[hook]
        rows = [
            Wait(
                of_layers[i].histogram + SUM if i in of_layers else -1,
                recorder.calls(i, step_hook) + SUM,
                recorder.histogram(i, signal),
                pack(recorder.page.marks(i, hook), 0),
            )
            for i in range(recorder.connectors)
        ]
        self._waits = probe.waits(tuple(rows), self._fan_outs, buckets(signal), signal.sum_offset)

    def close_step(self, is_waiting: bool = False) -> list[int]:
        """End a step; return the time of each connector's calls in it, in ns (see ``Waits``)."""
        times = self._waits.close(is_waiting)
        if self._every:
            self._note_all()
        fan_outs, self.last_ns = self._recorder.words[self._fan_outs], 0
        if fan_outs != self._before:
            self._before, self.last_ns = fan_outs, self._recorder.words[self._fan_outs + 1] + WALL_OFFSET
        return times

    def _notice(self, index: int, start: int, spent: int, _: object = None) -> int:
        """Count a call if it is slow; return its time without pauses."""
        try:
            recorder, listener = self._recorder, self._recorder.listener
            ran, is_slow = recorder.count_slow(index, self.hook, start, spent)
            if listener is not None and listener.traces_all:
                self._every.setdefault(index, []).append((start, spent))
            if listener is not None and is_slow:
                more = {LAYER: recorder.words[self._fan_outs] - self._before}
                listener.note(CallEvent(index, self.hook, start + WALL_OFFSET, spent, True, more=more))
        except Exception:
            faults.contain("record")
            return spent
        return ran

    def _note_all(self) -> None:
        """Pass a summary of the step's calls to the listener, which receives every call."""
        every, self._every = self._every, {}
        for index, calls in every.items():
            took = [spent for _, spent in calls]
            (start, _), (last, spent), slowest = calls[0], calls[-1], max(took)
            more = {
                LAYERS: len(took),
                LAYERS_DURATION: sum(took) / 1e9,
                SLOWEST_LAYER: took.index(slowest),
                SLOWEST_LAYER_DURATION: slowest / 1e9,
            }
            wall_ns, whole_ns = start + WALL_OFFSET, last + spent - start
            event = CallEvent(index, self.hook, wall_ns, whole_ns, False, more=more, is_many=True)
            if self._recorder.listener is not None:
                self._recorder.listener.note(event)


class Stalls:
    """Assigns the time of blocking calls to steps.

    A hook that was not called in a step (not implemented, or not replayed within a CUDA graph) is not observed: no data
    is not the same as a stall of 0.
    """

    def __init__(self, targets: Mapping[str, Sequence[LayerCall]], recorder: Recorder) -> None:
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
        try:
            loads = self._loads.close_step(has_forward and has_sync_loads)
            self._saves.close_step(has_forward)
            if not has_sync_loads:
                self.last_load_ns = {}
                return {}
            last_ns = self._loads.last_ns
            self.last_load_ns = dict.fromkeys([target.connector_index for target in self._loads.targets], last_ns)
        except Exception:
            faults.contain("record")
            return {}
        return dict(enumerate(loads))
