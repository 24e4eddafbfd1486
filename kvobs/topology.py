"""Who reads whose KV cache where prefill and decode engines have different tensor parallel (TP) sizes: pure arithmetic.

TP rank ``r`` of ``n`` holds the KV heads from ``r * heads // n`` on: consecutive ranks hold consecutive heads, and with
more ranks than heads, consecutive ranks hold copies of one head. "Local" is the engine that reads (decode), "remote"
the one that is read from (prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# What backends of vLLM 0.30 and newer no longer say, as they have no choice: blocks, heads, tokens, K beside V.
_SHAPE, _MLA_SHAPE = (1, 1, 16, 2), (1, 16, 1)


@dataclass(frozen=True)
class TpKVTopology:
    """Tell what one rank of the local engine reads from other engines.

    Fields and methods are those of the last vLLM class of that name; its older versions had a single backend, which
    will do too. vLLM has ``TransferTopology`` since (its pull request 39529): ``get_target_remote_ranks`` is called
    ``handshake_target_ranks`` there, and with ``_from_engine_id`` ``target_remote_ranks``. Whatever does not fit is a
    ``ValueError`` here.

    ``remote_tp_size`` and ``remote_block_size`` have the local engine in them, too. They may grow while handshakes
    come in, so engines are checked when they are asked for.
    """

    tp_rank: int
    remote_tp_size: Mapping[str, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backends: Any  # those of vLLM; none are needed where vLLM is not at hand
    engine_id: str
    remote_block_size: Mapping[str, int]
    tensor_shape: Sequence[int] | None = None
    is_mamba: bool = False

    def __post_init__(self) -> None:
        """Check what is known by now."""
        _check_whole("total_num_kv_heads", self.total_num_kv_heads)
        _check_whole(f"block size of engine {self.engine_id}", self.block_size)
        heads_of(self.tp_rank, self.tp_size, self._heads)
        dims, known = len(self.tensor_shape or ()), len(self._shape)
        # A hybrid model's tensors are shared by attention and state: their shape is not the attention backend's.
        if self.tensor_shape is not None and not self.is_mamba and dims not in (known, known + 1):
            raise ValueError(
                f"tensor_shape has {dims} dimensions and the attention backend's KV cache {known}: "
                f"allowed are {known}, and {known + 1} where one tensor holds all layers"
            )

    @property
    def _heads(self) -> int:
        """Return how many heads can be split: MLA has one latent for all, of which each rank has a copy."""
        return 1 if self.is_mla else self.total_num_kv_heads

    @property
    def _shape(self) -> tuple[int, ...]:
        """Return the shape of one layer's cache, of one block, as the first attention backend has it."""
        backends = self.attn_backends if isinstance(self.attn_backends, Sequence) else [self.attn_backends]
        first: Any = backends[0] if backends else None
        if not hasattr(first, "get_kv_cache_shape"):
            return _MLA_SHAPE if self.is_mla else _SHAPE
        return tuple(first.get_kv_cache_shape(num_blocks=1, block_size=16, num_kv_heads=1, head_size=1))

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Tell whether blocks come before K and V, so that both of a block lie in one region."""
        # Hybrid models have their attention's blocks first, whatever the backend says. MLA has no K and V to order.
        return self.is_mamba or (not self.is_mla and self._shape[0] == 1)

    @property
    def split_k_and_v(self) -> bool:
        """Tell whether K and V are registered as regions of their own."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def cross_layers_blocks(self) -> bool:
        """Tell whether one tensor holds the blocks of all layers."""
        return self.tensor_shape is not None and len(self.tensor_shape) == len(self._shape) + 1

    @property
    def tp_size(self) -> int:
        """Return how many ranks the local engine has."""
        return _known(self.remote_tp_size, self.engine_id, "TP size")

    @property
    def block_size(self) -> int:
        """Return how many tokens a local block has."""
        return _known(self.remote_block_size, self.engine_id, "block size")

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return how many local ranks share a remote one, or, below zero, how many remote ranks a local one reads."""
        heads_of(0, remote_tp_size, self._heads)
        large, small = max(self.tp_size, remote_tp_size), min(self.tp_size, remote_tp_size)
        if large % small:
            raise ValueError(
                f"TP size {self.tp_size} of engine {self.engine_id} and {remote_tp_size} of the remote engine: "
                "allowed is that one is a multiple of the other"
            )
        return large // small if self.tp_size == large else -(large // small)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many remote blocks fill a local one."""
        _check_whole("remote block size", remote_block_size)
        if self.block_size % remote_block_size:
            raise ValueError(
                f"block size {self.block_size} of engine {self.engine_id} and {remote_block_size} of the remote "
                "engine: allowed is that the first is a multiple of the second"
            )
        return self.block_size // remote_block_size

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``tp_ratio`` of an engine that is known."""
        return self.tp_ratio(_known(self.remote_tp_size, remote_engine_id, "TP size"))

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``block_size_ratio`` of an engine that is known."""
        return self.block_size_ratio(_known(self.remote_block_size, remote_engine_id, "block size"))

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Tell whether an engine has more ranks than the model has KV heads, so that ranks hold copies.

        As many ranks as heads make no copy: each rank has a head of its own. vLLM had that wrong until its pull
        request 38179.
        """
        tp_size = _known(self.remote_tp_size, engine_id, "TP size")
        heads_of(0, tp_size, self._heads)
        return tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Tell whether an engine's ranks hold copies, which those of MLA always do."""
        return self.is_kv_replicated(remote_engine_id) or self.is_mla

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """Return the remote ranks that have something for this rank, copies of the same too (see ``who_reads``)."""
        ratio = self.tp_ratio(remote_tp_size)
        return [self.tp_rank // ratio] if ratio > 0 else [self.tp_rank * -ratio + i for i in range(-ratio)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """Return ``get_target_remote_ranks`` of an engine that is known."""
        return self.get_target_remote_ranks(_known(self.remote_tp_size, remote_engine_id, "TP size"))


class Engine(NamedTuple):
    """What of an engine decides who reads from whom; a block's size is in tokens."""

    tp_size: int
    block_size: int


class Read(NamedTuple):
    """What a decode rank reads for each of its blocks: from these prefill ranks, these KV heads, so many blocks.

    ``heads`` has a range for each of ``sources``. MLA's latent, which has no heads, counts as head 0.
    """

    rank: int
    sources: tuple[int, ...]
    heads: tuple[range, ...]
    blocks: int


def who_reads(prefill: Engine, decode: Engine, kv_heads: int, *, is_mla: bool = False) -> list[Read]:
    """Return what each decode rank reads: every KV head that it needs, once, from the first rank that has it.

    This is arithmetic: what a connector refuses besides is not in it. Where prefill has more ranks than decode, NIXL
    refuses prefill ranks that hold copies, except of MLA and hybrid models, and block sizes that differ where a decode
    rank reads from several.
    """
    tp_sizes = {"prefill": prefill.tp_size, "decode": decode.tp_size}
    block_sizes = {"prefill": prefill.block_size, "decode": decode.block_size}
    _check_whole("TP size of engine decode", decode.tp_size)
    reads = []
    for rank in range(decode.tp_size):
        topology = TpKVTopology(rank, tp_sizes, is_mla, kv_heads, (), "decode", block_sizes)
        total = 1 if is_mla else kv_heads
        needed = heads_of(rank, decode.tp_size, total)
        found: dict[int, range] = {}
        for source in topology.get_target_remote_ranks_from_engine_id("prefill"):
            held = heads_of(source, prefill.tp_size, total)
            fresh = range(max(needed.start, held.start), min(needed.stop, held.stop))
            if fresh:  # else a copy of what the rank before it has
                found[source] = fresh
                needed = range(fresh.stop, needed.stop)
        blocks = topology.block_size_ratio_from_engine_id("prefill")
        reads.append(Read(rank, tuple(found), tuple(found.values()), blocks))
    return reads


def heads_of(tp_rank: int, tp_size: int, kv_heads: int) -> range:
    """Return the KV heads that a rank holds."""
    _check_whole("TP size", tp_size)
    _check_whole("number of KV heads", kv_heads)
    if type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise ValueError(f"TP rank {tp_rank!r} with TP size {tp_size}: allowed are ranks from 0 to {tp_size - 1}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ValueError(f"TP size {tp_size} with {kv_heads} KV heads: allowed is that one is a multiple of the other")
    first = tp_rank * kv_heads // tp_size
    return range(first, first + max(1, kv_heads // tp_size))


def _check_whole(what: str, number: object) -> None:
    """Raise unless it is a number that can be divided by."""
    if type(number) is not int or number < 1:
        raise ValueError(f"{what} is {number!r}: allowed are whole numbers from 1 on")


def _known(values: Mapping[str, int], engine_id: str, what: str) -> int:
    """Return an engine's value, or say which engines there are."""
    if engine_id not in values:
        raise ValueError(f"no {what} of engine {engine_id} is known: allowed are {', '.join(values) or 'none yet'}")
    return values[engine_id]
