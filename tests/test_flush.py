"""Numbers travel every 100 ms of work, and nothing is left behind when the engine falls idle."""

from itertools import product

import pytest

from kvobs.flush import EVERY_NS, Flush, FlushRule


def test_every_100_ms_of_work() -> None:
    rule = FlushRule()
    times = range(0, 10 * EVERY_NS, EVERY_NS // 5)
    decided = [rule.decide(now, tokens=8, finished=False) for now in times]
    assert decided == [Flush.YES, Flush.NO, Flush.NO, Flush.NO, Flush.NO] * 10


@pytest.mark.parametrize(("tokens", "finished"), list(product([0, 8], [False, True])))
def test_shortly_after_a_flush(tokens: int, finished: bool) -> None:
    rule = FlushRule()
    rule.decide(0, tokens=8, finished=False)
    expected = Flush.NO if tokens else Flush.YES if finished else Flush.IF_REPORTING
    assert rule.decide(1, tokens=tokens, finished=finished) is expected


@pytest.mark.parametrize(
    ("flush", "due"),
    [(Flush.NO, (False, False)), (Flush.IF_REPORTING, (False, True)), (Flush.YES, (True, True))],
)
def test_a_worker_obeys_and_adds_what_it_has_to_report(flush: Flush, due: tuple[bool, bool]) -> None:
    assert tuple(flush.is_due(is_reporting=reporting) for reporting in (False, True)) == due
