"""Follow sampled blocks that connectors evict: are they asked for again?"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.telemetry.estimates.reuse_distances import ReuseDistances, key_of

_FOLLOWED, _REUSED = map(signals.slots, (signals.FOLLOWED_EVICTIONS, signals.REUSED_EVICTIONS))
FOLLOWED_AT_MOST = 16_384
"""Evicted samples of a medium; the oldest are forgotten, and count as never asked for."""


class Evictions:
    """Holds the samples that each medium of a connector has evicted and not stored again.

    Samples stand for others, so shares are right, and the cost does not grow with a store. ``block_size`` are the
    tokens of a sample's block.
    """

    def __init__(self, recorder: Recorder, distances: ReuseDistances, block_size: int) -> None:
        self._recorder = recorder
        self._distances = distances
        self._block_size = block_size
        self._gone: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)  # sample -> blocks it stands for

    def stored(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
        """Note blocks that a connector has stored."""
        if gone := self._gone.get((index, medium)):
            for key in gone.keys() & map(key_of, hashes):
                del gone[key]

    def evicted(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
        """Note blocks that a connector has evicted; those that are no samples are not followed."""
        if samples := self._distances.weights(map(key_of, hashes)):
            gone = self._gone[index, medium]
            gone |= samples
            for key in list(islice(gone, max(0, len(gone) - FOLLOWED_AT_MOST))):
                del gone[key]
            self._recorder.count(index, _FOLLOWED[medium], sum(samples.values()) * self._block_size)

    def asked(self, keys: Sequence[int], local: int) -> None:
        """Count what a prompt asks for beyond the ``local`` tokens that vLLM has; ``keys`` are of its samples."""
        for (index, medium), gone in self._gone.items():
            if gone.keys().isdisjoint(keys):
                continue
            beyond = bisect_left(self._distances.sampled, local / self._block_size)
            if n := sum(gone.pop(key, 0) for key in keys[beyond:]):
                self._recorder.count(index, _REUSED[medium], n * self._block_size)

    def has_evicted(self, index: int, key: int) -> bool:
        """Return whether one of a connector's media has evicted a sample and not stored it again."""
        return any(key in gone for (of, _), gone in self._gone.items() if of == index)
