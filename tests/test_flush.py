"""Numbers travel every 100 ms of work, and nothing is left behind when the engine falls idle."""

from itertools import product

import pytest

from kvobs.flush import EVERY_NS, FlushRule


def test_every_100_ms_of_work() -> None:
    rule = FlushRule()
    times = range(0, 10 * EVERY_NS, EVERY_NS // 5)
    decided = [rule.decide(now, has_forward=True, has_finished=False) for now in times]
    assert decided == [True, False, False, False, False] * 10


@pytest.mark.parametrize(("has_forward", "has_finished"), list(product([False, True], repeat=2)))
def test_shortly_after_a_flush_only_the_last_word_of_a_burst(has_forward: bool, has_finished: bool) -> None:
    rule = FlushRule()
    rule.decide(0, has_forward=True, has_finished=False)
    assert rule.decide(1, has_forward=has_forward, has_finished=has_finished) is (has_finished and not has_forward)
