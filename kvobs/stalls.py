"""How long each step of a worker waited for each child: for loads until the forward's end, for saves also after it."""

from __future__ import annotations

from kvobs import faults, signals
from kvobs.recorder import SUM, Recorder

_LOAD, _START, _SAVE = ("wait_for_layer_load",), ("start_load_kv",), ("save_kv_layer", "wait_for_save")


class Stalls:
    """Cuts the calls' durations, which only ever grow, into steps.

    A hook that was not called in a step (left out because it is empty, or not replayed within a CUDA graph) is not
    observed: no stall is not the same as a stall of nothing.
    """

    def __init__(self, children: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._meters = [
            tuple(_Meter([recorder.durations(child, hook) for hook in hooks]) for hooks in (_LOAD, _START, _SAVE))
            for child in range(children)
        ]

    def close_step(self, *, waits_for_start: bool) -> list[int]:
        """Record the step's stalls; return what each child's loads took in it, in ns.

        ``waits_for_start``: a synchronous load is due, so vLLM has called ``start_load_kv`` before the forward.
        """
        load_ns = [0] * len(self._meters)
        try:
            for child, (load, start, save) in enumerate(self._meters):
                waited, started, saved = load.read(), start.read(), save.read()
                waited += started if waits_for_start else 0
                if waited:
                    self._recorder.observe(child, signals.LOAD_STALL, waited)
                if saved:
                    self._recorder.observe(child, signals.SAVE_STALL, saved)
                load_ns[child] = waited
        except Exception:
            faults.contain("record")
        return load_ns


class _Meter:
    """What some hooks' durations have grown by since the last reading."""

    __slots__ = ("_before", "_durations")

    def __init__(self, durations: list[list[int]]) -> None:
        self._durations = durations
        self._before = 0

    def read(self) -> int:
        now = 0
        for durations in self._durations:
            now += durations[SUM]
        grown, self._before = now - self._before, now
        return grown
