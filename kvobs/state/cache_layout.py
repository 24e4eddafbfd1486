"""Compute which KV cache blocks hold which tokens, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

Blocks = tuple[tuple[int, ...], ...]  # per KV cache group, block ids


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of the blocks of each KV cache group: in tokens, and in bytes of all its layers, over all ranks."""

    block_sizes: tuple[int, ...]
    block_bytes: tuple[int, ...] = ()
    is_full: bool = False
    """Whether all layers have full attention: the others keep few of the tokens, or a state."""

    @classmethod
    def of(cls, groups: Sequence[Any], ranks: int, context_parallel: int = 1) -> CacheLayout:
        """Compute the sizes from one rank's ``KVCacheGroupSpec``s; each rank has a part of the layers or heads.

        With decode context parallelism a block id stands for a block on each of ``context_parallel`` ranks, which share
        its tokens; a group may be exempt.
        """
        specs = [group.kv_cache_spec for group in groups]
        # Since vLLM 0.31 a group may be exempt.
        sizes = [spec.block_size * (context_parallel if getattr(spec, "dcp_sharded", True) else 1) for spec in specs]
        is_full = all(_is_full(group) for group in groups if _is_transferred(group))
        return cls(tuple(sizes), (), is_full).measured([bytes_of_blocks(groups)], ranks)

    def measured(self, by_rank: Sequence[Sequence[int]], ranks: int) -> CacheLayout:
        """Return these sizes with the bytes of ``bytes_of_blocks`` of some ranks, which stand for all ``ranks``."""
        block_bytes = [sum(of_group) * ranks // len(by_rank) for of_group in zip(*by_rank, strict=False)]
        return replace(self, block_bytes=tuple(block_bytes))

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of a token in all layers, over all ranks; 0 where it is not in all of them."""
        pairs = zip(self.block_bytes, self.block_sizes, strict=False)
        return sum(size / tokens for size, tokens in pairs) if self.is_full else 0

    def bytes_of(self, blocks: Blocks) -> int:
        """Return the bytes of the blocks of ``loaded``, over all ranks; 0 without sizes."""
        return sum(map(mul, map(len, blocks), self.block_bytes))

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

        ``blocks`` is the result of ``loaded``. vLLM keeps the tokens before the first bad block; in a sliding window
        the blocks before it are null blocks, which ``loaded`` leaves out.
        """
        end = kept = local + external
        for size, ids in zip(self.block_sizes, blocks, strict=False):
            first = next((i for i, block in enumerate(ids) if block in bad), None)
            if first is not None:
                kept = min(kept, (-(-end // size) - len(ids) + first) * size)
        return end - max(kept, local)


def layers_differ(groups: Iterable[Any]) -> bool:
    """Return whether a group's layers differ: on the scheduler's side vLLM has the spec of one of them only."""
    return any(hasattr(group.kv_cache_spec, "kv_cache_specs") for group in groups)


def bytes_of_blocks(groups: Iterable[Any]) -> tuple[int, ...]:
    """Return the bytes of a block in all layers of each group, on one rank; 0 if no connector transfers it."""
    return tuple([_page_bytes(group) if _is_transferred(group) else 0 for group in groups])


def full_group(groups: Sequence[Any]) -> int:
    """Return the first group whose layers all have full attention; without one, 0."""
    return next((number for number, group in enumerate(groups) if _is_full(group)), 0)


def _page_bytes(group: Any) -> int:
    pages = [spec.page_size_bytes for spec in _specs(group)]
    return sum(pages) if layers_differ([group]) else pages[0] * len(group.layer_names)


def _specs(group: Any) -> list[Any]:
    """Return the specs of a group's layers, if they differ (UniformTypeKVCacheSpecs), else the one of all."""
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)
    return [spec] if by_layer is None else [by_layer[name] for name in group.layer_names if name in by_layer]


def _is_transferred(group: Any) -> bool:
    return getattr(group, "enable_kv_transfer", True)  # since vLLM 0.32


def _is_full(group: Any) -> bool:
    bases = [[base.__name__ for base in type(spec).__mro__] for spec in _specs(group)]
    return all("FullAttentionSpec" in names for names in bases)
