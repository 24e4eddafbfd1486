"""Evicted blocks that are samples are followed until a prompt asks for them or they are stored again."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.telemetry.estimates import evictions
from kvobs.telemetry.estimates.evictions import Evictions
from kvobs.telemetry.estimates.reuse_distances import ReuseDistances, key_of
from tests.support.numbers import numbers

BLOCK = 16
SIZES = [2**k for k in range(6, 20)]
POINTS = 0.03


@cache
def text(name: object, blocks: int) -> list[bytes]:
    """Return the hashes of a prompt's blocks, each of all before it."""
    hashes, last = [], b""
    for i in range(blocks):
        last = blake2b(last + f"{name}:{i}".encode(), digest_size=32).digest()
        hashes.append(last)
    return hashes


class Followed:
    """Evictions next to the distances that have their samples, with what was counted."""

    def __init__(self) -> None:
        self.recorder = Recorder(2)
        self.distances = ReuseDistances(SIZES)
        self.evictions = Evictions(self.recorder, self.distances, BLOCK)

    def prompt(self, hashes: Sequence[bytes], local: int = 0) -> None:
        reuse = self.distances.observe(hashes, len(hashes))
        self.evictions.asked(reuse.keys, local * BLOCK)

    def blocks(self, signal: signals.Signal, index: int = 0, medium: str = "cpu") -> int:
        return numbers(self.recorder).counts.get(signals.word(index, signals.slot(signal, medium)), 0) // BLOCK

    @property
    def counted(self) -> tuple[int, int]:
        return self.blocks(signals.FOLLOWED_EVICTIONS), self.blocks(signals.REUSED_EVICTIONS)


@pytest.mark.parametrize("as_int", [True, False])
def test_a_sample_has_the_key_that_vllm_publishes(as_int: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_int)))
    distances, hashes = ReuseDistances(SIZES), text("a", 8)
    keys = distances.observe(hashes, 8).keys
    assert [key_of(maybe_convert_block_hash(BlockHash(block_hash))) for block_hash in hashes] == list(keys)


def test_an_evicted_block_that_a_prompt_asks_for_is_reused_once() -> None:
    followed, hashes = Followed(), text("a", 8)
    followed.prompt(hashes)
    followed.evictions.evicted(0, "cpu", [key_of(block_hash) for block_hash in hashes[4:]])
    assert followed.counted == (4, 0)
    followed.prompt(text("b", 8))
    assert followed.counted == (4, 0)
    for _ in range(2):
        followed.prompt(hashes[:6])
        assert followed.counted == (4, 2)


def test_what_vllm_has_is_not_missed_nor_what_is_stored_again() -> None:
    followed, hashes = Followed(), text("a", 8)
    followed.prompt(hashes)
    followed.evictions.evicted(0, "cpu", hashes)
    followed.prompt(hashes, local=5)
    assert followed.counted == (8, 3)
    followed.evictions.stored(0, "cpu", hashes[:4])
    followed.prompt(hashes)
    assert followed.counted == (8, 4)


def test_connectors_and_media_are_apart() -> None:
    followed, hashes = Followed(), text("a", 4)
    followed.prompt(hashes)
    followed.evictions.evicted(0, "cpu", hashes[2:])
    followed.evictions.evicted(1, "storage", hashes[3:])
    followed.evictions.stored(1, "cpu", hashes)
    key = key_of(hashes[2])
    assert (followed.evictions.has_evicted(0, key), followed.evictions.has_evicted(1, key)) == (True, False)
    followed.prompt(hashes)
    assert followed.counted == (2, 2)
    assert followed.blocks(signals.REUSED_EVICTIONS, 1, "storage") == 1


def test_blocks_that_are_no_samples_are_not_followed() -> None:
    followed = Followed()
    followed.evictions.evicted(0, "cpu", text("never asked", 8))
    assert followed.counted == (0, 0)


def test_the_followed_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "FOLLOWED_AT_MOST", 6)
    followed, old, new = Followed(), text("a", 4), text("b", 4)
    for hashes in (old, new):
        followed.prompt(hashes)
        for block_hash in hashes:
            followed.evictions.evicted(0, "cpu", [block_hash])
    followed.prompt(old)
    followed.prompt(new)
    assert followed.counted == (8, 2 + 4)


@pytest.mark.parametrize("room", [3_000, 30_000])
def test_the_share_is_that_of_a_simulated_store(room: int) -> None:
    """The store is an LRU cache of every block; the samples are a few thousand of them."""
    draw, followed = random.Random(room), Followed()
    weights = [1 / (i + 1) ** 0.9 for i in range(800)]
    lengths = [draw.randrange(40, 400) for _ in weights]
    store: OrderedDict[int, None] = OrderedDict()
    gone: set[int] = set()
    evicted = asked = 0
    for i, name in enumerate(draw.choices(range(800), weights, k=1500)):
        prompt = [*text(name, lengths[name]), *text(("question", i), draw.randrange(1, 40))]
        keys = [key_of(block_hash) for block_hash in prompt]
        again = gone.intersection(keys)
        asked += len(again)
        gone -= again
        followed.prompt(prompt)
        for key in reversed(keys):  # a prefix is used last
            store[key] = None
            store.move_to_end(key)
        followed.evictions.stored(0, "cpu", keys)
        out = [store.popitem(last=False)[0] for _ in range(len(store) - room)]
        followed.evictions.evicted(0, "cpu", out)
        gone |= set(out)
        evicted += len(out)
    all_followed, reused = followed.counted
    share, exact = reused / all_followed, asked / evicted
    print(f"{room} blocks: {share:.1%} of the samples, {exact:.1%} of all")
    assert 0.02 < exact < 0.98
    assert share == pytest.approx(exact, abs=POINTS)
