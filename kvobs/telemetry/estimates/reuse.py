"""Record how far back each prompt was used last: the hit share of a cache of any size, next to what connectors gave."""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import REUSE_DISTANCE
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.transfers import LookupResult
from kvobs.telemetry.estimates.evictions import Evictions
from kvobs.telemetry.estimates.misses import Misses
from kvobs.telemetry.estimates.reuse_distances import ReuseDistances
from kvobs.telemetry.events import TelemetryObserver

if TYPE_CHECKING:
    from kvobs.state.cache_layout import CacheLayout

_FIRST, _TAIL, _CACHE = map(signals.slot, (REUSE_DISTANCE, signals.PROMPT_TAIL_TOKENS, signals.LOCAL_CACHE_TOKENS))
_LOADABLE = signals.slot(signals.LOADABLE_TOKENS)


def hash_block_size(kv_cache_config: Any, layout: CacheLayout) -> int:
    """Return the number of tokens for which vLLM computes a hash; 0 without KV cache groups."""
    stated = getattr(kv_cache_config, "hash_block_size", None)  # since vLLM 0.32
    return stated or gcd(*layout.block_sizes)


def cache_tokens(vllm_config: Any, kv_cache_config: Any, layout: CacheLayout) -> int:
    """Return how many tokens vLLM's own cache has room for."""
    stated = getattr(vllm_config.cache_config, "kv_cache_size_tokens", None)  # since vLLM 0.32
    sizes = layout.block_sizes  # groups share the blocks
    return stated or (kv_cache_config.num_blocks * min(sizes) // len(sizes) if sizes else 0)


class PromptReuse(Observer):
    """Looks up each prompt's block hashes among the hashes of earlier prompts and answers; salts are part of a hash.

    ``listener`` receives ``reused``. ``chunks`` and ``elsewhere`` are as in ``Misses``.
    """

    def __init__(
        self,
        recorder: Recorder,
        listener: TelemetryObserver,
        block_size: int,
        local_cache_tokens: int,
        *,
        chunks: Mapping[int, int] | None = None,
        elsewhere: Container[int] = (),
    ) -> None:
        self._recorder = recorder
        self._listener = listener
        recorder.set_gauge(None, _CACHE, local_cache_tokens)
        self._block_size = block_size
        self._distances = ReuseDistances([bound // max(1, block_size) for bound in REUSE_DISTANCE.bounds])
        self.evictions = Evictions(recorder, self._distances, max(1, block_size))
        """Receives what connectors store and evict."""
        depths = self._distances.sampled
        self._misses = Misses(
            recorder, self.evictions, depths, max(1, block_size), chunks=chunks or {}, elsewhere=elsewhere
        )
        self._live: dict[str, int] = {}  # request -> blocks of its prompt that were looked up

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Record a prompt at its first allocation; of one that reads no cache only that it was used, at its end."""
        if request.request_id in self._live or not self._block_size:
            return
        if not lookup.is_read:
            self._live[request.request_id] = 0
            return
        # vLLM computes at least the last token.
        blocks = min((request.num_prompt_tokens - 1) // self._block_size, len(request.block_hashes))
        self._live[request.request_id] = blocks
        self._recorder.count(None, _TAIL, request.num_prompt_tokens - blocks * self._block_size)
        reuse = self._distances.observe(request.block_hashes, blocks)
        for bucket, number in enumerate(reuse.blocks):
            if number:
                self._recorder.count(None, _FIRST + bucket, number * self._block_size)
        self._misses.count(lookup, request.num_prompt_tokens, blocks, reuse)
        self.evictions.asked(reuse.keys, lookup.local)
        seen = reuse.seen * self._block_size
        if (loadable := seen - lookup.local) > 0:
            self._recorder.count(None, _LOADABLE, loadable)
        self._listener.reused(request.request_id, seen)

    def request_ended(self, request: ObservedRequest) -> None:
        """Note the use of an answer's blocks: the next turn of a chat has them in its prompt."""
        if (blocks := self._live.pop(request.request_id, None)) is not None:
            # The last token that was generated is not computed.
            ends = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
            self._distances.use(request.block_hashes, blocks, ends)
