"""Count the tokens that connectors were asked for and did not offer, by the reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import LookupResult
from kvobs.telemetry.estimates.evictions import Evictions
from kvobs.telemetry.estimates.reuse_distances import Reuse

_MISSED = signals.slots(signals.MISSED_TOKENS)


class Misses:
    """Divides each prompt into what a connector offered and the reasons why the rest was not.

    ``depths`` are of the samples, in blocks. ``chunks`` are the tokens of what each connector stores at once.
    ``elsewhere`` are connectors whose tokens come from another engine, which this one has not seen.
    """

    def __init__(
        self,
        recorder: Recorder,
        evictions: Evictions,
        depths: Sequence[int],
        block_size: int,
        *,
        chunks: Mapping[int, int],
        elsewhere: Container[int],
    ) -> None:
        self._recorder, self._evictions, self._depths = recorder, evictions, depths
        self._block_size, self._chunks, self._elsewhere = block_size, chunks, elsewhere

    def count(self, lookup: LookupResult, tokens: int, blocks: int, reuse: Reuse) -> None:
        """Count what each connector that has answered did not offer of a prompt, which has these full blocks."""
        size, add, best = self._block_size, self._recorder.count, 0
        for _, offered, _ in lookup.offers:
            best = max(best, offered)
        for index, offered, _ in lookup.offers:
            end = lookup.local + offered
            full = max(end, blocks * size)
            if full < tokens:
                add(index, _MISSED["no_full_block"], tokens - full)
            if index in self._elsewhere:
                if full > end:
                    add(index, _MISSED["unknown"], full - end)
                continue
            seen = self._count_seen(index, end, min(full, lookup.local + best), reuse)
            if full > seen:
                add(index, _MISSED["beyond_prefix" if seen or reuse.seen else "never_seen"], full - seen)

    def _count_seen(self, index: int, end: int, others_end: int, reuse: Reuse) -> int:
        """Count what a connector did not offer beyond ``end`` of what was seen before; return where that ends."""
        size, seen, sampled = self._block_size, max(end, others_end), -1
        if reuse.seen * size > end:
            # The seen part ends with a sample's run: it counts only if a sample beyond the offer was seen.
            first = bisect_left(self._depths, -(-end // size))
            if first < len(reuse.keys) and self._depths[first] < reuse.seen:
                sampled, seen = first, max(seen, reuse.seen * size)
        if seen == end:
            return end
        if others_end > end:
            self._recorder.count(index, _MISSED["other_connector"], others_end - end)
            end = others_end
        chunk = self._chunks.get(index, size)
        whole = max(end, seen // chunk * chunk)
        if whole > end:
            is_evicted = sampled >= 0 and self._evictions.has_evicted(index, reuse.keys[sampled])
            self._recorder.count(index, _MISSED["evicted" if is_evicted else "not_stored"], whole - end)
        if seen > whole:
            self._recorder.count(index, _MISSED["no_full_block"], seen - whole)
        return seen
