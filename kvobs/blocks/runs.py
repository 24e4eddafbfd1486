"""Find runs of consecutive blocks, which are copied at once."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that are consecutive on both sides."""

    src: int
    dst: int
    length: int


def without_duplicates(src_ids: Ids, dst_ids: Ids) -> tuple[Ids, Ids]:
    """Return the pairs by destination; the last pair if several have the same destination."""
    # The first of equal ones in the reversed order is the last one.
    dst, last = np.unique(dst_ids[::-1], return_index=True)
    return src_ids[::-1][last], dst


def find_runs(src_ids: Ids, dst_ids: Ids) -> list[Run]:
    """Return the longest runs that cover these pairs in this order."""
    ends = np.flatnonzero((np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)) + 1
    begins = [0, *ends.tolist()]
    lengths = [end - begin for begin, end in pairwise([*begins, len(dst_ids)])]
    return list(map(Run, src_ids[begins].tolist(), dst_ids[begins].tolist(), lengths))
