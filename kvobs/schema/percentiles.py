"""Compute percentiles of histograms as all of kvobs shows them: the boards, `kvobs top`, `kvobs check`, vLLM's log."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from kvobs.schema.signals import PER_DOUBLING, Signal

ROUNDING = 0.001
"""What logarithms of bounds may be off by, in buckets: a bound belongs to the bucket below it."""


def percentile(signal: Signal, buckets: Mapping[float, float], q: float) -> float | None:
    """Return a quantile of a metric's histogram: of narrow buckets the middle (see `middle`), else `quantile`."""
    value = quantile(buckets, q)
    return middle(value) if value and signal.is_narrow else value


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return what PromQL's ``histogram_quantile`` does: linear within a bucket, the last finite bound above it.

    Args:
        buckets: upper bound, which may be infinite -> how many observations are not above it.
        q: from 0 to 1.
    """
    bounds = sorted(buckets)
    # No bucket holds less than one below it: a scrape may come in the middle of an update.
    counts = list(accumulate((buckets[bound] for bound in bounds), max))
    if not counts or counts[-1] <= 0 or bounds[-1] != math.inf:
        return None
    at = bisect_left(counts, q * counts[-1])
    if bounds[at] == math.inf:
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    share = (q * counts[-1] - below) / (counts[at] - below) if counts[at] > below else 1
    return low + (bounds[at] - low) * share


def middle(seconds: float) -> float:
    """Return the middle, as a factor, of the bucket that a duration is in: no duration in it is 10 % off.

    A value that is linear within the bucket is up to 19 % off where all durations are equal.
    """
    return 2.0 ** ((math.ceil(PER_DOUBLING * math.log2(seconds) - ROUNDING) - 0.5) / PER_DOUBLING)


def middle_promql(expr: str) -> str:
    """Return the same as PromQL."""
    return f"2 ^ ((ceil({PER_DOUBLING} * log2({expr}) - {ROUNDING}) - 0.5) / {PER_DOUBLING})"
