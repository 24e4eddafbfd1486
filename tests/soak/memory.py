"""How much memory a soak takes: sampled as it goes, and whether it stays flat."""

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

WARM = 0.2
"""Part of the requests after which memory must stay: caches, pools and imports are filled by then."""

MIB = 1 << 20


class Sample(NamedTuple):
    """What a process holds after so many requests."""

    requests: int
    resident: int  # bytes
    objects: int = 0  # that Python's collector tracks; 0 where it can't be known


def sample(requests: int) -> Sample:
    """Look at this process, with all garbage collected and what the allocator keeps for later given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(requests, pages * 4096, len(gc.get_objects()))


def warm(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples that must be flat."""
    first, last = samples[0].requests, samples[-1].requests
    return [s for s in samples if s.requests >= first + WARM * (last - first)]


def growth(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return by how many bytes and objects a process has grown since it was warm: the last quarter against the first.

    Medians, since a sample is as good as the moment it was taken in.
    """
    flat = warm(samples)
    quarter = max(1, len(flat) // 4)
    size, objects = (
        median_high(held[-quarter:]) - median_high(held[:quarter])
        for held in ([s.resident for s in flat], [s.objects for s in flat])
    )
    return size, objects
