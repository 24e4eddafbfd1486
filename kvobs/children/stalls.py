"""Measure how long each step of a worker waited for each child: for loads until the forward's end, and for saves."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from kvobs import faults
from kvobs.children.child import Child
from kvobs.children.layer_calls import LayerCalls
from kvobs.schema import signals
from kvobs.telemetry.recorders import Telemetry
from kvobs.telemetry.recording.recorder import SUM


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
