"""Layers with KV caches of the shapes that vLLM's attention backends have."""

from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvobs.telemetry.verify.fingerprints import Layers

AUTO = repeat("auto")
BLOCKS = 70
SHAPES = {
    "K and V first": (2, BLOCKS, 16, 2, 8),
    "blocks first": (BLOCKS, 2, 16, 2, 8),
    "MLA": (BLOCKS, 16, 36),
    "smaller blocks of the kernel": (2, 4 * BLOCKS, 4, 2, 8),
    "pages that are no whole words": (BLOCKS, 3),
}


def spec(cls: Any = FullAttentionSpec) -> Any:
    if cls is MambaSpec:
        return MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    return cls(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def names(count: int, first: int = 0) -> list[str]:
    return [f"model.layers.{i}.attn" for i in range(first, first + count)]


def layers_of(
    *caches: Any, hidden: int = 99, of: Any = FullAttentionSpec, blocks: int = BLOCKS, formats: Iterable[str] = AUTO
) -> Layers:
    """Return layers with these caches; without a format a layer names none, as an indexer."""
    modules = {
        name: SimpleNamespace(kv_cache=cache, **({"kv_cache_dtype": its_format} if its_format else {}))
        for name, cache, its_format in zip(names(len(caches)), caches, formats, strict=False)
    }
    group = SimpleNamespace(layer_names=list(modules), kv_cache_spec=spec(of))
    return Layers([group], modules, blocks, hidden)


def random_cache(shape: Any = SHAPES["blocks first"], seed: int = 0, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
