"""Read blocks of the KV cache and compute fingerprints of them, on the device and in the order of its stream."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, UniformTypeKVCacheSpecs

from kvobs.telemetry.verify.noted import PACKED, Fingerprint
from kvobs.telemetry.verify.sample import Block

LAYERS_OF_A_BLOCK = 4  # that are read, unless every block is
VALUES = 128  # of a block that are kept
AT_A_TIME = 64  # blocks: bounds the memory that reading takes
_WITH_TOKENS = (AttentionSpec, UniformTypeKVCacheSpecs)
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_MIX = 0x9E3779B97F4A7C15 - 2**64  # odd, as a signed number


class Taken(NamedTuple):
    """Fingerprints that the device computes: ``is_ready`` is true if ``read`` need not wait."""

    is_ready: Callable[[], bool]
    read: Callable[[], list[Fingerprint]]


class Layers:
    """The layers of an engine's KV cache whose blocks can be verified, per KV cache group, on one rank.

    ``layers`` are vLLM's modules by name, whose ``kv_cache`` has ``blocks`` blocks. Groups with a state, such as
    Mamba's, have none; neither have the layers of a draft model, which are written after the connectors were called.
    """

    def __init__(self, groups: Sequence[Any], layers: Mapping[str, Any], blocks: int, hidden_layers: int) -> None:
        self._names = [
            [name for name in group.layer_names if name in layers and _number(name) < hidden_layers]
            if isinstance(group.kv_cache_spec, _WITH_TOKENS) and not isinstance(group.kv_cache_spec, CrossAttentionSpec)
            else []
            for group in groups
        ]
        self._layers = layers
        self._blocks = blocks

    def count(self, group: int) -> int:
        """Return the number of layers of a group; 0 if its blocks can't be verified."""
        return len(self._names[group]) if group < len(self._names) else 0

    def pages(self, group: int, layer: int) -> torch.Tensor:
        """Return a layer's cache with the blocks as its first dimension.

        Raises:
            ValueError: its shape has no dimension for the blocks.
        """
        cache = self._layers[self._names[group][layer]].kv_cache
        cache = cache if isinstance(cache, torch.Tensor) else cache[0]  # one for each virtual engine
        for dim, size in enumerate(cache.shape):
            if size >= self._blocks and size % self._blocks == 0:  # a kernel's blocks may be smaller
                return cache.movedim(dim, 0).unflatten(0, (self._blocks, size // self._blocks))
        raise ValueError(f"no dimension of {tuple(cache.shape)} has the KV cache's {self._blocks} blocks")

    def stored(self, group: int, layer: int, raw: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a layer's pages; of a packed cache, such as fp8_ds_mla or nvfp4, its bytes.

        A layer's format may differ from the engine's: sparse MLA packs where fp8 was asked for, and the cache of an
        indexer has scales inside, and names no format.
        """
        format_ = getattr(self._layers[self._names[group][layer]], "kv_cache_dtype", "")
        return raw.view(_FP8[format_]) if raw.dtype is torch.uint8 and format_ in _FP8 else raw


class Fingerprints:
    """Computes fingerprints of blocks in a few layers that the key chooses, or in all.

    ``parallel`` describes how an engine's ranks share the cache.
    """

    def __init__(self, layers: Layers, *, reads_all: bool, parallel: object = 1) -> None:
        self._cache = layers
        self._parallel = parallel
        self._forms: dict[int, int] = {}
        self._at_most = 10**6 if reads_all else LAYERS_OF_A_BLOCK

    def can_read(self, block: Block) -> bool:
        """Return whether this rank has layers of the block's group."""
        return self._cache.count(block.group) > 0

    def form(self, group: int) -> int:
        """Return a number that is equal on the ranks of other engines whose fingerprints can be compared."""
        if group not in self._forms:
            count = self._cache.count(group)
            page = self._cache.pages(group, 0)
            form = self._parallel, count, self._stride(count), page.dtype, page.shape[1:]
            self._forms[group] = crc32(repr(form).encode())
        return self._forms[group]

    def take(self, blocks: Sequence[Block]) -> Taken:
        """Queue the reading of blocks behind all that the device has queued; ``blocks`` can be read."""
        rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, block in enumerate(blocks):
            for layer in self._chosen(block):
                rows_of[block.group, layer].append(row)
        parts = [(*at, part) for at, rows in sorted(rows_of.items()) for part in batched(rows)]
        device = self._cache.pages(*parts[0][:2]).device
        is_queue = device.type == "cuda"
        rows = list(chain.from_iterable(part[2] for part in parts))
        index = torch.tensor([rows, [blocks[row].id for row in rows]], pin_memory=is_queue).to(
            device, non_blocking=True
        )
        digests = torch.zeros(len(blocks), dtype=torch.int64, device=device)
        values = torch.zeros((len(blocks), VALUES), device=device)
        largest = torch.zeros(len(blocks), device=device)
        done = 0
        for group, layer, its_rows in parts:
            row, ids = index[:, done : done + len(its_rows)]
            done += len(its_rows)
            raw = self._cache.pages(group, layer)[ids].flatten(1)
            digests[row] = digests[row] * _MIX + _digest(raw)
            stored = self._cache.stored(group, layer, raw)
            numbers = stored.float()
            has_numbers = stored.is_floating_point()
            largest[row] = torch.maximum(largest[row], numbers.abs().amax(1)) if has_numbers else PACKED
            slots, slot = self._slots(group, layer)
            if slot < VALUES:
                positions = _spread(self._cache.pages(group, layer).shape[1:], min(slots, VALUES), device)[slot]
                values[row, slot * len(positions) : (slot + 1) * len(positions)] = numbers[:, positions]
        results = digests, values, largest
        return _queued(*results) if is_queue else Taken(lambda: True, lambda: _read(*results))

    def _chosen(self, block: Block) -> Iterator[int]:
        count = self._cache.count(block.group)
        stride = self._stride(count)
        return iter(range(block.key[-1] % stride, count, stride))

    def _stride(self, layers: int) -> int:
        return -(-layers // self._at_most)

    def _slots(self, group: int, layer: int) -> tuple[int, int]:
        """Return how many layers share the values of a block, and the place of this one among them."""
        count = self._cache.count(group)
        stride = self._stride(count)
        return -(-count // stride), layer // stride


def batched(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Return the rows in parts that are read at a time."""
    return (rows[i : i + AT_A_TIME] for i in range(0, len(rows), AT_A_TIME))


def _number(layer: str) -> int:
    """Return the number in a layer's name, by which vLLM counts on from the model to its draft model."""
    found = re.search(r"\.(\d+)(\.|$)", layer)
    return int(found[1]) if found is not None else 0


def _digest(raw: torch.Tensor) -> torch.Tensor:
    """Return a number of each row that depends on all bytes and their order."""
    data = raw.contiguous().view(torch.uint8)
    if rest := -data.shape[1] % 8:
        data = torch.nn.functional.pad(data, (0, rest))
    words = data.view(torch.int64)
    return (words * _weights(words.shape[1], raw.device)).sum(1)


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers: another word in one place always changes the sum."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1).to(device)


@lru_cache(maxsize=32)
def _spread(shape: Sequence[int], layers: int, device: torch.device) -> torch.Tensor:
    """Return the positions in a page, by layer, of the numbers that are kept: spread along each dimension.

    Whichever dimension has the tokens, and whichever K and V: each token, head and column has its part, if it has no
    more than there are numbers, and each layer takes others.
    """
    generator, count = torch.Generator().manual_seed(0), VALUES // layers
    positions = torch.zeros((layers, count), dtype=torch.int64)
    for size in shape:
        parts = torch.rand((layers, count), generator=generator).argsort(1) * layers
        parts += torch.randperm(layers, generator=generator)[:, None]
        positions = positions * size + parts * size // (layers * count)
    return positions.to(device)


def _queued(*results: torch.Tensor) -> Taken:
    """Return results that a CUDA device copies to the host when it has computed them."""
    copies = [result.to("cpu", non_blocking=True) for result in results]
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[Fingerprint]:
        done.synchronize()
        return _read(*copies)

    return Taken(done.query, read)


def _read(digests: torch.Tensor, values: torch.Tensor, largest: torch.Tensor) -> list[Fingerprint]:
    rows = zip(digests.tolist(), values.numpy(), largest.tolist(), strict=True)
    return [Fingerprint(digest, row.copy(), top) for digest, row, top in rows]
