"""Out after a failure, back after a while, twice as long each time: random lives against what a reader would say."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.quarantine import FIRST_NS, FOR_GOOD, LONGEST_NS, NEVER_NS, Quarantine, State

S = 10**9


def test_it_is_back_on_trial_and_then_fit() -> None:
    child = Quarantine()
    assert child.look(0) is None
    assert child.fail(10 * S)
    assert (child.state, child.epoch, child.length_ns) == (State.OUT, 1, FIRST_NS)
    assert child.look(11 * S - 1) is None
    assert child.look(11 * S) is State.TRIAL
    assert not child.is_out
    assert child.look(12 * S - 1) is None
    assert child.look(12 * S) is State.FIT
    assert child.look(10**6 * S) is None


def test_failing_again_on_trial_doubles_and_being_fit_forgets() -> None:
    child, now, lengths = Quarantine(), 0, []
    for _ in range(9):
        assert child.fail(now)
        lengths.append(child.length_ns)
        now += child.length_ns
        assert child.look(now) is State.TRIAL
    assert lengths == [S, 2 * S, 4 * S, 8 * S, 16 * S, 32 * S, *[LONGEST_NS] * 3]
    assert child.look(now + LONGEST_NS) is State.FIT
    child.fail(now + LONGEST_NS)
    assert child.length_ns == FIRST_NS


def test_it_waits_for_the_requests_of_which_something_was_missed() -> None:
    child = Quarantine()
    child.fail(0, ["a"])
    assert not child.fail(1, ["b"]), "it is out already"
    child.gone("a")
    assert child.look(60 * S) is None
    child.gone("b")
    assert child.look(60 * S) is State.TRIAL


@pytest.mark.parametrize(("epoch", "begins"), [(0, False), (1, True), (2, True)])
def test_a_worker_may_be_late_with_what_is_known(epoch: int, begins: bool) -> None:
    child = Quarantine()
    child.fail(0)
    child.look(S)
    assert child.fail(S, epoch=epoch) is begins


def test_for_good_is_for_good() -> None:
    child = Quarantine()
    assert child.fail(0, epoch=FOR_GOOD)
    assert not child.fail(1, epoch=FOR_GOOD)
    assert not child.fail(1)
    assert child.length_ns == NEVER_NS
    assert child.look(10**9 * S) is None
    out = Quarantine()
    out.fail(0)
    assert out.fail(1, epoch=FOR_GOOD), "worse than it was"
    assert out.look(10**9 * S) is None


@given(st.lists(st.tuples(st.sampled_from(["fail", "miss", "gone", "look"]), st.integers(0, 3 * S)), max_size=60))
def test_whatever_happens_it_is_out_for_its_time_and_never_longer_than_it_must(events: list[tuple[str, int]]) -> None:
    child, now, out_since, missed = Quarantine(), 0, 0, set()
    epochs = 0
    for i, (event, passes) in enumerate(events):
        now += passes
        if event in ("fail", "miss"):
            was_out = child.is_out
            requests = [f"r{i}"] if event == "miss" else []
            missed.update(requests)
            assert child.fail(now, requests) is not was_out
            if not was_out:
                out_since = now
                epochs += 1
        elif event == "gone" and missed:
            child.gone(missed.pop())
        elif event == "look":
            was_out = child.is_out
            change = child.look(now)
            if was_out:
                is_due = now >= out_since + child.length_ns and not missed
                assert (change is State.TRIAL) is is_due
        assert child.epoch == epochs
        assert FIRST_NS // 2 <= child.length_ns <= LONGEST_NS
