"""Measure how far back the blocks of each prompt were used last: the hit share of a prefix cache of any size.

A block's distance is the number of distinct blocks used since its last use, with itself: an LRU cache of that many
blocks still has it (Mattson's stack distance). A prompt is looked up as a whole before any of its blocks is stored, and
its first block counts as the one used last, since vLLM evicts a prefix from its end. A block serves only together with
all blocks before it, so its distance is at least theirs.

Distances are estimated from samples, as in SHARDS (Waldspurger et al., FAST 2015), with two changes. Neighbouring
blocks of a prefix share their fate, so one block stands for a run of them, and runs grow with the depth. And samples
are thinned by age instead of equally: up to a distance that follows from the traffic all are kept, beyond it half of
them are left whenever the distance doubles, chosen by their hashes. So a system prompt that every request has is always
among them, and a reuse after hours is estimated from a few. What is left stands for what is not: it has a scale.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from sys import byteorder
from typing import NamedTuple

import numpy as np

SAMPLES_AT_MOST = 9216
_THINNED_TO = SAMPLES_AT_MOST // 3  # removing many at once costs less
_PLACES = 2 * SAMPLES_AT_MOST  # uses after which samples get new numbers
_SPAN = 64  # positions whose weights have one sum
_RUNS_PER_DEPTH = 8  # a run has an eighth of the blocks before it, at least one


class Reuse(NamedTuple):
    """The blocks of a prompt, by the smallest cache size that holds them; the last number: no size does."""

    blocks: list[int]
    seen: int  # how many of its blocks were used before, as far as the samples show
    keys: Sequence[int] = ()  # of its sampled blocks, in their order


def key_of(block_hash: int | bytes) -> int:
    """Return a block's key: the last 8 bytes of its hash, which are all that KV cache events have of it."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


