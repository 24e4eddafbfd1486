"""Choose the probe of this process: the compiled one, or its twin in Python.

The compiled one is missing where kvobs was installed without a compiler, and for Pythons that its wheels don't serve.
"""

import os
from functools import cache
from typing import NamedTuple

from kvobs.probe.pure import Clock, Probe, PureProbe

VARIABLE = "KVOBS_NATIVE"
"""Environment variable: 0 leaves the compiled probe out."""
VERSION = 4


class Choice(NamedTuple):
    """Whether the compiled probe runs, and why not."""

    is_native: bool
    reason: str = ""


@cache
def choice() -> Choice:
    """Return which probe this process has."""
    if os.environ.get(VARIABLE) == "0":
        return Choice(False, f"{VARIABLE}=0")
    try:
        from kvobs.probe import compiled
    except ImportError as error:
        is_there = str(error.path).endswith(".so")  # and of another machine, or broken
        return Choice(False, str(error).partition("\n")[0] if is_there else "this installation has no compiled probe")
    if compiled.VERSION != VERSION:
        return Choice(False, f"{compiled.__file__} has version {compiled.VERSION}, and this kvobs needs {VERSION}")
    return Choice(True)


def probe(words: memoryview, ring: int, buckets: bytes, total: int, *clock: Clock) -> Probe:
    """Return a probe that counts in a page; see ``PureProbe``."""
    if choice().is_native:
        from kvobs.probe import compiled

        return compiled.Probe(words, ring, buckets, total, *clock)
    return PureProbe(words, ring, buckets, total, *clock)
