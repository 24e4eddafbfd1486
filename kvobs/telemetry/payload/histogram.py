"""Compute quantiles of histograms whose buckets are counted, as payloads and /metrics have them."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate


def bucket_of(cumulative: Sequence[float], q: float) -> int | None:
    """Return the index of the bucket that holds a quantile; None without observations.

    Args:
        cumulative: for each bucket, the number of observations in it and below it.
        q: from 0 to 1.
    """
    if not cumulative or cumulative[-1] <= 0:
        return None
    return next(i for i, count in enumerate(cumulative) if count >= q * cumulative[-1])


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return what PromQL's ``histogram_quantile`` does: linear within a bucket, the last finite bound above it.

    Args:
        buckets: upper bound, which may be infinite -> how many observations are not above it.
        q: from 0 to 1.
    """
    bounds = sorted(buckets)
    # No bucket holds less than one below it: a scrape may come in the middle of an update.
    counts = list(accumulate((buckets[bound] for bound in bounds), max))
    at = bucket_of(counts, q)
    if at is None or bounds[-1] != math.inf:
        return None
    if bounds[at] == math.inf:
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    share = (q * counts[-1] - below) / (counts[at] - below) if counts[at] > below else 1
    return low + (bounds[at] - low) * share
