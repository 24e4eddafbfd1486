"""Read the wall clock without its jumps: durations within a process are right whenever the machine's clock is set."""

import time
from time import perf_counter_ns

WALL_OFFSET = time.time_ns() - perf_counter_ns()
"""From the times of ``perf_counter_ns`` to those since the epoch, in ns, as they were when the process started."""


def wall_ns() -> int:
    """Return the time in ns since the epoch, monotonic within this process."""
    return perf_counter_ns() + WALL_OFFSET
