"""Who reads from whom: against first principles, and against vLLM's own arithmetic."""

from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvobs.topology import Engine, TpKVTopology, heads_of, who_reads

SIZES = range(1, 17)
HEADS = (*range(1, 17), 20, 24, 32, 48, 64, 96, 128)


def fits(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


# local TP size, remote TP size, KV heads: all that engines can have; and those that can't read from one another
ALL = [(local, remote, heads) for local in SIZES for remote in SIZES for heads in HEADS]
POSSIBLE = [(d, p, k) for d, p, k in ALL if fits(d, p) and fits(d, k) and fits(p, k)]
IMPOSSIBLE = sorted(set(ALL) - set(POSSIBLE))


def topology(tp_rank: int = 0, local: int = 1, remote: int = 1, heads: int = 8, **fields: Any) -> TpKVTopology:
    sizes, blocks = {"decode": local, "prefill": remote}, {"decode": 16, "prefill": 16}
    usual: dict[str, Any] = {"is_mla": False, "attn_backends": [], "engine_id": "decode", "remote_block_size": blocks}
    return TpKVTopology(tp_rank=tp_rank, remote_tp_size=sizes, total_num_kv_heads=heads, **usual | fields)


def held(tp_size: int, heads: int) -> list[set[int]]:
    """Deal the heads out, in order and evenly; with more ranks than heads, each to as many ranks as it takes."""
    dealt = [head for head in range(heads) for _ in range(max(1, tp_size // heads))]
    each = len(dealt) // tp_size
    return [set(dealt[rank * each : rank * each + each]) for rank in range(tp_size)]


def test_each_needed_head_is_read_once_from_a_rank_that_holds_it() -> None:
    assert {(4, 2, 8), (2, 4, 8), (4, 4, 4), (8, 2, 4), (2, 8, 4), (16, 8, 4), (8, 16, 4)} <= set(POSSIBLE)
    for local, remote, heads in POSSIBLE:
        needs, has = held(local, heads), held(remote, heads)
        rows = who_reads(Engine(remote, 16), Engine(local, 16), heads)
        assert [row.rank for row in rows] == list(range(local))
        for row in rows:
            assert len(row.sources) == len(row.heads) == len(set(row.sources))
            got = [head for part in row.heads for head in part]
            assert len(got) == len(set(got)), f"{row} reads a head twice"
            assert set(got) == needs[row.rank]
            for source, part in zip(row.sources, row.heads, strict=True):
                assert part
                assert set(part) <= has[source]


def test_engines_that_cannot_read_one_another_get_both_numbers() -> None:
    for local, remote, heads in IMPOSSIBLE:
        first_two_that_do_not_fit = next(
            text
            for one, other, text in (
                (local, heads, f"{local} of engine decode with {heads} KV heads"),
                (remote, heads, f"{remote} of engine prefill with {heads} KV heads"),
                (local, remote, f"{local} of engine decode and {remote} of engine prefill"),
            )
            if not fits(one, other)
        )
        with pytest.raises(ValueError, match=f"^TP size {first_two_that_do_not_fit}: one must be"):
            who_reads(Engine(remote, 16), Engine(local, 16), heads)


@pytest.mark.parametrize(
    ("local", "remote", "ratio"), [(1, 16, None), (16, 16, 1), (32, 16, 2), (48, 16, 3), (16, 32, None), (24, 16, None)]
)
def test_local_blocks_take_whole_remote_blocks(local: int, remote: int, ratio: int | None) -> None:
    known = topology(remote_block_size={"decode": local, "prefill": remote})
    if ratio:
        assert known.block_size_ratio(remote) == known.block_size_ratio_from_engine_id("prefill") == ratio
        assert {row.blocks for row in who_reads(Engine(1, remote), Engine(2, local), 2)} == {ratio}
    else:
        refusal = f"size {local} of engine decode and {remote} of engine prefill: the first must be a multiple of the"
        with pytest.raises(ValueError, match=refusal):
            known.block_size_ratio_from_engine_id("prefill")
        with pytest.raises(ValueError, match=refusal):
            who_reads(Engine(1, remote), Engine(2, local), 2)


NO_NUMBERS: tuple[Any, ...] = (0, -1, True, 2.0, "2", None)


@pytest.mark.parametrize("bad", NO_NUMBERS, ids=repr)
def test_size_below_one_is_refused_everywhere(bad: Any) -> None:
    known = topology()
    for call in (
        lambda: topology(local=bad),
        lambda: topology(heads=bad),
        lambda: topology(heads=bad, is_mla=True),
        lambda: topology(remote_block_size={"decode": bad}),
        lambda: known.tp_ratio(bad),
        lambda: known.block_size_ratio(bad),
        lambda: known.get_target_remote_ranks(bad),
        lambda: topology(remote=bad).is_kv_replicated("prefill"),
        lambda: topology(remote=bad, is_mla=True).replicates_kv_cache("prefill"),
        lambda: who_reads(Engine(bad, 16), Engine(1, 16), 8),
        lambda: who_reads(Engine(1, bad), Engine(1, 16), 8),
        lambda: who_reads(Engine(1, 16), Engine(bad, 16), 8),
        lambda: who_reads(Engine(1, 16), Engine(1, bad), 8),
        lambda: who_reads(Engine(1, 16), Engine(1, 16), bad),
    ):
        with pytest.raises(ValueError, match=f"{bad!r}, must be an integer of at least 1"):
            call()


@pytest.mark.parametrize("rank", [-1, 4, 99, True, 1.0, "1", None], ids=repr)
def test_a_rank_beyond_the_engine_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match=f"TP rank {rank!r} with TP size 4: ranks are 0 to 3"):
        topology(rank, local=4)


def test_unknown_engines_are_refused_by_name() -> None:
    known = topology()
    for method in (
        known.tp_ratio_from_engine_id,
        known.block_size_ratio_from_engine_id,
        known.is_kv_replicated,
        known.replicates_kv_cache,
        known.get_target_remote_ranks_from_engine_id,
        topology(is_mla=True).replicates_kv_cache,
    ):
        with pytest.raises(ValueError, match="of engine other is known; known engines: decode, prefill"):
            method("other")
    with pytest.raises(ValueError, match="no TP size of engine other is known"):
        topology(engine_id="other", remote_block_size={"other": 16})
    with pytest.raises(ValueError, match="no block size of engine decode is known; known engines: none"):
        topology(remote_block_size={})


def test_an_engine_may_come_later() -> None:
    sizes = {"decode": 4}
    known = TpKVTopology(1, sizes, False, 8, [], "decode", {"decode": 16})
    sizes["prefill"] = 2
    assert known.get_target_remote_ranks_from_engine_id("prefill") == [0]


class Backend:
    """An attention backend that says its cache's shape, as those did until vLLM 0.28."""

    def __init__(self, *shape: str) -> None:
        self.shape = shape

    def get_kv_cache_shape(self, **sizes: int) -> tuple[int, ...]:
        return tuple(sizes.get(name) or int(name) for name in self.shape)


BLOCKS_FIRST = Backend("num_blocks", "2", "block_size", "num_kv_heads", "head_size")
KV_FIRST = Backend("2", "num_blocks", "block_size", "num_kv_heads", "head_size")
PACKED = Backend("num_blocks", "num_kv_heads", "block_size", "2")
LATENT = Backend("num_blocks", "block_size", "head_size")


@pytest.mark.parametrize(
    ("backends", "fields", "is_blocks_first", "splits", "has_all_layers"),
    [
        ([KV_FIRST], {}, False, True, False),
        (KV_FIRST, {}, False, True, False),
        ([BLOCKS_FIRST, KV_FIRST], {}, True, False, False),
        ([PACKED], {}, True, False, False),
        ([], {}, True, False, False),
        ([object()], {}, True, False, False),
        ([LATENT], {"is_mla": True}, False, False, False),
        ([], {"is_mla": True}, False, False, False),
        ([KV_FIRST], {"is_mamba": True}, True, False, False),
        ([KV_FIRST], {"tensor_shape": (2, 100, 16, 8, 64)}, False, True, False),
        ([KV_FIRST], {"tensor_shape": (100, 32, 2, 16, 8, 64)}, False, False, True),
        ([PACKED], {"tensor_shape": (32, 100, 8, 16, 128)}, True, False, True),
        ([], {"tensor_shape": (100, 8, 16, 128)}, True, False, False),
        ([], {"tensor_shape": (32, 100, 8, 16, 128)}, True, False, True),
        ([], {"is_mla": True, "tensor_shape": (100, 16, 576)}, False, False, False),
        ([], {"is_mla": True, "tensor_shape": (32, 100, 16, 576)}, False, False, True),
    ],
)
def test_k_v_first_has_two_regions_and_a_further_one_is_layers(
    backends: Any, fields: dict[str, Any], is_blocks_first: bool, splits: bool, has_all_layers: bool
) -> None:
    known = topology(attn_backends=backends, **fields)
    assert (known.is_kv_layout_blocks_first, known.split_k_and_v) == (is_blocks_first, splits)
    assert known.cross_layers_blocks is has_all_layers


@pytest.mark.parametrize("shape", [(), (100, 16), (1, 2, 3, 4, 5, 6)], ids=str)
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"has {len(shape)} dimensions and .* 4: it must have 4, or 5 where"):
        topology(tensor_shape=shape)
    topology(tensor_shape=shape, is_mamba=True)


STATE = MambaSpec(16, shapes=((4, 3), (4, 2)), dtypes=(torch.float32, torch.float32))
ATTENTION = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("backend", "fields", "shape", "regions"),
    [
        (KV_FIRST, {}, (2, 100, 16, 2, 8), [(100, 16, 2, 8)] * 2),
        (BLOCKS_FIRST, {}, (100, 2, 16, 2, 8), [(100, 2, 16, 2, 8)]),
        (LATENT, {"is_mla": True}, (100, 16, 576), [(100, 16, 576)]),
        (KV_FIRST, {"tensor_shape": (100, 4, 2, 16, 2, 8)}, (100, 4, 2, 16, 2, 8), [(100, 4, 2, 16, 2, 8)]),
        (KV_FIRST, {"is_mamba": True}, (2, 100, 16, 2, 8), [(100, 2, 16, 2, 8)]),
        (BLOCKS_FIRST, {"is_mamba": True}, (100, 2, 16, 2, 8), [(100, 2, 16, 2, 8)]),
    ],
    ids=["K before V", "blocks first", "MLA", "all layers in one", "beside state", "beside state, blocks first"],
)
def test_the_regions_of_a_layer_are_its_tensor_or_k_and_v(
    backend: Any, fields: dict[str, Any], shape: tuple[int, ...], regions: list[tuple[int, ...]]
) -> None:
    known = topology(attn_backends=[backend], **fields)
    cache = torch.zeros(shape)
    found = list(known.get_transfer_cache_regions(cache, ATTENTION))
    assert [tuple(region.shape) for region in found] == regions
    assert all(region.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr() for region in found)


def test_the_region_of_a_state_layer_begins_with_its_convolution() -> None:
    conv, ssm = torch.zeros(100, 4, 3), torch.zeros(100, 4, 2)
    found = topology(attn_backends=[KV_FIRST], is_mamba=True).get_transfer_cache_regions((conv, ssm), STATE)
    assert len(found) == 1
    assert found[0] is conv


LAST_OF_VLLM = {
    "attn_backends block_size block_size_ratio block_size_ratio_from_engine_id cross_layers_blocks engine_id",
    "get_target_remote_ranks get_target_remote_ranks_from_engine_id get_transfer_cache_regions",
    "is_kv_layout_blocks_first is_kv_replicated is_mamba is_mla remote_block_size remote_tp_size replicates_kv_cache",
    "split_k_and_v tensor_shape total_num_kv_heads tp_rank tp_ratio tp_ratio_from_engine_id tp_size",
}
"""The public members of vLLM's class of this name, as it was last; none of the versions tested here has it."""


def test_the_class_has_the_members_that_vllms_last_had() -> None:
    members = {name for name in dir(topology()) if not name.startswith("_")}
    assert members == {name for line in LAST_OF_VLLM for name in line.split()}


def stock(tp_rank: int, local: int, remote: int, heads: int, is_mla: bool) -> Any:
    """Make vLLM's class, under the name that it has now, with a prefill engine that it knows."""
    sizes: dict[str, Any] = {"tp_rank": tp_rank, "tp_size": local, "total_num_kv_heads": heads, "is_mla": is_mla}
    made = TransferTopology(block_size=16, engine_id="decode", is_mamba=False, attn_backends=[], **sizes)
    blocks = {"remote_block_len": 1, "remote_block_size": 16, "remote_physical_blocks_per_logical": 1}
    made.register_remote_engine("prefill", EngineTransferInfo(remote_tp_size=remote, **blocks))
    return made


@pytest.mark.parametrize("is_mla", [False, True], ids=["heads", "mla"])
def test_vllm_says_the_same(is_mla: bool) -> None:
    """What vLLM calls targets, and what its NIXL connector then reads from and counts as readers."""
    for local, remote, heads in POSSIBLE:
        rows = who_reads(Engine(remote, 16), Engine(local, 16), heads, is_mla=is_mla)
        for rank in range(local):
            ours = topology(rank, local, remote, heads, is_mla=is_mla)
            theirs = stock(rank, local, remote, heads, is_mla)
            assert ours.tp_ratio(remote) == ours.tp_ratio_from_engine_id("prefill") == theirs.tp_ratio(remote)
            assert ours.get_target_remote_ranks(remote) == theirs.handshake_target_ranks(remote)
            assert ours.get_target_remote_ranks_from_engine_id("prefill") == theirs.target_remote_ranks("prefill")
            assert ours.is_kv_replicated("prefill") == theirs.is_kv_replicated("prefill")
            assert ours.replicates_kv_cache("prefill") == theirs.replicates_kv_cache("prefill")
            assert ours.replicates_kv_cache("decode") == theirs.local_replicates_kv_cache
            mapping, (first, *_) = compute_tp_mapping(theirs, remote, (FullAttentionSpec,)), rows[rank].heads
            assert mapping.source_ranks_per_group == (rows[rank].sources,)
            # Where in the remote rank's cache it reads, in units of what it reads.
            offset = first.start - heads_of(rows[rank].sources[0], remote, 1 if is_mla else heads).start
            assert mapping.rank_offset_factor * len(first) == offset
            assert mapping.local_consumers == sum(rows[rank].sources[0] in row.sources for row in rows)


def test_vllm_refuses_the_same_sizes() -> None:
    """Heads that can't be split it does not look at: no engine with them gets as far."""
    for local in SIZES:
        for remote in SIZES:
            ours, theirs = topology(local=local, is_mla=True), stock(0, local, remote, 8, is_mla=True)
            calls = ((ours.tp_ratio, theirs.tp_ratio, remote), (ours.block_size_ratio, theirs.block_size_ratio, remote))
            for our, their, number in calls:
                try:
                    expected = their(number)
                except AssertionError:
                    with pytest.raises(ValueError, match=f"and {number} of the remote engine"):
                        our(number)
                else:
                    assert our(number) == expected
