"""What was asked and not offered is divided into reasons that add up to all of it, of each connector."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import LookupResult, Offer
from kvobs.telemetry.estimates.evictions import Evictions
from kvobs.telemetry.estimates.misses import Misses
from kvobs.telemetry.estimates.reuse_distances import ReuseDistances, key_of
from tests.support.numbers import numbers

BLOCK, CHUNK = 16, 64
REASONS = signals.MISSED_TOKENS.labels["reason"]
TEXTS = {name: [bytes(24) + (name << 32 | i).to_bytes(8, "big") for i in range(400)] for name in range(4)}


class Asked:
    """Three connectors: of blocks, of chunks, and of another engine's tokens."""

    def __init__(self) -> None:
        self.recorder, self.distances = Recorder(3), ReuseDistances([2**k for k in range(6, 20)])
        self.evictions = Evictions(self.recorder, self.distances, BLOCK)
        depths = self.distances.sampled
        self.misses = Misses(self.recorder, self.evictions, depths, BLOCK, chunks={1: CHUNK}, elsewhere={2})

    def prompt(self, tokens: int, *offers: int, local: int = 0, name: int = 0, shared: int = 400) -> None:
        """Ask for a prompt of which ``shared`` blocks begin a text; connectors offer these tokens."""
        hashes = [*TEXTS[name][:shared], *TEXTS[3][shared:]]
        blocks = (tokens - 1) // BLOCK
        reuse = self.distances.observe(hashes, blocks)
        lookup = LookupResult([Offer(index, n, True) for index, n in enumerate(offers)], local)
        self.misses.count(lookup, tokens, blocks, reuse)

    def missed(self, index: int = 0) -> dict[str, int]:
        """Return the tokens of each reason so far, without reasons that were not seen."""
        counts = numbers(self.recorder).counts
        found = {r: counts.get(signals.word(index, signals.slot(signals.MISSED_TOKENS, r)), 0) for r in REASONS}
        return {reason: n for reason, n in found.items() if n}


def test_a_new_prompt_was_never_seen() -> None:
    asked = Asked()
    asked.prompt(4 * BLOCK + 5, 0, 0, 0)
    assert asked.missed() == asked.missed(1) == {"never_seen": 4 * BLOCK, "no_full_block": 5}
    assert asked.missed(2) == {"unknown": 4 * BLOCK, "no_full_block": 5}


def test_what_follows_the_common_prefix_was_not_stored_by_anyone() -> None:
    asked = Asked()
    asked.prompt(8 * BLOCK + 1)
    asked.prompt(8 * BLOCK + 1, 5 * BLOCK, shared=5)
    assert asked.missed() == {"beyond_prefix": 3 * BLOCK, "no_full_block": 1}


def test_what_was_seen_and_not_offered_is_evicted_or_not_stored() -> None:
    asked = Asked()
    asked.prompt(8 * BLOCK + 1)
    asked.prompt(8 * BLOCK + 1, 0, local=2 * BLOCK)
    assert asked.missed() == {"not_stored": 6 * BLOCK, "no_full_block": 1}
    asked.evictions.evicted(0, "cpu", [key_of(each) for each in TEXTS[0][4:8]])
    asked.prompt(8 * BLOCK + 1, 4 * BLOCK)
    assert asked.missed() == {"not_stored": 6 * BLOCK, "evicted": 4 * BLOCK, "no_full_block": 2}


def test_what_another_connector_offers_is_elsewhere() -> None:
    asked = Asked()
    asked.prompt(8 * BLOCK + 1)
    asked.prompt(8 * BLOCK + 1, BLOCK, 4 * BLOCK)
    assert asked.missed() == {"other_connector": 3 * BLOCK, "not_stored": 4 * BLOCK, "no_full_block": 1}
    assert asked.missed(1) == {"not_stored": 4 * BLOCK, "no_full_block": 1}


def test_a_prefix_end_that_fills_no_chunk_is_shorter_than_one() -> None:
    asked = Asked()
    asked.prompt(7 * BLOCK + 1)
    asked.prompt(7 * BLOCK + 1, 0, CHUNK)
    assert asked.missed(1) == {"no_full_block": 7 * BLOCK - CHUNK + 1}


def test_an_offer_beyond_what_was_seen_here_is_no_miss() -> None:
    """Of a store that several engines share."""
    asked = Asked()
    asked.prompt(8 * BLOCK + 1, 6 * BLOCK)
    assert asked.missed() == {"beyond_prefix": 2 * BLOCK, "no_full_block": 1}


PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 400 * BLOCK),
        st.tuples(*[st.integers(0, 400 * BLOCK)] * 3),
        st.integers(0, 300 * BLOCK),
        st.integers(0, 2),
        st.integers(0, 400),
        st.sets(st.integers(0, 399), max_size=40),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(PROMPTS)
def test_reasons_add_up_to_what_was_not_offered(
    prompts: list[tuple[int, tuple[int, int, int], int, int, int, set[int]]],
) -> None:
    asked, expected = Asked(), [0, 0, 0]
    for tokens, offers, local, name, shared, evicted in prompts:
        known = min(local, tokens - 1)
        usable = [min(offer, tokens - known) for offer in offers]
        asked.prompt(tokens, *usable, local=known, name=name, shared=shared)
        asked.evictions.evicted(0, "cpu", [TEXTS[name][i] for i in evicted])
        expected = [n + tokens - known - offer for n, offer in zip(expected, usable, strict=True)]
    assert [sum(asked.missed(index).values()) for index in range(3)] == expected