class ReuseDistances:
    """The last uses of sampled blocks; ``sizes`` are cache sizes, in blocks, in ascending order.

    numpy only thins: within an engine's step its code is cold, and it gives the GIL away: a sum takes 150 us.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [*sizes, 1 << 62]
        ends = [0]
        while ends[-1] < sizes[-1]:
            ends.append(ends[-1] + max(1, ends[-1] // _RUNS_PER_DEPTH))
        self._ends = ends[1:]  # of the runs
        self._runs = [end - start for start, end in pairwise(ends)]
        self.sampled = [(start + end) // 2 for start, end in pairwise(ends)]
        """The depth of the block that stands for each run."""
        self._last: dict[int, int] = {}  # a sampled block's key -> place of its last use
        self._next = self._thinned = 0  # positions from `_thinned` on are of samples that were not scaled
        # By position: this key, how many blocks the sample stands for (0: it was used again), and the factor of that.
        self._hashes = array("Q", bytes(8 * _PLACES))
        self._weights = array("q", bytes(8 * _PLACES))
        self._scales = array("i", [1]) * _PLACES
        self._sums = array("q", bytes(8 * _PLACES // _SPAN))  # of the weights, in spans that are full
        self._largest = sizes[-1]
        self._exact: float = sizes[-1]  # the distance up to which no sample is missing
        self._excess = 0  # blocks that scaled samples stood for beyond the prompts' blocks; balanced by later prompts

    def observe(self, hashes: Sequence[bytes], blocks: int) -> Reuse:
        """Look up a prompt, the first ``blocks`` of these, then note its use."""
        counted = [0] * len(self._sizes)
        if not blocks:
            return Reuse(counted, 0)
        used = bisect_left(self.sampled, blocks)
        runs = self._runs[:used]
        runs[-1] += blocks - self._ends[used - 1]
        keys, positions = self._positions(hashes, 0, used)
        lowest, distance, size, seen = self._next, 0, 0, 0
        thinned, limit = self._thinned, self._sizes[0]
        for position, run, end in zip(positions, runs, self._ends, strict=False):
            if position is None:
                continue
            weight = run if position >= thinned else run * self._scales[position]
            if position < lowest:
                distance += weight if position == lowest - 1 else self._between(position, lowest)
                lowest = position
                while distance > limit:  # the run's first blocks are nearer than its last
                    nearer = max(0, weight - (distance - limit))
                    counted[size] += nearer
                    weight -= nearer
                    size += 1
                    limit = self._sizes[size]
            counted[size] += weight
            seen = end
        rest = blocks - self._excess - sum(counted[:-1])
        counted[-1] = max(0, rest)
        self._excess = min(counted[-1] - rest, self._largest // 4)
        self._use(keys, runs, positions)
        return Reuse(counted, min(seen, blocks), keys)

    def use(self, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Note the use of the blocks from ``first`` to ``end`` without looking them up: the blocks of an answer."""
        begin, end = (bisect_left(self.sampled, depth) for depth in (first, end))
        if begin < end:
            keys, positions = self._positions(hashes, begin, end)
            self._use(keys, self._runs[begin:end], positions)

    def weights(self, keys: Iterable[int]) -> dict[int, int]:
        """Return which of these blocks are samples, each with the number of blocks that it stands for."""
        return {key: self._weights[self._last[key]] for key in self._last.keys() & keys}

    def _positions(self, hashes: Sequence[bytes], begin: int, end: int) -> tuple[array[int], list[int | None]]:
        """Return the keys of these samples and the positions of their last uses, after making room for them."""
        if self._next + end - begin > _PLACES or len(self._last) + end - begin > SAMPLES_AT_MOST:
            self._thin()
        keys = array("Q", b"".join([hashes[depth][-8:] for depth in self.sampled[begin:end]]))
        if byteorder == "little":
            keys.byteswap()
        return keys, list(map(self._last.get, keys))

    def _between(self, begin: int, end: int) -> int:
        """Return the sum of the weights from one position to another."""
        first, last = begin // _SPAN + 1, end // _SPAN
        if first > last:
            return sum(self._weights[begin:end])
        ends = sum(self._weights[begin : first * _SPAN]) + sum(self._weights[last * _SPAN : end])
        return ends + sum(self._sums[first:last])

    def _use(self, keys: array[int], runs: list[int], positions: list[int | None]) -> None:
        """Note a use of these blocks; the first one counts as used last."""
        weights, sums = self._weights, self._sums
        for position in positions:
            if position is not None:
                sums[position // _SPAN] -= weights[position]
                weights[position] = 0
        begin, end = self._next, self._next + len(keys)
        self._hashes[begin:end] = keys[::-1]
        weights[begin:end] = array("q", runs[::-1])
        self._last.update(zip(keys, range(end - 1, begin - 1, -1), strict=True))
        for span in range(begin // _SPAN, end // _SPAN):
            sums[span] = sum(weights[span * _SPAN : (span + 1) * _SPAN])
        self._next = end

    def _thin(self) -> None:
        """Remove samples by their age and hash until at most a third is left, and renumber them."""
        all_hashes, all_weights, all_scales = map(np.asarray, (self._hashes, self._weights, self._scales))
        used = np.flatnonzero(all_weights[: self._next] != 0)  # in the order of their age
        hashes, weights, scales = all_hashes[used], all_weights[used], all_scales[used]
        distances = weights[::-1].cumsum()[::-1]
        # A sample is left where its scale, which follows from its distance, is not above what its hash allows.
        least = np.where(distances > self._largest, inf, np.ldexp(distances, np.frexp(hashes)[1] - 65))
        if len(used) > _THINNED_TO:
            self._exact = min(float(np.partition(least, _THINNED_TO)[_THINNED_TO]), self._largest)
        kept = least < self._exact
        self._next = self._thinned = end = int(kept.sum())
        scaled = np.maximum(scales, 1 << (np.frexp(np.maximum(distances / self._exact, 1))[1] - 1))
        all_hashes[:end], all_scales[:end] = hashes[kept], scaled[kept]
        all_weights[:end] = (weights * (scaled // scales))[kept]
        all_weights[end:], all_scales[end:] = 0, 1
        self._sums = array("q", all_weights.reshape(-1, _SPAN).sum(1).tolist())
        self._last = {}  # before the new one is built
        self._last = dict(zip(self._hashes[:end], range(end), strict=True))
