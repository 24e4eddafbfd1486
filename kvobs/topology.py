"""Compute which rank reads which rank's KV cache if prefill and decode engines differ in tensor parallel (TP) size.

TP rank ``r`` of ``n`` holds the KV heads from ``r * heads // n`` on: consecutive ranks hold consecutive heads, and with
more ranks than heads, consecutive ranks hold copies of one head. "Local" is the reading engine (decode), "remote" the
engine it reads from (prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvobs.vllm_api import versions

__all__ = ["Engine", "Read", "TpKVTopology", "TransferTopology", "heads_of", "who_reads"]

_K_AND_V = 2


@dataclass(frozen=True)
class TpKVTopology:
    """Compute what one rank of the local engine reads from other engines.

    Fields and methods are those of the last vLLM class of that name; older versions had a single backend, which is
    accepted too. vLLM replaced it by ``TransferTopology`` (its pull request 39529), see below. Sizes that do not fit
    raise a ``ValueError``.

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
        heads_of(self.tp_rank, self.tp_size, self._heads)
        dims, known = len(self.tensor_shape or ()), len(self._shape)
        # A hybrid model's tensors are shared by attention and state: their shape is not the attention backend's.
        if self.tensor_shape is not None and not self.is_mamba and dims not in (known, known + 1):
            raise ValueError(
                f"tensor_shape has {dims} dimensions and the attention backend's KV cache {known}: "
                f"it must have {known}, or {known + 1} where one tensor holds all layers"
            )

    @property
    def _heads(self) -> int:
        """Return how many heads can be split: MLA has one latent for all, of which each rank has a copy."""
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

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return how many local ranks share a remote rank, or, negative, how many remote ranks a local rank reads."""
        heads_of(0, remote_tp_size, self._heads)
        return _tp_ratio(self.tp_size, remote_tp_size, f"of engine {self.engine_id}")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many remote blocks fill a local one."""
        return _block_size_ratio(self.block_size, remote_block_size, f"of engine {self.engine_id}")

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``tp_ratio`` of an engine that is known."""
        return self.tp_ratio(_known(self.remote_tp_size, remote_engine_id, "TP size"))

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return ``block_size_ratio`` of an engine that is known."""
        return self.block_size_ratio(_known(self.remote_block_size, remote_engine_id, "block size"))

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Return whether an engine has more ranks than the model has KV heads, so that ranks hold copies.

        With as many ranks as heads there are no copies: each rank has its own head. vLLM had this wrong until its pull
        request 38179.
        """
        tp_size = _known(self.remote_tp_size, engine_id, "TP size")
        heads_of(0, tp_size, self._heads)
        return tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Return whether an engine's ranks hold copies; with MLA they always do."""
        return self.is_kv_replicated(remote_engine_id) or self.is_mla

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """Return the remote ranks with data for this rank, including copies (see ``who_reads``)."""
        return _targets(self.tp_rank, self.tp_ratio(remote_tp_size))

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """Return ``get_target_remote_ranks`` of an engine that is known."""
        return self.get_target_remote_ranks(_known(self.remote_tp_size, remote_engine_id, "TP size"))

    def get_transfer_cache_regions(self, cache: Any, layer_spec: Any) -> Any:
        """Return the tensors of a layer's cache that are registered as regions of their own, to be iterated over.

        Args:
            cache: the layer's tensor; of a state space layer the pair (convolution state, SSM state).
            layer_spec: vLLM's ``KVCacheSpec`` of the layer.
        """
        if any(kind.__name__ == "MambaSpec" for kind in type(layer_spec).__mro__):
            conv, _ = cache  # both are views of one tensor, which begins with the convolution's
            return [conv]
        if self.is_mamba and cache.shape[0] == _K_AND_V:  # beside state, attention has its blocks first all the same
            cache = cache.transpose(0, 1)
        return cache if self.split_k_and_v else [cache]


