"""Ten minutes are kept, whoever looks, in a bounded room; what is read of them is what /metrics would have had."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry, generate_latest

from kvobs.cli.scrapes import parse
from kvobs.export.history import ALL_S, EVERY_S, LATELY_S, History, values_of
from kvobs.export.totals import TotalsCollector
from kvobs.schema.signals import LOAD_DURATION, LOAD_TOKENS, LOADS, LOOKUPS, slot, word
from tests.support.written import CONNECTORS, Numbers, Pages, numbers, stopped_clock

HIT = word(0, slot(LOOKUPS, "hit"))
TOKENS = word(1, slot(LOAD_TOKENS))
MS = 10**6


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None)
@given(numbers())
def test_values_are_those_of_the_text(counted: Numbers) -> None:
    pages = Pages()
    counted.add_to(pages.writers[0])
    registry = CollectorRegistry()
    totals = pages.totals()
    registry.register(TotalsCollector(lambda: [totals]))

    def bounds_as_numbers(values: Any) -> dict[Any, Any]:
        return {
            (name, frozenset((k, float(v) if k == "le" else v) for k, v in labels)): pytest.approx(value)
            for (name, labels), value in values.items()
        }

    with stopped_clock():
        text = generate_latest(registry).decode()
        assert bounds_as_numbers(values_of(totals.series())) == bounds_as_numbers(parse(text))


def test_numbers_from_a_minute_ago_exist_but_not_after_a_stop() -> None:
    pages, clock = Pages(), Clock()
    history = History(pages.totals(), clock)
    assert history.scrapes()[0] is None

    def hits() -> list[float | None]:
        return [
            None if scrape is None else sum(n for (name, _), n in scrape.values.items() if name == LOOKUPS.name)
            for scrape in history.scrapes()
        ]

    for second in range(200):
        pages.add(HIT)
        clock.now = float(second)
        history.sample()
    before, now = hits()
    assert now == 200
    assert before is not None
    assert LATELY_S - EVERY_S <= now - before <= LATELY_S + EVERY_S
    clock.now += 3 * LATELY_S
    assert hits() == [None, 200]


def test_a_course_has_rates_failures_and_durations_per_interval() -> None:
    pages, clock = Pages(), Clock()
    history = History(pages.totals(), clock)
    duration = word(1, slot(LOAD_DURATION, "sync"))
    for ms, tokens, failed in ((100, 2000, 0), (400, 4000, 3), (None, 0, 0)):
        history.sample()
        clock.now += EVERY_S
        pages.add(TOKENS, tokens)
        if failed:
            pages.add(word(1, slot(LOADS, "async", "failed")), failed)
        if ms is not None:
            pages.add(duration + LOAD_DURATION.bucket(ms * MS))
    history.sample()
    first, second, third = history.course(CONNECTORS[1])
    assert [each.begin_ago_s for each in (first, second, third)] == [3 * EVERY_S, 2 * EVERY_S, EVERY_S]
    assert [each.tokens_per_s for each in (first, second, third)] == [2000 / EVERY_S, 4000 / EVERY_S, 0]
    assert [each.failed for each in (first, second, third)] == [0, 3, 0]
    assert [first.p50_s, second.p99_s] == [pytest.approx(0.1, rel=0.1), pytest.approx(0.4, rel=0.1)]
    assert (third.p50_s, third.p99_s) == (None, None)
    assert all(each.tokens_per_s == 0 for each in history.course(CONNECTORS[0]))
    assert history.course("unknown") == []


def test_ten_minutes_are_kept_and_take_less_than_a_megabyte() -> None:
    pages, clock = Pages(None, *range(8)), Clock()
    history = History(pages.totals(), clock)
    history.sample()
    tracemalloc.start()
    for _ in range(200):
        clock.now += EVERY_S
        pages.add(HIT, 10**12)
        history.sample()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    course = history.course(CONNECTORS[0])
    assert len(course) == ALL_S / EVERY_S
    assert course[0].begin_ago_s == ALL_S
    assert kept < 2**20


def test_a_sample_is_taken_once_in_its_time() -> None:
    pages, clock = Pages(), Clock()
    history = History(pages.totals(), clock)
    for second in range(int(EVERY_S) + 1):
        clock.now = float(second)
        history.sample()
    assert len(history.course(CONNECTORS[0])) == 1


def test_an_engine_whose_pages_are_not_there_yet_has_no_sample() -> None:
    pages = Pages()
    pages.writers[0].close()
    history = History(pages.totals())
    history.sample()
    assert history.index == ""
    assert history.course(CONNECTORS[0]) == []
    assert {name for name, _ in history.scrapes()[1].values} == set()
