"""A worker's KV cache as real tensors, and what each slot of it must hold.

The KV of a token stands for its whole prefix: its value is a hash of all tokens up to it. So a block that was stored
under the wrong tokens, loaded into the wrong place, or overwritten while somebody still reads it, is seen to be wrong.
What is computed on top of a wrong prefix is wrong, too, as in a model.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

BLOCK = 16
HEADS = 2
WIDTH = 16  # K and V of head size 8
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
PAGE_BYTES = HEADS * BLOCK * WIDTH * 4
PRIME = 8_388_593  # below 2**23: exact in a float32, with room for a half that marks what is wrong
WRONG = 0.5


def cache_config(blocks: int) -> KVCacheConfig:
    """Return the configuration of one KV cache group, its layers one after the other in one allocation."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH // 2, dtype=torch.float32)
    assert spec.page_size_bytes == PAGE_BYTES
    tensor = KVCacheTensor(
        size=blocks * PAGE_BYTES * len(LAYERS),
        layers=list(LAYERS),
        layer_stride=blocks * PAGE_BYTES,
        block_stride=PAGE_BYTES,
    )
    groups = [KVCacheGroupSpec(list(LAYERS), spec)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def chain(tokens: Iterable[int], start: int = 1) -> list[int]:
    """Return the value of each token's KV."""
    values, value = [], start
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % PRIME
        values.append(value)
    return values


class Truth:
    """What blocks must hold, by vLLM's block hash: connectors name blocks by it."""

    def __init__(self) -> None:
        self.by_hash: dict[bytes, list[int]] = {}

    def learn(self, request: Any) -> None:
        """Take in the full blocks of a request."""
        hashes = [bytes(block_hash) for block_hash in request.block_hashes]
        if hashes and hashes[-1] not in self.by_hash:
            values = chain(request.all_token_ids)
            for index, block_hash in enumerate(hashes):
                self.by_hash[block_hash] = values[index * BLOCK : (index + 1) * BLOCK]


class Memory:
    """One worker's KV cache."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.raw = torch.zeros(blocks * PAGE_BYTES * len(LAYERS) // 4, dtype=torch.float32)
        shaped = self.raw.view(len(LAYERS), blocks, HEADS, BLOCK, WIDTH)
        self.kv_caches = {layer: shaped[index] for index, layer in enumerate(LAYERS)}
        self.layers = {layer: SimpleNamespace(kv_cache=cache) for layer, cache in self.kv_caches.items()}
        self.array: Any = shaped.numpy()  # the same bytes

    def forward(self, block_ids: Sequence[int], tokens: Sequence[int], computed: int) -> int | None:
        """Compute the KV of ``tokens[computed:]``; return the first position before them that is wrong, if any."""
        values = np.array(chain(tokens), dtype=np.float32)
        positions = np.arange(len(tokens))
        blocks, slots = np.array(block_ids)[positions // BLOCK], positions % BLOCK
        bad = None
        if computed:
            bad = self.first_wrong(blocks[:computed], slots[:computed], values[:computed])
        new = values[computed:] + (0 if bad is None else WRONG)
        for layer in range(len(LAYERS)):
            self.array[layer, blocks[computed:], :, slots[computed:], :] = (new + layer)[:, None, None]
        return bad

    def first_wrong(self, blocks: Any, slots: Any, values: Any) -> int | None:
        """Return the first place whose KV is not what it must be."""
        for layer in range(len(LAYERS)):
            held = self.array[layer, blocks, :, slots, :]
            is_right = (held == (values + layer)[:, None, None]).all(axis=(1, 2))
            if not is_right.all():
                return int(np.argmin(is_right))
        return None

    def is_right(self, block: int, values: Sequence[int]) -> bool:
        slots = np.arange(len(values))
        return self.first_wrong(np.full(len(values), block), slots, np.array(values, dtype=np.float32)) is None

    def page(self, block: int) -> Any:
        return self.array[:, block].copy()

    def put(self, block: int, page: Any, first_slot: int = 0) -> None:
        self.array[:, block, :, first_slot:] = page[:, :, first_slot:]


def page_is_right(page: Any, values: Sequence[int]) -> bool:
    """Return whether a copied block holds the KV of these tokens."""
    expected = np.array(values, dtype=np.float32)
    return all(bool((page[layer] == (expected + layer)[None, :, None]).all()) for layer in range(len(LAYERS)))
