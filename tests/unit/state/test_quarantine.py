"""Out after a failure, back after a while, twice as long each time: random lives against what a reader would say."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.state.quarantine import FIRST_NS, FOR_GOOD, LONGEST_NS, NEVER_NS, Quarantine, State

S = 10**9


def test_failing_again_on_probation_doubles_and_success_forgets() -> None:
    connector, now, lengths = Quarantine(), 0, []
    for _ in range(9):
        assert connector.fail(now)
        lengths.append(connector.length_ns)
        assert not connector.look(now + connector.length_ns - 1)
        now += connector.length_ns
        assert connector.look(now)
        assert connector.state is State.PROBATION
    assert lengths == [S, 2 * S, 4 * S, 8 * S, 16 * S, 32 * S, *[LONGEST_NS] * 3]
    assert not connector.look(10**6 * S), "time proves nothing"
    assert not connector.succeed(now - 1), "it began before"
    assert connector.succeed(now)
    assert connector.state is State.FIT
    assert not connector.succeed(now)
    connector.fail(now)
    assert (connector.length_ns, type(connector.length_ns)) == (FIRST_NS, int)


def test_failure_in_quarantine_does_not_make_it_longer() -> None:
    """N7: requests that it knew go on being reported to it, and may fail at every step."""
    connector = Quarantine()
    connector.fail(0)
    assert not connector.fail(S // 2)
    assert (connector.epoch, connector.length_ns) == (1, S)
    assert connector.look(S)


def test_slowness_is_that_of_the_last_quarantine() -> None:
    connector = Quarantine()
    assert connector.fail(0, slow_ns=1)
    assert connector.is_slow
    connector.look(S)
    assert not connector.is_slow, "it takes part"
    connector.fail(S)
    assert not connector.is_slow, "it raised at once"
    assert not connector.fail(S, slow_ns=1)
    assert connector.is_slow, "it is out for having raised, and blocks too"


@pytest.mark.parametrize(("epoch", "begins"), [(0, False), (1, True), (2, True)])
def test_a_worker_may_be_late_with_what_is_known(epoch: int, begins: bool) -> None:
    connector = Quarantine()
    connector.fail(0)
    connector.look(S)
    assert connector.fail(S, epoch=epoch) is begins


def test_for_good_is_for_good() -> None:
    connector = Quarantine()
    assert connector.fail(0, epoch=FOR_GOOD)
    assert not connector.fail(1, epoch=FOR_GOOD)
    assert not connector.fail(1)
    assert connector.length_ns == NEVER_NS
    assert not connector.look(10**9 * S)
    assert not connector.succeed(10**9 * S)
    out = Quarantine()
    out.fail(0)
    assert out.fail(1, epoch=FOR_GOOD), "worse than it was"
    assert not out.look(10**9 * S)


EVENTS = st.tuples(st.sampled_from(["fail", "look", "succeed"]), st.integers(0, 3 * S), st.integers(0, 3 * S))


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_it_is_as_a_reader_would_count(events: list[tuple[str, int, int]]) -> None:
    """Against a model that keeps the whole story: failures in a row, when the last one was, what has begun since."""
    connector, now, failures = Quarantine(), 0, 0
    ends, probation, longest = 0, 0, 0
    epochs = 0
    for event, value, passes in events:
        now += passes
        before = connector.state
        if event == "fail":
            slow_ns = value * (value % 2)
            assert connector.fail(now, slow_ns=slow_ns) is (before is not State.OUT)
            if before is not State.OUT:
                epochs += 1
                failures += 1
                longest = min(max(2 * longest if failures > 1 else FIRST_NS, 8 * slow_ns), LONGEST_NS)
                ends = now + longest
            assert connector.is_slow >= (slow_ns > 0)
            assert connector.state is State.OUT
        elif event == "look":
            assert connector.look(now) is (before is State.OUT and now >= ends)
            probation = now if connector.state is not before else probation
        else:
            assert connector.succeed(now - value) is (before is State.PROBATION and now - value >= probation)
            failures = 0 if connector.state is not before else failures
        assert connector.epoch == epochs
        assert connector.is_slow <= connector.is_out
        assert connector.length_ns == (longest if failures else FIRST_NS // 2)
        assert type(connector.length_ns) is int


def test_a_slow_calls_back_off_is_a_multiple_of_what_it_took() -> None:
    """Trials that block as long again take a ninth of the time at most, from the first one on."""
    connector = Quarantine()
    assert connector.fail(0, slow_ns=int(4.4 * S))
    assert connector.length_ns == int(8 * 4.4 * S)
    assert connector.look(connector.length_ns)
    assert connector.fail(connector.length_ns, slow_ns=int(4.4 * S))
    assert connector.length_ns == LONGEST_NS
    quick = Quarantine()
    assert quick.fail(0, slow_ns=S // 100)
    assert quick.length_ns == FIRST_NS
