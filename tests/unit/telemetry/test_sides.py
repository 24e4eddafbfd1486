"""Each event reaches the observers that record it, and an error no one else; stats travel in every step.

kvobs's own numbers do every two seconds of work, and nothing is left behind.
"""

import inspect
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.probe.increments import Increments
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import CHILD_WIDTH, LOOKUPS, PROCESS_WIDTH, slot
from kvobs.state.events import EVENTS, Observer
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, class_path, has_content
from kvobs.telemetry.sides import EVERY_NS, SOON_NS, Collector, Composed, FlushRule, divert
from kvobs.telemetry.tracing.journal import AT_MOST, Journal
from tests.support.contexts import record

HIT = PROCESS_WIDTH + slot(LOOKUPS, "hit")

# Events


class Noting(Observer):
    """Notes each event under its own name."""

    def __init__(self, name: str, noted: list[Any]) -> None:
        for event in EVENTS:
            setattr(self, event, lambda *args, event=event, **more: noted.append((name, event, args, more)))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_each_observer_as_it_was_announced(event: str) -> None:
    noted: list[Any] = []
    composed = Composed([Noting("one", noted), None, Noting("two", noted)])
    parameters = list(inspect.signature(getattr(Observer, event)).parameters.values())[1:]
    args = tuple(object() for each in parameters if each.kind is not each.KEYWORD_ONLY)
    more = {each.name: object() for each in parameters if each.kind is each.KEYWORD_ONLY}
    getattr(composed, event)(*args, **more)
    assert noted == [(name, event, args, more) for name in ("one", "two")]


class OfLookups(Observer):
    def looked_up(self, request: Any, began_ns: int, ended_ns: int) -> None: ...


def test_lookups_are_timed_only_where_an_observer_records_them() -> None:
    """vLLM repeats them in each step, for each request that waits."""
    assert not Composed([Observer(), Observer()]).wants_lookups
    assert Composed([Observer(), OfLookups()]).wants_lookups


def test_an_observer_that_records_an_event_costs_the_others_nothing() -> None:
    composed = Composed([OfLookups()])
    assert [event for event in EVENTS if event in vars(composed)] == ["looked_up"]


class Broken(Observer):
    def quarantined(self, child: int) -> None:
        raise LookupError(child)


@pytest.mark.usefixtures("in_production")
def test_an_error_in_an_observer_is_counted_and_the_others_get_the_event() -> None:
    noted: list[Any] = []
    Composed([Broken(), Noting("one", noted)]).quarantined(1)
    assert noted == [("one", "quarantined", (1,), {})]
    assert faults.take() == {"record": 1}


# The stats of a process


def numbers_of(stats: MultiKVConnectorStats) -> dict[int, int]:
    own = stats["kvobs"]
    assert isinstance(own, KvobsStats)
    return own.increments().counts


class Telling:
    """A child's connector that has stats."""

    def __init__(self, *noted: KVConnectorStats | None) -> None:
        self.noted = list(noted)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.noted.pop(0)


def collector(*connectors: Any) -> tuple[Collector, Recorder]:
    recorder = Recorder(len(connectors))
    classes = {f"c{i}": class_path(type(c)) for i, c in enumerate(connectors)}
    hooks = [(f"c{i}", c.get_kv_connector_stats) for i, c in enumerate(connectors)]
    collects = Collector(classes, recorder, Journal())
    collects.hooks = hooks
    return collects, recorder


def test_childrens_stats_are_handed_on_in_every_step_and_kvobss_own_numbers_when_due() -> None:
    collects, recorder = collector(Telling(None, KVConnectorStats(data={"n": 1}), None), Telling(None, None, None))
    recorder.count(1, slot(LOOKUPS, "hit"), 5)
    assert collects.collect(is_due=False) is None
    stats: Any = collects.collect(is_due=False)
    assert stats["c0"].data == {"n": 1}
    assert not has_content(stats)
    assert stats["kvobs"].data["children"] == dict.fromkeys(("c0", "c1"), "tests.unit.telemetry.test_sides:Telling")
    stats = collects.collect(is_due=True)
    assert has_content(stats)
    assert list(stats.data) == ["kvobs"]
    assert numbers_of(stats)[HIT + CHILD_WIDTH] == 5


@pytest.mark.parametrize("others", [{}, {"c0": KVConnectorStats(data={"n": 1})}])
def test_the_workers_numbers_are_taken_out_of_their_payload(others: dict[str, KVConnectorStats]) -> None:
    taken, numbers = list[Any](), KvobsStats.of({"c0": "m:C"}, Increments({HIT: 5}, [], {}))
    stats = MultiKVConnectorStats(data={**others, "kvobs": numbers})
    for payload in (None, stats, stats):
        divert(payload, SimpleNamespace(put=taken.append))
    assert [one.increments().counts for one in taken] == [{HIT: 5}, *[{}] * len(others)]
    assert {**stats.data} == ({**others, "kvobs": KvobsStats.bare({"c0": "m:C"})} if others else {})


