"""Out after a failure, back after a while, twice as long each time: random lives against what a reader would say."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.state.quarantine import FIRST_NS, FOR_GOOD, LONGEST_NS, NEVER_NS, Quarantine, State

S = 10**9


def test_failing_again_on_trial_doubles_and_being_fit_forgets() -> None:
    child, now, lengths = Quarantine(), 0, []
    for _ in range(9):
        assert child.fail(now)
        lengths.append(child.length_ns)
        assert child.look(now + child.length_ns - 1) is None
        now += child.length_ns
        assert child.look(now) is State.PROBATION
    assert lengths == [S, 2 * S, 4 * S, 8 * S, 16 * S, 32 * S, *[LONGEST_NS] * 3]
    assert child.look(now + LONGEST_NS - 1) is None
    assert child.look(now + LONGEST_NS) is State.FIT
    assert child.look(10**6 * S) is None
    child.fail(now + LONGEST_NS)
    assert (child.length_ns, type(child.length_ns)) == (FIRST_NS, int)


def test_failure_in_quarantine_does_not_make_it_longer() -> None:
    """N7: requests that it knew go on being reported to it, and may fail at every step."""
    child = Quarantine()
    child.fail(0)
    assert not child.fail(S // 2)
    assert (child.epoch, child.length_ns) == (1, S)
    assert child.look(S) is State.PROBATION


def test_slowness_is_that_of_the_last_quarantine() -> None:
    child = Quarantine()
    assert child.fail(0, slow_ns=1)
    assert child.is_slow
    child.look(S)
    assert not child.is_slow, "it takes part"
    child.fail(S)
    assert not child.is_slow, "it raised at once"
    assert not child.fail(S, slow_ns=1)
    assert child.is_slow, "it is out for having raised, and blocks too"


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


@given(st.lists(st.tuples(st.sampled_from(["fail", "look"]), st.booleans(), st.integers(0, 3 * S)), max_size=60))
def test_whatever_happens_it_is_out_for_its_time_and_never_longer(events: list[tuple[str, bool, int]]) -> None:
    child, now, out_since = Quarantine(), 0, 0
    epochs = 0
    for event, by_slowness, passes in events:
        now += passes
        was_out = child.is_out
        if event == "fail":
            assert child.fail(now, slow_ns=int(by_slowness)) is not was_out
            if not was_out:
                out_since = now
                epochs += 1
            assert child.is_slow >= by_slowness
        else:
            change = child.look(now)
            if was_out:
                assert (change is State.PROBATION) is (now >= out_since + child.length_ns)
                assert child.is_out is (change is None)
        assert child.epoch == epochs
        assert child.is_slow <= child.is_out
        assert FIRST_NS // 2 <= child.length_ns <= LONGEST_NS
        assert type(child.length_ns) is int


def test_a_slow_calls_back_off_is_a_multiple_of_what_it_took() -> None:
    """Trials that block as long again take a ninth of the time at most, from the first one on."""
    child = Quarantine()
    assert child.fail(0, slow_ns=int(4.4 * S))
    assert child.length_ns == int(8 * 4.4 * S)
    assert child.look(child.length_ns) is State.PROBATION
    assert child.fail(child.length_ns, slow_ns=int(4.4 * S))
    assert child.length_ns == LONGEST_NS
    quick = Quarantine()
    assert quick.fail(0, slow_ns=S // 100)
    assert quick.length_ns == FIRST_NS
