"""The KV cache's layout, as arithmetic: which blocks hold which tokens, and how many bytes a token takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Blocks = tuple[tuple[int, ...], ...]  # per KV cache group, block ids


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the KV cache groups have in common with all requests.

    ``block_sizes`` are tokens per block of each group; ``bytes_per_token`` is what a token takes over all ranks.
    """

    block_sizes: tuple[int, ...]
    bytes_per_token: float = 0

    @classmethod
    def of(cls, groups: Iterable[Any], ranks: int) -> CacheLayout:
        """Read it from vLLM's ``KVCacheGroupSpec`` of one rank; each rank has its own part of the layers or heads."""
        sizes, total = [], 0.0
        for group in groups:
            spec = group.kv_cache_spec
            # The spec of layers that differ (UniformTypeKVCacheSpecs) has their sum as its page already.
            layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
            total += spec.page_size_bytes * layers / spec.block_size
            sizes.append(spec.block_size)
        return cls(tuple(sizes), total * ranks)

    def loaded(self, block_ids: Sequence[Sequence[int]], local: int, external: int) -> Blocks:
        """Return, per KV cache group, the ids of the blocks that hold tokens ``local`` to ``local + external``.

        Id 0 is vLLM's null block, which many requests share: it is left out.
        """
        loaded = []
        for group, ids in enumerate(block_ids):
            size = self.block_sizes[group] if group < len(self.block_sizes) else 0
            part = ids[local // size : -(-(local + external) // size)] if size else ids
            loaded.append(tuple(i for i in part if i != 0))
        return tuple(loaded)

    def lost(self, blocks: Blocks, bad: Collection[int], tokens: int) -> int:
        """Return how many of a load's ``tokens`` are not there when the blocks ``bad`` have failed.

        vLLM keeps what comes before the first bad block. A load begins where a block begins, since vLLM computes
        whole blocks itself; what a partial first block holds is not subtracted.
        """
        kept = tokens
        for size, ids in zip(self.block_sizes, blocks, strict=False):
            first = next((i for i, block in enumerate(ids) if block in bad), None)
            if first is not None:
                kept = min(kept, first * size)
        return tokens - kept
