"""Sampled blocks of prompts, as vLLM's own scheduler computes, loads and preempts them."""

import hashlib
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.state.cache_layout import CacheLayout
from kvobs.state.transfers import NO_RESULT, Load, LookupResult, Offer
from kvobs.telemetry.verify.noted import BLOCKS_AT_MOST
from kvobs.telemetry.verify.sample import (
    HANDED_AT_MOST,
    KEY_BYTES,
    Block,
    BlockSample,
    LoadedBlocks,
    NotedBlock,
    VerifyOrders,
)
from kvobs.testing import BLOCK, Rig, Script
from tests.support.contexts import json_values

PROMPT = list(range(5 * BLOCK + 3))


class Watched(Rig):
    """A rig that keeps the orders of each step."""

    def __init__(self, *scripts: Script, share: float | None = 1.0, budget: int | None = None, **more: Any) -> None:
        self.orders: list[VerifyOrders] = []
        super().__init__("kvobs", *scripts, kvobs={"verify": {"sample_ratio": share}}, **more)
        if budget is not None:
            self.scheduler.max_num_scheduled_tokens = budget

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> Any:
        note = scheduled.kv_connector_metadata.note
        if note is not None and note.verify is not None:
            self.orders.append(note.verify)
        return super()._work(worker, scheduled, samples)

    @property
    def noted(self) -> list[list[int]]:
        """Return the numbers of the noted blocks in their prompts, by step."""
        return [[block.position // BLOCK for block in orders.noted] for orders in self.orders if orders.noted]

    @property
    def loads(self) -> list[LoadedBlocks]:
        return [load for orders in self.orders for load in orders.loads]


def ids_of(rig: Rig, request_id: str) -> list[int]:
    (ids,) = rig.scheduler.kv_cache_manager.get_block_ids(request_id)
    return list(ids)


def test_full_blocks_of_a_prompt_are_noted_when_computed() -> None:
    rig = Watched(Script("one"))
    request = rig.add("a", PROMPT, 3 * BLOCK)  # the blocks of its answer become full, too
    rig.step()
    ids = ids_of(rig, "a")
    rig.run(3 * BLOCK)
    keys = [bytes(key)[:KEY_BYTES] for key in request.block_hashes]
    assert [orders.noted for orders in rig.orders] == [tuple(Block(keys[i], 0, ids[i], i * BLOCK) for i in range(5))]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_is_computed_in_chunks_is_noted_in_each(lag: int) -> None:
    rig = Watched(Script("one"), budget=2 * BLOCK + 1, lag=lag)
    rig.add("a", PROMPT, 2)
    rig.run(6)
    assert rig.noted == [[0, 1], [2, 3], [4]]


def test_blocks_that_are_in_vllms_cache_or_loaded_are_not_noted() -> None:
    script = Script("one", {"c": (2 * BLOCK, False)})
    rig = Watched(script)
    rig.add("a", PROMPT, 2)
    rig.run(4)
    rig.add("b", PROMPT + PROMPT, 2)
    rig.run(4)
    rig.add("c", [7, *PROMPT], 2)
    rig.run(4)
    assert rig.noted == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [2, 3, 4]]


def test_a_prompt_computed_again_after_preemption_is_noted_again() -> None:
    rig = Watched(Script("one"))
    rig.add("a", PROMPT, 20)
    rig.run(3)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run(4)
    assert rig.noted == [[0, 1, 2, 3, 4]] * 2
    assert [block.id for block in rig.orders[-1].noted] == ids_of(rig, "a")[:5]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_blocks_of_a_load_are_those_that_it_fills_wholly(is_async: bool) -> None:
    rig = Watched(Script("one"), script := Script("two", {"a": (3 * BLOCK + 2, is_async)}))
    rig.add("a", PROMPT, 9)
    rig.step()
    ids = ids_of(rig, "a")
    script.say(0, received="a" if is_async else "")
    rig.run(4)
    (load,) = rig.loads
    assert (load.connector_index, load.request, load.is_async) == (1, "a", is_async)
    assert [(block.id, block.position // BLOCK) for block in load.blocks] == list(zip(ids[:3], range(3), strict=True))
    assert rig.noted == [[4]]  # the fourth is partly loaded


@pytest.mark.parametrize("hit", [0, 2 * BLOCK])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_received_load_is_compared_again_if_another_had_a_hit(is_async: bool, hit: int) -> None:
    rig = Watched(script := Script("one", {"a": (3 * BLOCK, is_async)}), Script("two", {"a": (hit, is_async)}))
    rig.add("a", PROMPT, 9)
    rig.step()
    script.say(0, received="a" if is_async else "")
    rig.run(6)
    found = [(load.others, load.is_async, load.is_again, len(load.blocks)) for load in rig.loads]
    others = (1,) if hit else ()
    again = [(others, False, True, 3)] if is_async and hit else []
    assert found == [(others, is_async, False, 3), *again]
    with_again = [orders for orders in rig.orders if any(load.is_again for load in orders.loads)]
    assert [bool(orders.noted) for orders in with_again] == [True] * len(again)  # with the request's first forward


def test_a_load_that_has_failed_is_not_compared_again() -> None:
    one, two = Script("one", {"a": (3 * BLOCK, True)}), Script("two", {"a": (2 * BLOCK, True)})
    rig = Watched(one, two)
    rig.add("a", PROMPT, 9)
    rig.step()
    one.say(0, failed="a")
    rig.run(2)
    two.say(0, received="a")
    rig.run(6)
    assert [(load.connector_index, load.is_again) for load in rig.loads] == [(0, False), (1, False)]
    assert rig.noted == [[2, 3, 4]]


def test_only_whole_blocks_that_stayed_are_compared_again() -> None:
    sample = BlockSample(1, CacheLayout((16, 32)), 16)
    sample.allocated(_request(80, hashes(5)), _lookup(0, 1), 0, 64)
    sample.admitted("a", _load(((11, 12, 13, 14), (21, 22)), 0, 64))
    new = SimpleNamespace(req_id="a", block_ids=([11, 99, 13, 14, 15], [0, 22, 23]), num_computed_tokens=63)
    nothing = SimpleNamespace(**NOTHING)
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[new], scheduled_cached_reqs=nothing, num_scheduled_tokens={"a": 17}
    )
    orders = sample.orders_of(output)
    assert orders is not None
    assert [[(block.group, block.id) for block in load.blocks] for load in orders.loads] == [
        [(0, 11), (0, 12), (0, 13), (0, 14), (1, 21), (1, 22)],
        [(0, 11), (0, 13)],
    ]


@pytest.mark.parametrize(("share", "is_on"), [(None, False), (1e-18, False)])
def test_without_a_share_nothing_is_ordered(share: float | None, is_on: bool) -> None:
    rig = Watched(Script("one", {"a": (3 * BLOCK, False)}), share=share)
    rig.add("a", PROMPT, 2)
    rig.run(4)
    assert bool(rig.orders) is is_on


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    rig = Watched(
        Script("one", {"a": (3 * BLOCK, False), "c": (BLOCK, True)}), Script("two", {"c": (9, True)}), budget=BLOCK
    )
    for name in ("a", "b", "c"):
        rig.add(name, [ord(name), *PROMPT], 2)
    rig.run(2)
    for name in ("b", "c"):
        rig.abort(name)
    rig.run(20)
    sample = rig.connector._telemetry._sample
    kept = sample._prompts, sample._unfilled, sample._loads, sample._handed, sample._hits, sample._again
    assert kept == ({}, {}, [], {}, {}, {})


def test_what_a_failed_load_has_spoiled_is_forgotten_for_a_while() -> None:
    sample = BlockSample(1, CacheLayout((BLOCK,)), BLOCK, in_flight=2)
    keys = hashes(4)
    request = _request(4 * BLOCK, keys)
    sample.allocated(request, NO_RESULT, None, 0)
    steps = [sample.orders_of(_chunk(number, BLOCK)) for number in range(3)]
    blocks = [(0, keys[number][:KEY_BYTES]) for number in range(3)]
    notes = [NotedBlock(*block, 0, "wrong") for block in blocks]
    sample.noted(notes[:2])
    sample.load_ended("b", Load(0, BLOCK, is_async=True, expected=1, failed_on={0}))
    assert sample._forgotten == set()
    sample.load_ended("b", Load(0, BLOCK, is_async=False, expected=1, failed_on={0}))
    sample.noted(notes[1:])  # they were on their way
    assert [block for block in blocks if block in sample._noted] == blocks[:1]
    steps.append(sample.orders_of(_chunk(1, BLOCK)))
    assert [step.forgotten for step in steps if step is not None] == [frozenset()] * 3 + [frozenset(blocks[1:])]
    sample.noted([note._replace(sent="right") for note in notes[1:]])
    assert [sample._noted.get(block) for block in blocks] == [{"0": "wrong"}, {"0": "right"}, None]


FINGERPRINT = {"0": "of rank 0", "1": "of rank 1"}


@pytest.mark.parametrize("share", [1.0, 1e-18])
def test_decode_compares_the_blocks_that_prefill_has_noted(share: float) -> None:
    prefill = BlockSample(1, CacheLayout((BLOCK, 2 * BLOCK)), BLOCK, ranks=2)
    keys = hashes(5)
    request = _request(5 * BLOCK + 3, keys)
    prefill.allocated(request, None, None, 0)  # type: ignore[arg-type]
    known = {"remote": 1}
    assert prefill.into_params(request, known) is known
    for rank, (group, number) in itertools.product((0, 1), ((0, 0), (0, 2), (1, 3), (0, 4), (0, 9))):
        prefill.noted([NotedBlock(group, (keys + hashes(9, 1))[number][:KEY_BYTES], rank, f"of rank {rank}")])
    prefill.noted([NotedBlock(0, keys[1][:KEY_BYTES], 0, "of one rank only"), "another observer's note"])
    assert prefill.into_params(request, None) is None
    params = json.loads(json.dumps(prefill.into_params(request, known)))

    rig = Watched(Script("one", {"a": (4 * BLOCK, True)}), share=share)
    rig.add("a", PROMPT, 2, **params)
    rig.run(2)
    ids = ids_of(rig, "a")
    (load,) = rig.loads
    handed = [block for block in load.blocks if block.sent is not None]
    assert handed == [Block(keys[i][:KEY_BYTES], 0, ids[i], i * BLOCK, FINGERPRINT) for i in (0, 2)]
    assert len(load.blocks) == (4 + 2 if share == 1 else 2)  # these are compared with both


def test_a_decode_engine_gets_some_of_many_blocks() -> None:
    prefill, keys = BlockSample(1, CacheLayout((BLOCK,)), BLOCK), hashes(100)
    request = _request(100 * BLOCK, keys)
    prefill.allocated(request, None, None, 0)  # type: ignore[arg-type]
    prefill.noted([NotedBlock(0, key[:KEY_BYTES], 0, "") for key in keys])
    params: Any = prefill.into_params(request, {"remote": 1})
    positions = [position for _, position, *_ in params["kvobs"]["blocks"]]
    assert positions == list(range(0, 100 * BLOCK, 7 * BLOCK))
    assert len(positions) <= HANDED_AT_MOST


@given(json_values)
def test_params_of_any_kind_hand_nothing_over(value: Any) -> None:
    sample = BlockSample(1, CacheLayout((BLOCK,)), BLOCK)
    for params in (value, {"kvobs": value}, {"kvobs": {"blocks": value}}, {"kvobs": {"blocks": [value]}}):
        sample.allocated(_request(BLOCK, [], params), NO_RESULT, 0, BLOCK)
    assert sample._handed == {}


@pytest.mark.parametrize(
    ("blocks", "taken"),
    [
        ([[0, 0, "0" * 16, FINGERPRINT]] * HANDED_AT_MOST, HANDED_AT_MOST),
        ([[0, 0, "0" * 16, FINGERPRINT]] * (HANDED_AT_MOST + 1), 0),
        ([[0, 0, "0" * 16, {"0": "x" * 65}]], 0),
        ([[0, 0, "0" * 16, {str(rank): "" for rank in range(1025)}]], 0),
        ([[0, 0, "0" * 18, FINGERPRINT]], 0),
        ([[0, -1, "0" * 16, FINGERPRINT]], 0),
    ],
)
def test_blocks_that_are_handed_over_are_bounded(blocks: Any, taken: int) -> None:
    sample = BlockSample(1, CacheLayout((BLOCK,)), BLOCK)
    sample.allocated(_request(BLOCK, [], {"kvobs": {"blocks": blocks}}), NO_RESULT, 0, BLOCK)
    assert len(sample._handed.get("a", [])) == taken


def test_the_fingerprints_that_were_noted_first_are_forgotten() -> None:
    sample = BlockSample(1, CacheLayout((BLOCK,)), BLOCK)
    for number in range(BLOCKS_AT_MOST + 3):
        sample.noted([NotedBlock(0, number.to_bytes(KEY_BYTES, "big"), 0, "")])
    assert len(sample._noted) == BLOCKS_AT_MOST
    assert next(iter(sample._noted)) == (0, (3).to_bytes(KEY_BYTES, "big"))


def hashes(count: int, salt: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{salt} {i}".encode()).digest() for i in range(count)]


@settings(max_examples=15)
@given(st.sampled_from([0.01, 0.1, 0.5]), st.integers(0, 9))
def test_a_share_of_all_blocks_is_sampled_the_same_everywhere(share: float, salt: int) -> None:
    keys = hashes(2000, salt)
    sampled = [_sampled(share, keys), _sampled(share, keys)]
    assert sampled[0] == sampled[1] < _sampled(2 * share, keys) or share == 0.5
    assert abs(len(sampled[0]) - 2000 * share) < 5 * (2000 * share) ** 0.5


def _sampled(share: float, keys: list[bytes]) -> set[bytes]:
    sample = BlockSample(share, CacheLayout((16,)), 16)
    sample.allocated(_request(16 * len(keys), keys), None, None, 0)  # type: ignore[arg-type]
    return {key for _, key in sample._prompts["a"].ends}


def _request(tokens: int, keys: list[bytes], params: Any = None) -> Any:
    return SimpleNamespace(request_id="a", num_prompt_tokens=tokens, block_hashes=keys, kv_transfer_params=params)


def _chunk(number: int, tokens: int) -> Any:
    """Return vLLM's output of the step that computes a part of the prompt of "a"."""
    start, ids = number * tokens, ([number + 1],)
    new = SimpleNamespace(req_id="a", block_ids=ids, num_computed_tokens=0)
    cached = SimpleNamespace(**NOTHING | {"req_ids": ["a"], "new_block_ids": [ids], "num_computed_tokens": [start]})
    return SimpleNamespace(
        scheduled_new_reqs=[] if number else [new],
        scheduled_cached_reqs=cached if number else SimpleNamespace(**NOTHING),
        num_scheduled_tokens={"a": tokens},
    )


def _lookup(*connectors: int) -> LookupResult:
    return LookupResult([Offer(connector, 1, True) for connector in connectors])


def _load(blocks: Any, local: int, tokens: int) -> Any:
    return SimpleNamespace(connector_index=0, is_async=True, blocks=blocks, local_tokens=local, tokens=tokens)


def test_groups_have_blocks_of_their_sizes_and_a_window_its_last() -> None:
    keys = hashes(8)
    sample = BlockSample(1, CacheLayout((16, 32, 0)), 16)
    sample.allocated(_request(130, keys), None, None, 0)  # type: ignore[arg-type]
    sample.admitted("a", _load(((11, 12, 13, 14, 15), (22,), (3,)), 32, 80))
    output: Any = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(**NOTHING))
    orders = sample.orders_of(output)
    assert orders is not None
    whole = [Block(keys[i][:8], 0, 9 + i, 16 * i) for i in range(2, 7)]
    # Of the window's blocks of 32 tokens the load ends within the one from token 96 on.
    assert list(orders.loads[0].blocks) == whole
    sample.admitted("a", _load(((), (21, 22)), 0, 128))
    orders = sample.orders_of(output)
    assert orders is not None
    assert list(orders.loads[0].blocks) == [Block(keys[5][:8], 1, 21, 64), Block(keys[7][:8], 1, 22, 96)]


NOTHING: dict[str, Any] = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], "resumed_req_ids": set()}
