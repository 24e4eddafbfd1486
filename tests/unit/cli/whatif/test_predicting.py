"""The policy `fastest` in a replay: the router's rule, with the times of the recording."""

from __future__ import annotations

from dataclasses import replace

from kvobs.telemetry.flight import OWN
from tests.support.past_lookups import PROMPT, both, compared, computing_ms, load_ms, lookup


def test_it_chooses_the_connector_with_which_a_request_resumes_first() -> None:
    """Of equal offers the quicker load, and of others the one that saves more than it takes."""
    far_is_better = load_ms(1, 512) + computing_ms(PROMPT - 512) < load_ms(0, 256) + computing_ms(PROMPT - 256)
    assert far_is_better
    found = compared(*both(60), load_policy="fastest")
    assert found.what_if.tokens["far"] > 0.8 * 60 * 512
    equal = [lookup(i, 512, 512, chosen=i % 2) for i in range(60)]
    tokens = compared(*equal, load_policy="fastest").what_if.tokens
    assert tokens["near"] > 0.8 * 60 * 512
    assert tokens.total() == 60 * 512


def test_nothing_is_loaded_where_computing_is_quicker() -> None:
    """But for trials of what may have got better."""
    costs = {OWN: computing_ms(64) / 1000, 0: computing_ms(48) / 1000}
    small = [lookup(i, 16, 0, chosen=0, computing=costs) for i in range(60)]
    assert load_ms(0, 16) > 2 * (computing_ms(64) - computing_ms(48))
    found = compared(*small, load_policy="fastest")
    assert 0 < found.what_if.loads < 0.3 * found.was.loads


def test_beside_other_prefills_computing_takes_longer() -> None:
    costs = {OWN: computing_ms(64) / 1000, 0: computing_ms(48) / 1000}
    small = [replace(lookup(i, 16, 0, chosen=0, computing=costs), crowding=50.0) for i in range(60)]
    assert load_ms(0, 16) < 50 * (computing_ms(64) - computing_ms(48))
    found = compared(*small, load_policy="fastest")
    assert found.what_if.loads == found.was.loads


def test_it_learns_that_a_connector_has_become_slow() -> None:
    """From the loads that were made."""
    times = [lookup(i, 512, 512, chosen=i % 2) for i in range(80)]
    for one in times[40:]:
        if one.load is not None and one.load.child == 0:
            slow_s = (one.load.seconds or 0) * 20
            one.load = replace(one.load, seconds=slow_s, ended_ns=one.ended_ns + int(slow_s * 1e9))
    found = compared(*times, load_policy="fastest")
    late = compared(*times[40:], load_policy="fastest")
    assert found.what_if.tokens["near"] > 30 * 512
    assert late.what_if.tokens["far"] > 30 * 512


def test_under_the_recorded_settings_its_choice_is_the_recorded_one() -> None:
    """What it had learned before is not in the recording."""
    found = compared(*both(20), recorded={"load_policy": "fastest"})
    assert (found.repeated, found.changed) == (20, 0)
    assert found.what_if.tokens == found.was.tokens
    nothing = lookup(5, 256, 512)
    assert compared(nothing, recorded={"load_policy": "fastest"}).repeated == 1


def test_with_another_order_it_decides_anew() -> None:
    found = compared(*both(40), recorded={"load_policy": "fastest"}, order=["far", "near"])
    assert found.what_if.tokens["far"] > 0.8 * 40 * 512


def test_a_connector_that_was_never_loaded_from_is_tried_and_never_known() -> None:
    found = compared(*[lookup(i, 256, 512, chosen=0) for i in range(10)], load_policy="fastest")
    assert found.what_if.tokens["far"] > 0
    assert found.unpredicted["far"] > 0
