"""Compute which rank reads which rank's KV cache if prefill and decode engines differ in tensor parallel (TP) size.

TP rank ``r`` of ``n`` holds the KV heads from ``r * heads // n`` on: consecutive ranks hold consecutive heads, and with
more ranks than heads, consecutive ranks hold copies of one head. "Local" is the reading engine (decode), "remote" the
engine it reads from (prefill).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvobs.vllm_api import versions

__all__ = ["Engine", "Read", "TpKVTopology", "heads_of", "who_reads"]

_K_AND_V = 2


@dataclass(frozen=True)
class TpKVTopology:
    """Compute what one rank of the local engine reads from other engines.

    Fields and methods match the last vLLM class of that name, which its ``TransferTopology`` replaced (pull
    request 39529); older versions had a single backend, which is accepted too. Sizes that do not fit raise a
    ``ValueError``.

    ``remote_tp_size`` and ``remote_block_size`` also contain the local engine. They may grow with each handshake, so
    engines are checked on access.
    """

    tp_rank: int
    remote_tp_size: Mapping[str, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backends: Any  # vLLM's backends; not needed without vLLM
    engine_id: str
    remote_block_size: Mapping[str, int]
    tensor_shape: Sequence[int] | None = None
    is_mamba: bool = False

    def __post_init__(self) -> None:
        """Check the known sizes."""
        _check_whole("total_num_kv_heads", self.total_num_kv_heads)
        _check_whole(f"block size of engine {self.engine_id}", self.block_size)
        heads_of(self.tp_rank, self.tp_size, self._heads, f"engine {self.engine_id}")
        dims, known = len(self.tensor_shape or ()), len(self._shape)
        # A hybrid model's tensors are shared by attention and state: their shape is not the attention backend's.
        if self.tensor_shape is not None and not self.is_mamba and dims not in (known, known + 1):
            raise ValueError(
                f"tensor_shape has {dims} dimensions and the attention backend's KV cache {known}: "
                f"it must have {known}, or {known + 1} where one tensor holds all layers"
            )

    @property
    def _heads(self) -> int:
        """Return how many heads can be split: MLA has one latent for all, and each rank has a copy."""
        return 1 if self.is_mla else self.total_num_kv_heads

    @property
    def _shape(self) -> tuple[int, ...]:
        """Return the shape of one layer's cache, of one block, as the first attention backend has it."""
        return versions.cache_shape(self.attn_backends, is_mla=self.is_mla)

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Return whether blocks come before K and V, so that both of a block lie in one region."""
        # In hybrid models attention's blocks come first, regardless of the backend. MLA has no K and V to order.
        return self.is_mamba or (not self.is_mla and self._shape[0] == 1)

    @property
    def split_k_and_v(self) -> bool:
        """Return whether K and V are registered as separate regions."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def cross_layers_blocks(self) -> bool:
        """Return whether one tensor holds the blocks of all layers."""
        return self.tensor_shape is not None and len(self.tensor_shape) == len(self._shape) + 1

    @property
    def tp_size(self) -> int:
        """Return the number of ranks of the local engine."""
        return _known(self.remote_tp_size, self.engine_id, "TP size")

    @property
    def block_size(self) -> int:
        """Return the number of tokens of a local block."""
        return _known(self.remote_block_size, self.engine_id, "block size")

    def tp_ratio(self, remote_tp_size: int, remote: str = "the remote engine") -> int:
        """Return how many local ranks share a remote rank, or, negative, how many remote ranks a local rank reads.

        ``remote`` names the other engine in errors.
        """
        heads_of(0, remote_tp_size, self._heads, remote)
        large, small = max(self.tp_size, remote_tp_size), min(self.tp_size, remote_tp_size)
        if large % small:
            raise ValueError(
                f"TP size {self.tp_size} of engine {self.engine_id} and {remote_tp_size} of {remote}: "
                "one must be a multiple of the other"
            )
        return large // small if self.tp_size == large else -(large // small)

    def block_size_ratio(self, remote_block_size: int, remote: str = "the remote engine") -> int:
        """Return how many remote blocks fill a local one; ``remote`` names the other engine in errors."""
        _check_whole(f"block size of {remote}", remote_block_size)
        if self.block_size % remote_block_size:
            raise ValueError(
                f"block size {self.block_size} of engine {self.engine_id} and {remote_block_size} of {remote}: "
                "the first must be a multiple of the second"
            )
        return self.block_size // remote_block_size

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``tp_ratio`` of an engine that is known."""
        return self.tp_ratio(_known(self.remote_tp_size, remote_engine_id, "TP size"), f"engine {remote_engine_id}")

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``block_size_ratio`` of an engine that is known."""
        size = _known(self.remote_block_size, remote_engine_id, "block size")
        return self.block_size_ratio(size, f"engine {remote_engine_id}")

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Return whether an engine has more ranks than the model has KV heads, so that ranks hold copies.

        With as many ranks as heads there are no copies: each rank has its own head. vLLM had this wrong until its pull
        request 38179.
        """
        tp_size = _known(self.remote_tp_size, engine_id, "TP size")
        heads_of(0, tp_size, self._heads, f"engine {engine_id}")
        return tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Return whether an engine's ranks hold copies; with MLA they always do."""
        return self.is_kv_replicated(remote_engine_id) or self.is_mla

    def get_target_remote_ranks(self, remote_tp_size: int, remote: str = "the remote engine") -> list[int]:
        """Return the remote ranks with data for this rank, including copies (see ``who_reads``)."""
        ratio = self.tp_ratio(remote_tp_size, remote)
        return [self.tp_rank // ratio] if ratio > 0 else [self.tp_rank * -ratio + i for i in range(-ratio)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """Return ``get_target_remote_ranks`` of an engine that is known."""
        tp_size = _known(self.remote_tp_size, remote_engine_id, "TP size")
        return self.get_target_remote_ranks(tp_size, f"engine {remote_engine_id}")

    def get_transfer_cache_regions(self, cache: Any, layer_spec: Any) -> Any:
        """Return the tensors of a layer's cache that are registered one by one, to be iterated over.

        Args:
            cache: the layer's tensor; of a state space layer the pair (convolution state, SSM state).
            layer_spec: vLLM's ``KVCacheSpec`` of the layer.
        """
        if any(kind.__name__ == "MambaSpec" for kind in type(layer_spec).__mro__):
            conv, _ = cache  # both are views of one tensor, which begins with the convolution's
            return [conv]
        if self.is_mamba and cache.shape[0] == _K_AND_V:  # next to state, attention still has its blocks first
            cache = cache.transpose(0, 1)
        return cache if self.split_k_and_v else [cache]


class Engine(NamedTuple):
    """The sizes of an engine that determine who reads from whom; ``block_size`` is in tokens."""

    tp_size: int
    block_size: int


class Read(NamedTuple):
    """The reads of a decode rank for each of its blocks: prefill ranks, KV heads, and number of blocks.

    ``heads`` has a range for each of ``sources``. MLA's latent, which has no heads, counts as head 0.
    """

    rank: int
    sources: tuple[int, ...]
    heads: tuple[range, ...]
    blocks: int


def who_reads(prefill: Engine, decode: Engine, kv_heads: int, *, is_mla: bool = False) -> list[Read]:
    """Return the reads of each decode rank: every KV head that it needs, once, from the first rank that has it.

    Further restrictions of connectors are not checked. If prefill has more ranks than decode, NIXL refuses prefill
    ranks that hold copies, except for MLA and hybrid models, and different block sizes if a decode rank reads from
    several.
    """
    tp_sizes = {"prefill": prefill.tp_size, "decode": decode.tp_size}
    block_sizes = {"prefill": prefill.block_size, "decode": decode.block_size}
    _check_whole("TP size of engine decode", decode.tp_size)
    reads = []
    for rank in range(decode.tp_size):
        topology = TpKVTopology(rank, tp_sizes, is_mla, kv_heads, (), "decode", block_sizes)
        total = 1 if is_mla else kv_heads
        needed = heads_of(rank, decode.tp_size, total)
        parts: dict[int, range] = {}
        for source in topology.get_target_remote_ranks_from_engine_id("prefill"):
            held = heads_of(source, prefill.tp_size, total)
            fresh = range(max(needed.start, held.start), min(needed.stop, held.stop))
            if fresh:  # otherwise a copy of the previous rank's heads
                parts[source] = fresh
                needed = range(fresh.stop, needed.stop)
        blocks = topology.block_size_ratio_from_engine_id("prefill")
        reads.append(Read(rank, tuple(parts), tuple(parts.values()), blocks))
    return reads


def heads_of(tp_rank: int, tp_size: int, kv_heads: int, engine: str = "the engine") -> range:
    """Return the KV heads that a rank holds; ``engine`` names its engine in errors."""
    _check_whole(f"TP size of {engine}", tp_size)
    _check_whole("number of KV heads", kv_heads)
    if type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise ValueError(f"TP rank {tp_rank!r} with TP size {tp_size}: ranks are 0 to {tp_size - 1}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ValueError(f"TP size {tp_size} of {engine} with {kv_heads} KV heads: one must be a multiple of the other")
    first = tp_rank * kv_heads // tp_size
    return range(first, first + max(1, kv_heads // tp_size))


def _check_whole(what: str, number: object) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"{what} is {number!r}, must be an integer of at least 1")


def _known(values: Mapping[str, int], engine_id: str, what: str) -> int:
    """Return an engine's value, or raise with the known engines."""
    if engine_id not in values:
        raise ValueError(f"no {what} of engine {engine_id} is known; known engines: {', '.join(values) or 'none'}")
    return values[engine_id]
