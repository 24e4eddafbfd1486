"""Fingerprints that are kept by content, and compared."""

import math
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.telemetry.verify.noted import FAR, PACKED, VARIANTS_AT_MOST, Fingerprint, NotedBlocks, compare_sent

RNG = np.random.default_rng(7)
VALUES = RNG.standard_normal(128).astype(np.float32)
FOUR_BITS = 2 * np.abs(VALUES).max() / 15
"""The step between numbers of four bits."""
NOTED = Fingerprint(1, VALUES, 4.0)


def other(digest: int = 2, values: object = VALUES, largest: float = 4.0) -> Fingerprint:
    return Fingerprint(digest, np.asarray(values, dtype=np.float32), largest)


def noted(*fingerprints: Fingerprint) -> NotedBlocks:
    blocks = NotedBlocks()
    for each in fingerprints:
        blocks.note(0, b"key", each)
    return blocks


@pytest.mark.parametrize(
    ("loaded", "outcome"),
    [
        (other(1), "match"),
        (other(), "lossy"),  # one of the bytes that are not among the values
        (other(values=VALUES * 1.1), "lossy"),
        (other(values=np.round(VALUES / FOUR_BITS) * FOUR_BITS), "lossy"),
        (other(values=VALUES + 0.05 * RNG.standard_normal(128)), "lossy"),
        (other(values=np.where(np.arange(128) < 20, 9, VALUES)), "mismatch"),  # a part is another block's
        (other(values=np.where(np.arange(128) < 20, 9, VALUES * 1.1)), "lossy"),
        (other(values=np.where(np.arange(128) < 20, VALUES * 1.2, VALUES)), "lossy"),  # of an FP8 number the last bit
        (other(values=np.where(np.arange(128) < 120, 0, VALUES)), "mismatch"),
        (other(values=np.where(np.arange(128) < 40, 0, VALUES)), "mismatch"),  # a third is empty
        (other(values=RNG.standard_normal(128)), "mismatch"),
        (other(values=0 * VALUES, largest=0), "mismatch"),
        (other(largest=9.0), "mismatch"),
        (other(largest=math.inf), "mismatch"),
        (other(largest=math.nan), "mismatch"),
        (other(values=np.full(128, math.nan)), "mismatch"),
    ],
)
def test_an_outcome_says_how_far_a_loaded_block_is(loaded: Fingerprint, outcome: str) -> None:
    assert noted(NOTED).compare(0, b"key", loaded) == outcome
    if outcome != "lossy":  # that border is less exact with the few values that are sent
        assert compare_sent(NOTED.sent(7), 7, loaded) == outcome


@pytest.mark.parametrize(("changed", "outcome"), [(1, "lossy"), (60, "lossy"), (90, "mismatch"), (128, "mismatch")])
def test_packed_bytes_are_near_if_many_are_the_same(changed: int, outcome: str) -> None:
    packed = other(1, np.arange(128), PACKED)
    loaded = other(2, np.where(np.arange(128)[::-1] * 37 % 128 < changed, 255, np.arange(128)), PACKED)
    assert noted(packed).compare(0, b"key", loaded) == outcome
    assert noted(packed).compare(0, b"key", loaded._replace(largest=4.0)) == "mismatch"


def test_a_sent_fingerprint_is_compared_with_ones_of_its_form() -> None:
    near = other(values=VALUES * 1.1)
    assert [compare_sent(near.sent(7), 7, each) for each in (near, NOTED)] == ["match", "lossy"]
    assert compare_sent(NOTED.sent(7), 8, NOTED) == "unknown"
    assert compare_sent(Fingerprint(-(2**63), VALUES, math.inf).sent(2**32 - 1), 7, NOTED) == "unknown"


@given(st.text() | st.binary(min_size=48, max_size=48).map(lambda data: b64encode(data).decode()))
def test_texts_of_any_kind_are_no_match(sent: str) -> None:
    assert compare_sent(sent, 0, NOTED) in ("unknown", "mismatch", "lossy")


@given(st.integers(1, 127), st.booleans(), st.integers(0, 99))
def test_a_block_that_is_partly_wrong_is_a_mismatch(wrong: int, is_zero: bool, seed: int) -> None:
    values = VALUES.copy()
    places = np.random.default_rng(seed).permutation(128)[:wrong]
    values[places] = 0 if is_zero else np.random.default_rng(seed + 1).standard_normal(wrong)
    is_seen = bool((np.abs(values - VALUES) > FAR * (np.abs(VALUES) + np.sqrt(np.mean(VALUES**2)))).any())
    assert noted(NOTED).compare(0, b"key", other(values=values)) == ("mismatch" if is_seen else "lossy")


def test_numbers_that_are_empty_in_both_blocks_say_nothing() -> None:
    """A block may be padded, or have fewer layers than its fingerprint has room for."""
    padded = np.where(np.arange(128) < 64, 0, VALUES)
    blocks = noted(Fingerprint(1, padded, 4.0))
    rounded = np.round(padded / FOUR_BITS) * FOUR_BITS
    assert blocks.compare(0, b"key", other(values=rounded)) == "lossy"
    assert blocks.compare(0, b"key", other(values=np.where(np.arange(128) < 64, 0, VALUES[::-1]))) == "mismatch"


def test_empty_blocks_are_near_each_other() -> None:
    empty = other(values=0 * VALUES, largest=0)
    assert noted(empty).compare(0, b"key", empty._replace(digest=9)) == "lossy"


def test_only_the_same_content_of_the_same_group_is_compared() -> None:
    assert noted(NOTED).compare(1, b"key", NOTED) == "unknown"
    assert noted(NOTED).compare(0, b"other", NOTED) == "unknown"


def test_variants_match_each_and_the_oldest_is_forgotten() -> None:
    variants = [other(digest) for digest in range(VARIANTS_AT_MOST + 1)]
    blocks = noted(*variants, *variants[-2:])
    assert [blocks.compare(0, b"key", each) for each in variants] == ["lossy", *["match"] * VARIANTS_AT_MOST]


def test_the_block_that_was_not_noted_for_longest_is_forgotten() -> None:
    blocks = NotedBlocks(2)
    for key in (b"a", b"b", b"a", b"c"):
        blocks.note(0, key, NOTED)
    assert len(blocks) == 2
    assert [blocks.compare(0, key, NOTED) for key in (b"a", b"b", b"c")] == ["match", "unknown", "match"]
