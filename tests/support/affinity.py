"""Keep a test, and what it starts, off the core that the ranks of its server share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def keeping_off(core: int) -> Iterator[None]:
    """Keep all threads of this process, and the processes they start, off a core inside the ``with`` block.

    Unless it is the only one. On Linux 6.18 a process beside two ranks that yield one core to each other, in another
    session than its own, was seen to get no CPU for 25 s, and once not for as long as their load went on.
    """
    ours = os.sched_getaffinity(0)
    set_affinity(os.getpid(), ours - {core} or ours)
    try:
        yield
    finally:
        set_affinity(os.getpid(), ours)


def set_affinity(pid: int, cores: set[int]) -> None:
    """Let each thread of a process run on these cores, and no other."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