@dataclass
class TransferTopology:
    """Compute what one rank of the local engine reads from registered engines: vLLM's class since 0.28.

    With decode context parallelism (DCP) an engine's ranks split the tokens ``dcp_size`` ways: either none or all of
    its ranks do. Sizes that do not fit raise a ``ValueError``.
    """

    tp_rank: int
    tp_size: int
    block_size: int
    engine_id: str
    is_mla: bool
    is_mamba: bool
    total_num_kv_heads: int
    attn_backends: Any
    dcp_size: int = 1
    tensor_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.local_physical_heads = max(1, self.total_num_kv_heads // self.tp_size)
        self._engines: dict[tuple[str, int], Any] = {}

    # Engines, by id and pipeline rank

    def register_remote_engine(self, remote_engine_id: str, info: Any) -> Any:
        """Register an engine (vLLM's ``EngineTransferInfo``); return its first registration."""
        if remote_engine_id == self.engine_id:
            raise ValueError(f"engine {remote_engine_id} is the local one; give the id of a remote engine")
        return self._engines.setdefault((remote_engine_id, info.remote_pp_rank), info)

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> Any:
        return self._engines[remote_engine_id, remote_pp_rank]

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        for key in [key for key in self._engines if key[0] == remote_engine_id]:
            del self._engines[key]

    # The cache's layout, which vLLM asked for until 0.30

    @property
    def cross_layers_blocks(self) -> bool:
        """Return whether one tensor holds the blocks of all layers."""
        dims = len(versions.cache_shape(None, is_mla=self.is_mla))
        return self.tensor_shape is not None and not self.is_mamba and len(self.tensor_shape) == dims + 1

    @property
    def virtually_split_kv_in_blocks(self) -> bool:
        """Return whether a block has two separately addressed parts: the states of a hybrid model."""
        return self.is_mamba and not self.cross_layers_blocks

    # Sizes

    @property
    def dcp_rank(self) -> int:
        """Return which part of the tokens this rank has."""
        return self.tp_rank % self.dcp_size

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return how many local ranks share a remote rank, or, negative, how many remote ranks a local rank reads."""
        return _tp_ratio(self.tp_size, remote_tp_size, "of the local engine")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many remote blocks fill a local one."""
        return _block_size_ratio(self.block_size, remote_block_size, "of the local engine")

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Return whether an engine has more ranks than the model has KV heads, so that ranks hold copies."""
        tp_size: int = self.get_engine_info(remote_engine_id, remote_pp_rank).remote_tp_size
        return tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Return whether an engine's ranks hold copies; with MLA they always do."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id, remote_pp_rank)

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Return whether the local ranks hold copies."""
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    # Who reads from whom

    def dcp_source_ranks(self, remote_tp_size: int, remote_dcp_size: int) -> list[int]:
        """Return the remote ranks with tokens of this rank's part, if the remote engine splits the tokens."""
        if self.dcp_size > remote_dcp_size:  # this part lies within one of theirs
            return [self.dcp_rank % remote_dcp_size]
        return list(range(self.dcp_rank, remote_tp_size, self.dcp_size))

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """Return the remote ranks with data for this rank; the engine need not be registered."""
        if remote_dcp_size > 1:
            return self.dcp_source_ranks(remote_tp_size, remote_dcp_size)
        return _targets(self.tp_rank, self.tp_ratio(remote_tp_size))

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """Return the remote ranks with data for this rank by TP sizes alone; the engine must be registered."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return _targets(self.tp_rank, self.tp_ratio(info.remote_tp_size))

    def dcp_consumer_count(self, remote_tp_size: int, remote_dcp_size: int) -> int:
        """Return how many local ranks read from a remote one."""
        if remote_dcp_size <= 1:
            return max(1, self.tp_ratio(remote_tp_size))
        return self.tp_size if self.dcp_size == 1 else max(1, self.dcp_size // remote_dcp_size)

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """Return both engines' sizes in a line, for logs."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return (
            f"TransferTopology(tp_ratio={self.tp_ratio(info.remote_tp_size)}, "
            f"num_kv_heads={1 if self.is_mla else self.total_num_kv_heads}, local_tp={self.tp_size}, "
            f"remote_tp={info.remote_tp_size}, remote_pp={remote_pp_rank}, local_dcp={self.dcp_size}, "
            f"remote_dcp={versions.remote_dcp_size(info)}, local_rank={self.tp_rank}, "
            f"remote_block_len={info.remote_block_len})"
        )


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


def heads_of(tp_rank: int, tp_size: int, kv_heads: int) -> range:
    """Return the KV heads that a rank holds."""
    _check_whole("TP size", tp_size)
    _check_whole("number of KV heads", kv_heads)
    if type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise ValueError(f"TP rank {tp_rank!r} with TP size {tp_size}: ranks are 0 to {tp_size - 1}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ValueError(f"TP size {tp_size} with {kv_heads} KV heads: one must be a multiple of the other")
    first = tp_rank * kv_heads // tp_size
    return range(first, first + max(1, kv_heads // tp_size))


def _tp_ratio(tp_size: int, remote_tp_size: int, whose: str) -> int:
    _check_whole("TP size", remote_tp_size)
    large, small = max(tp_size, remote_tp_size), min(tp_size, remote_tp_size)
    if large % small:
        raise ValueError(
            f"TP size {tp_size} {whose} and {remote_tp_size} of the remote engine: one must be a multiple of the other"
        )
    return large // small if tp_size == large else -(large // small)


def _block_size_ratio(block_size: int, remote_block_size: int, whose: str) -> int:
    _check_whole("remote block size", remote_block_size)
    if block_size % remote_block_size:
        raise ValueError(
            f"block size {block_size} {whose} and {remote_block_size} of the remote engine: "
            "the first must be a multiple of the second"
        )
    return block_size // remote_block_size


def _targets(tp_rank: int, ratio: int) -> list[int]:
    return [tp_rank // ratio] if ratio > 0 else [tp_rank * -ratio + i for i in range(-ratio)]


def _check_whole(what: str, number: object) -> None:
    """Raise unless it is a positive integer."""
    if type(number) is not int or number < 1:
        raise ValueError(f"{what} is {number!r}, must be an integer of at least 1")


def _known(values: Mapping[str, int], engine_id: str, what: str) -> int:
    """Return an engine's value, or raise with the known engines."""
    if engine_id not in values:
        raise ValueError(f"no {what} of engine {engine_id} is known; known engines: {', '.join(values) or 'none'}")
    return values[engine_id]
