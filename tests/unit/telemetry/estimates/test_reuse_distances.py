"""Reuse distances against an LRU cache that is simulated exactly, on traces made here; their memory is bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.telemetry.estimates.reuse_distances import SAMPLES_AT_MOST, ReuseDistances

SIZES = [2**k for k in range(6, 22)]
POINTS = 0.02
Prompt = Sequence[bytes]


@cache
def stretch(before: bytes, name: object, blocks: int, length: int = 32) -> tuple[bytes, ...]:
    """Return the hashes of a stretch of text after a prefix: each is of all before it, as vLLM's are."""
    hashes, last = [], before
    for i in range(blocks):
        last = blake2b(last + f"{name}:{i}".encode(), digest_size=length).digest()
        hashes.append(last)
    return tuple(hashes)


def prompt(*parts: tuple[object, int], length: int = 32) -> Prompt:
    """Return the hashes of a prompt of several stretches."""
    hashes: tuple[bytes, ...] = ()
    for name, blocks in parts:
        hashes += stretch(hashes[-1] if hashes else b"", name, blocks, length)
    return hashes


def zipf(draw: random.Random) -> Iterator[Prompt]:
    weights = [1 / (i + 1) ** 1.1 for i in range(1500)]
    lengths = [draw.randrange(20, 300) for _ in weights]
    for i, text in enumerate(draw.choices(range(1500), weights, k=2000)):
        yield prompt((text, lengths[text]), (("question", i), draw.randrange(1, 120)))


def chats(draw: random.Random) -> Iterator[Prompt]:
    """Yield turns of 150 chats behind one system prompt; a long one is replaced by a new one."""
    turns: dict[int, list[tuple[object, int]]] = {chat: [("system", 64)] for chat in range(150)}
    for i in range(2000):
        chat = draw.randrange(150)
        turns[chat].append((("turn", i), draw.randrange(5, 60)))
        yield prompt(*turns[chat])
        turns[chat] = turns[chat] if len(prompt(*turns[chat])) < 400 else [("system", 64)]


def rag(draw: random.Random) -> Iterator[Prompt]:
    """Yield questions about shared documents, behind the system prompts of eight tenants."""
    lengths = [draw.randrange(50, 200) for _ in range(300)]
    weights = [1 / (i + 1) ** 0.9 for i in range(300)]
    for i in range(2000):
        (document,) = draw.choices(range(300), weights)
        parts = [(draw.randrange(8), 100), (("document", document), lengths[document])]
        yield prompt(*parts, (("question", i), draw.randrange(2, 40)))


def one_system_prompt(draw: random.Random) -> Iterator[Prompt]:
    """Yield questions behind one system prompt: all reuse has nearly one distance."""
    for i in range(400):
        yield prompt(("system", 1500), (i, draw.randrange(1, 100)))


def nothing(draw: random.Random) -> Iterator[Prompt]:
    for i in range(600):
        yield prompt((i, draw.randrange(50, 300)))


def scan(draw: random.Random) -> Iterator[Prompt]:
    for i in range(1000):
        yield prompt((i % 300, 150))


def served(prompts: Iterable[Prompt], size: int) -> int:
    """Return how many blocks an LRU cache of prefixes serves, which evicts a prompt from its end."""
    kept: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for hashes in prompts:
        hits += next((i for i, key in enumerate(hashes) if key not in kept), len(hashes))
        for key in reversed(hashes):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > size:
            kept.popitem(last=False)
    return hits


def estimated(prompts: Iterable[Prompt], sizes: Sequence[int]) -> list[int]:
    """Return the same by the distances, for each size, and last the number of all blocks."""
    distances = ReuseDistances(sizes)
    counted = [0] * (len(sizes) + 1)
    for hashes in prompts:
        counted = [sum(pair) for pair in zip(counted, distances.observe(hashes, len(hashes)).blocks, strict=True)]
    assert len(distances._last) <= SAMPLES_AT_MOST
    assert distances._between(0, distances._next) == sum(distances._weights), "the sums of spans are true"
    return list(accumulate(counted))


@pytest.mark.parametrize("trace", [zipf, chats, rag, one_system_prompt, nothing, scan])
def test_shares_are_within_two_points_of_a_simulated_cache(
    trace: Callable[[random.Random], Iterator[Prompt]],
) -> None:
    prompts = list(trace(random.Random(1)))
    stretch.cache_clear()
    blocks = sum(map(len, prompts))
    *hits, every = estimated(prompts, SIZES)
    # A scan's, with hashes of eight kinds: up to 4.2 %.
    assert every == pytest.approx(blocks, rel=0.05 if trace is scan else POINTS)
    for size, estimate in list(zip(SIZES, hits, strict=True))[::3]:
        assert estimate / every == pytest.approx(served(prompts, size) / blocks, abs=POINTS), size


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 3), st.integers(0, 8)), max_size=40),
    st.sampled_from([8, 16, 32]),
)
def test_short_prompts_are_counted_exactly(texts: list[tuple[int, int, int, int]], length: int) -> None:
    """Up to a depth of 16 every block stands for itself."""
    prompts = [prompt((a, n), (b, m), length=length) for a, n, b, m in texts]
    sizes = [0, 1, 2, 4, 8, 16, 64]
    *hits, every = estimated(prompts, sizes)
    assert every == sum(map(len, prompts))
    assert hits == [served(prompts, size) for size in sizes]


def test_answers_are_used_at_their_end_and_prompts_state_reuse() -> None:
    distances = ReuseDistances(SIZES)
    first, second = prompt(("question", 10), ("answer", 5)), prompt(("question", 10), ("answer", 5), ("more", 3))
    assert distances.observe([], 0)[:2] == ([0] * 17, 0)
    assert distances.observe(first, 10)[:2] == ([0] * 16 + [10], 0)
    distances.use(first, 10, 15)
    assert distances.observe(second, 18)[:2] == ([15] + [0] * 15 + [3], 15)


def test_two_thirds_of_the_samples_go_when_there_is_no_room() -> None:
    distances = ReuseDistances(SIZES)
    for i in range(SAMPLES_AT_MOST // 16):
        distances.observe(prompt((i, 16)), 16)
    assert len(distances._last) == SAMPLES_AT_MOST
    distances.observe(prompt(("more", 16)), 16)
    assert len(distances._last) == SAMPLES_AT_MOST // 3 + 16


def test_memory_is_bounded_for_ever() -> None:
    tracemalloc.start()
    try:
        distances = ReuseDistances(SIZES)
        for i in range(800):
            # Each time the hashes of a prompt that is gone afterwards.
            distances.observe([random.randbytes(32) for _ in range(600)], 600)
            if i == 300:
                tracemalloc.reset_peak()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(distances._last) > SAMPLES_AT_MOST // 3
    assert held < peak < 2_100_000