@pytest.mark.usefixtures("in_production")
def test_numbers_that_can_not_be_taken_cost_the_children_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    collects, _ = collector(Telling(KVConnectorStats(data={"n": 1}), None))
    monkeypatch.setattr(Recorder, "take", lambda self: 1 / 0)
    stats: Any = collects.collect(is_due=True)
    assert stats["c0"].data == {"n": 1}
    assert numbers_of(stats) == {slot(signals.INTERNAL_ERRORS, "flush"): 1}


def test_a_connector_without_stats_is_named_and_not_asked() -> None:
    collects = Collector({"c0": "m:C"}, Recorder(1), Journal())
    assert collects.collect(is_due=False) is None
    stats: Any = collects.collect(is_due=True)
    assert stats["kvobs"].children == {"c0": "m:C"}


def test_span_records_travel_with_the_numbers_once_and_lost_ones_are_counted() -> None:
    journal, sent = Journal(), list[Any]()
    sink: Any = SimpleNamespace(put=sent.append)
    collects = Collector({}, Recorder(1), journal, sink)
    group = [record()]
    journal.add(group)
    journal.drop()
    journal.note_malformed("params")
    collects.feed(sink)
    collects.feed(sink)
    first, second = (stats.increments() for stats in sent)
    assert (first.spans, second.spans) == ([group], [])
    slots = slot(signals.SPANS_DROPPED, "flush"), slot(signals.MALFORMED_CONTEXTS, "params")
    assert [first.counts.get(each) for each in slots] == [1, 1]
    assert not set(slots) & set(second.counts)


def test_every_two_seconds_of_work() -> None:
    rule = FlushRule(Journal())
    decided = [rule.decide(now, has_forward=True, has_finished=False) for now in range(0, 10 * EVERY_NS, EVERY_NS // 5)]
    assert decided == [True, False, False, False, False] * 10


@pytest.mark.parametrize(("spans", "every_ns"), [(0, EVERY_NS), (AT_MOST // 2 - 1, EVERY_NS), (AT_MOST // 2, SOON_NS)])
def test_many_spans_are_sent_sooner(spans: int, every_ns: int) -> None:
    journal = Journal()
    for _ in range(spans):
        journal.add([record()])
    rule = FlushRule(journal)
    assert rule.decide(0, has_forward=True, has_finished=False)
    assert not rule.decide(every_ns - 1, has_forward=True, has_finished=False)
    assert rule.decide(every_ns, has_forward=True, has_finished=False)


@pytest.mark.parametrize(("has_forward", "has_finished"), list(product([False, True], repeat=2)))
def test_shortly_after_a_flush_only_the_end_of_a_burst_flushes(has_forward: bool, has_finished: bool) -> None:
    rule = FlushRule(Journal())
    rule.decide(0, has_forward=True, has_finished=False)
    assert rule.decide(1, has_forward=has_forward, has_finished=has_finished) is (has_finished and not has_forward)


@pytest.mark.parametrize("idle", [EVERY_NS // 2, EVERY_NS, 1000 * EVERY_NS])
@pytest.mark.parametrize("has_forward", [False, True])
def test_after_the_last_flush_of_a_burst_the_next_one_has_all_its_time(idle: int, has_forward: bool) -> None:
    """A first token does not wait for a flush, however long the engine was idle."""
    rule = FlushRule(Journal())
    assert rule.decide(0, has_forward=False, has_finished=True)
    begin = idle
    assert not rule.decide(begin, has_forward=has_forward, has_finished=False)
    assert not rule.decide(begin + EVERY_NS - 1, has_forward=True, has_finished=False)
    assert rule.decide(begin + EVERY_NS, has_forward=True, has_finished=False)


def test_workers_own_payload_counts_as_a_last_flush() -> None:
    rule = FlushRule(Journal())
    rule.decide(0, has_forward=True, has_finished=False)
    rule.decide(1, has_forward=False, has_finished=False)
    rule.flushed()
    assert not rule.decide(5 * EVERY_NS, has_forward=True, has_finished=False)


@pytest.mark.parametrize("reports", [False, True])
def test_steps_longer_than_a_second_all_flush(reports: bool) -> None:
    rule = FlushRule(Journal())
    for now in range(0, 10 * EVERY_NS, EVERY_NS + 1):
        assert rule.decide(now, has_forward=True, has_finished=False)
        if reports:
            rule.flushed()


@given(st.lists(st.tuples(st.integers(0, 2 * EVERY_NS), st.booleans(), st.booleans(), st.booleans()), max_size=60))
def test_no_number_waits_for_longer_than_a_second_and_a_step(steps: list[tuple[int, bool, bool, bool]]) -> None:
    """A number of a step is sent within two seconds of the next one's begin, or by that step itself, or by the last."""
    rule = FlushRule(Journal())
    now, oldest = 0, None
    for waited, has_forward, has_finished, news in steps:
        now += waited
        if oldest is None:
            oldest = now
        flushed = rule.decide(now, has_forward=has_forward, has_finished=has_finished)
        assert flushed or now - oldest < EVERY_NS
        assert flushed or not has_finished or has_forward
        if flushed or (news and not has_forward):
            oldest = None
        if flushed or (news and not has_forward):
            rule.flushed()
