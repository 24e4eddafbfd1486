"""A flush has room for so many spans: the slow and failed first, groups whole, and what is lost counted."""

import threading
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from kvobs.probe.increments import Group
from kvobs.schema import signals
from kvobs.schema.spans import Reason
from kvobs.telemetry.tracing.journal import AT_MOST, Journal
from tests.support.contexts import record

DROPPED = signals.slot(signals.SPANS_DROPPED, "flush")


def counts(dropped: int) -> dict[int, int]:
    return {DROPPED: dropped} if dropped else {}


def group(size: int, is_urgent: bool = False, mark: int = 0) -> Group:
    """Return a group of which, if it is urgent, one record is."""
    records = [record(start_ns=mark) for _ in range(size)]
    if is_urgent:
        records[-1] = record(start_ns=mark, reason=Reason.SLOW)
    return records


@dataclass
class Model:
    """The rules, stated plainly: an urgent group takes the room of the ordinary ones that came last."""

    urgent: list[Group] = field(default_factory=list)
    ordinary: list[Group] = field(default_factory=list)
    dropped: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.urgent + self.ordinary))

    def add(self, group: Group, is_urgent: bool) -> None:
        if not is_urgent:
            if self.size + len(group) > AT_MOST:
                self.dropped += len(group)
            else:
                self.ordinary.append(group)
        elif sum(map(len, self.urgent)) + len(group) > AT_MOST:
            self.dropped += len(group)
        else:
            while self.size + len(group) > AT_MOST:
                self.dropped += len(self.ordinary.pop())
            self.urgent.append(group)


sizes = st.sampled_from([1, 2, 9, 30, 60, AT_MOST]) | st.integers(1, AT_MOST)
TAKE, DROP = "take", "drop"


@given(st.lists(st.sampled_from([TAKE, DROP]) | st.tuples(sizes, st.booleans()), max_size=40))
def test_slow_and_failed_spans_displace_others_and_each_loss_is_counted(events: list[str | tuple[int, bool]]) -> None:
    journal, model = Journal(), Model()
    for number, event in enumerate([*events, TAKE]):
        if event == TAKE:
            assert journal.take() == ([*model.urgent, *model.ordinary], counts(model.dropped))
            model = Model()
        elif event == DROP:
            journal.drop()
            model.dropped += 1
        else:
            assert not isinstance(event, str)
            size, is_urgent = event
            journal.add(group(size, is_urgent, number))
            model.add(group(size, is_urgent, number), is_urgent)
        assert journal.is_full is (model.size >= AT_MOST)
        assert journal.has_urgent is bool(model.urgent)
        assert model.size <= AT_MOST
    assert journal.take() == ([], {})


def test_list_that_was_handed_in_may_be_used_again() -> None:
    journal, mine = Journal(), group(2)
    journal.add(mine)
    mine.clear()
    assert [len(kept) for kept in journal.take()[0]] == [2]


def test_several_threads_lose_nothing_uncounted() -> None:
    journal, rounds = Journal(), 3_000
    taken: list[Group] = []
    dropped = 0

    def write(is_urgent: bool) -> None:
        for _ in range(rounds):
            journal.add(group(3, is_urgent))

    threads = [threading.Thread(target=write, args=(is_urgent,)) for is_urgent in (False, True)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        groups, lost = journal.take()
        taken, dropped = taken + groups, dropped + lost.get(DROPPED, 0)
    groups, lost = journal.take()
    assert 3 * len(taken + groups) + dropped + lost.get(DROPPED, 0) == 2 * 3 * rounds
    assert all(len(kept) == 3 for kept in taken + groups)
