"""The block copy operation for connectors with a host buffer: kvobs's or vLLM's, counted and timed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeAlias

from kvobs.blocks.copy import Caches, copy_kv_blocks
from kvobs.faults import contained
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals

CopyBlocks: TypeAlias = Callable[..., None]
"""vLLM's signature: source caches, destination caches, source block ids, destination block ids, direction."""

_BYTES = signals.slots(signals.BLOCK_COPY_BYTES)


@dataclass(frozen=True)
class BlockCopies:
    """Make the operation for each connector."""

    recorder: Recorder
    blocks: int  # of the KV cache, to find the dimension of a cache that counts them
    is_stock: bool = False  # whether connectors get vLLM's own operation wherever their caches are

    def operation(self, index: int, vllms: CopyBlocks) -> CopyBlocks:
        """Return the operation for this connector; ``vllms`` is vLLM's own."""

        def copy_blocks(
            src_kv_caches: Caches,
            dst_kv_caches: Caches,
            src_block_ids: Sequence[int],
            dst_block_ids: Sequence[int],
            direction: str,
        ) -> None:
            begin = perf_counter_ns()
            if _in_host_memory(src_kv_caches, dst_kv_caches) and not self.is_stock:
                dims = block_dims(src_kv_caches, dst_kv_caches, self.blocks)
                copy_kv_blocks(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction, block_dim=dims)
            else:
                vllms(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction)
            if len(src_block_ids) == len(dst_block_ids):  # otherwise vLLM's operation silently does nothing
                spent = perf_counter_ns() - begin
                self._note(index, direction, spent, (src_kv_caches, dst_kv_caches), len(src_block_ids))

        return copy_blocks

    @contained("record")
    def _note(self, index: int, direction: str, spent: int, caches: tuple[Caches, Caches], ids: int) -> None:
        if not ids:
            return
        dims = block_dims(*caches, self.blocks)
        block = sum(cache.nbytes // cache.shape[dims[layer]] for layer, cache in caches[0].items())
        self.recorder.count(index, _BYTES[direction], ids * block)
        self.recorder.observe(index, signals.BLOCK_COPY_DURATION, spent, direction)


def block_dims(src: Caches, dst: Caches, blocks: int) -> Mapping[str, int]:
    """Return the dimension of each layer that counts blocks: 1 if keys and values come first, [2, blocks, ...].

    Either side may be the KV cache: it has ``blocks`` blocks, or a multiple if its kernel uses smaller ones.
    """

    def is_second(cache: Any, other: Any) -> bool:
        sides = [tuple(side.shape) for side in (cache, other) if side is not None]
        of_pairs = all(len(shape) > 1 and shape[0] == 2 for shape in sides)  # noqa: PLR2004 - K and V
        return of_pairs and any(shape[1] % blocks == 0 for shape in sides)

    if blocks <= 2:  # noqa: PLR2004 - with so few, [2, blocks, ...] and [blocks, ...] look alike
        return dict.fromkeys(src, 0)
    return {layer: int(is_second(cache, dst.get(layer))) for layer, cache in src.items()}


def _in_host_memory(*sides: Caches) -> bool:
    return all(cache.device.type == "cpu" for caches in sides for cache in list(caches.values())[:1])
