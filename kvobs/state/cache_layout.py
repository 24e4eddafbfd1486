"""Compute which KV cache blocks hold which tokens, and how many bytes a token takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Blocks = tuple[tuple[int, ...], ...]  # per KV cache group, block ids


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of the KV cache: ``block_sizes`` in tokens per block of each group, ``bytes_per_token`` over all ranks."""

    block_sizes: tuple[int, ...]
    bytes_per_token: float = 0

    @classmethod
    def of(cls, groups: Iterable[Any], ranks: int, context_parallel: int = 1) -> CacheLayout:
        """Compute the sizes from one rank's ``KVCacheGroupSpec``s; each rank has a part of the layers or heads.

        With decode context parallelism a block id stands for a block on each of ``context_parallel`` ranks, which share
        its tokens; a group may be exempt.
        """
        sizes, total = [], 0.0
        for group in groups:
            spec = group.kv_cache_spec
            # The spec of layers that differ (UniformTypeKVCacheSpecs) has their sum as its page already.
            layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
            is_sharded = getattr(spec, "dcp_sharded", True)  # since vLLM 0.31 a group may be exempt
            size = spec.block_size * (context_parallel if is_sharded else 1)
            total += spec.page_size_bytes * layers / size
            sizes.append(size)
        return cls(tuple(sizes), total * ranks)

    def loaded(self, block_ids: Sequence[Sequence[int]], local: int, external: int) -> Blocks:
        """Return, per KV cache group, the ids of the blocks that hold tokens ``local`` to ``local + external``.

        Id 0 is vLLM's null block, which many requests share: it is left out.
        """
        loaded = []
        for group, ids in enumerate(block_ids):
            size = self.block_sizes[group] if group < len(self.block_sizes) else 0
            part = ids[local // size : -(-(local + external) // size)] if size else ids
            loaded.append(tuple(filter(None, part)))
        return tuple(loaded)

    def lost(self, blocks: Blocks, bad: Collection[int], local: int, external: int) -> int:
        """Return how many of a load's ``external`` tokens are lost when the blocks ``bad`` have failed.

        ``blocks`` are those of ``loaded``. vLLM keeps the tokens before the first bad block; of a sliding window the
        blocks before it are null blocks, which ``loaded`` leaves out.
        """
        end = kept = local + external
        for size, ids in zip(self.block_sizes, blocks, strict=False):
            first = next((i for i, block in enumerate(ids) if block in bad), None)
            if first is not None:
                kept = min(kept, (-(-end // size) - len(ids) + first) * size)
        return end - max(kept, local)
