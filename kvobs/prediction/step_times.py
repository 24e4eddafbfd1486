"""Measure the time of each of an engine's steps from when it is scheduled and when its output comes."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

Work: TypeAlias = tuple[int, int, int, int, int]
"""The work of a step: tokens, pairs, decodes, context and prefills, as ``ComputeCost.observe`` takes them."""


class StepTimes:
    """The steps in flight.

    A step's time is that from the output before it, or from its own scheduling if that came later, to its output. So an
    idle engine's pause belongs to no step. With async scheduling and with pipeline parallelism, where the next step is
    scheduled before an output comes, it is the time from output to output: what a further step costs, not its latency.
    What vLLM's loop does between an output and the next step's scheduling counts only where it delays the steps.

    Outputs come in the order of the steps. If one is lost, as by an exception in vLLM, the number of steps that can be
    in flight limits how long the others are assigned wrongly.

    Args:
        in_flight: the most steps that are scheduled and have no output.

    Attributes:
        steps: those that are: when each was scheduled, and its work, None if nothing is to be learned from it.
    """

    def __init__(self, in_flight: int) -> None:
        self.steps: deque[tuple[int, Work | None]] = deque(maxlen=max(1, in_flight))
        self._last_ns = 0

    def __len__(self) -> int:
        return len(self.steps)

    def end(self, now_ns: int) -> tuple[int, Work] | None:
        """Return the time in ns and the work of the step whose output has come; None if there is nothing to learn."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if not self.steps:
            return None
        began_ns, work = self.steps.popleft()
        return None if work is None else (now_ns - max(began_ns, last_ns), work)
