"""The line of the log about each connector: what it did since the last one."""

import logging
from time import monotonic
from typing import Any

import pytest

from kvobs.export import summary
from kvobs.export.summary import DEFAULT_S, Summary, interval_s, summarize
from kvobs.schema import signals
from kvobs.schema.signals import slot, word
from tests.support.written import CONNECTORS, Pages

MS = 10**6


def counted(index: int, signal: Any, *values: str) -> int:
    return word(index, slot(signal, *values))


def observe(pages: Pages, index: int, signal: Any, ns: int, *values: str) -> None:
    first = counted(index, signal, *values)
    pages.add(first + signal.bucket(ns))
    pages.add(first + signal.sum_offset, ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [monotonic()]
    monkeypatch.setattr(summary, "monotonic", lambda: now[0])
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    return now


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "connector" in record.getMessage()]
    caplog.clear()
    return found


def test_each_connector_that_was_active_has_a_line_per_interval(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pages, mine = Pages(None, 0), Summary()
    engine = pages.engine()
    pages.add(counted(0, signals.LOOKUPS, "hit"), 3)
    pages.add(counted(0, signals.LOOKUPS, "miss"), 1)
    pages.writers[1].rows.add(signals.CALL_ERRORS, 1, ("wait_for_save", "OSError"), 2)
    mine.log(engine, 7)
    assert lines(caplog) == [], "the interval is not over"
    clock[0] += DEFAULT_S
    mine.log(engine, 7)
    mine.log(engine, 7)
    assert lines(caplog) == [
        "engine 007, connector one: lookups=4, hits=3",
        "engine 007, connector two: errors=2",
    ]
    pages.add(counted(0, signals.LOOKUPS, "hit"), 1, writer=1)
    pages.writers[1].rows.add(signals.CALL_ERRORS, 1, ("wait_for_save", "OSError"), 1)
    clock[0] += DEFAULT_S
    mine.log(engine, 7)
    assert lines(caplog) == ["engine 007, connector one: lookups=1, hits=1", "engine 007, connector two: errors=1"]
    clock[0] += DEFAULT_S
    mine.log(engine, 7)
    assert lines(caplog) == [], "nothing has happened"


def test_numbers_of_later_processes_are_in_the_next_line(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pages, mine = Pages(None), Summary()
    engine = pages.engine()
    clock[0] += DEFAULT_S
    mine.log(engine, 0)
    pages.begin(0).add(counted(1, signals.LOADS, "async", "failed"), 2)
    engine.find()
    clock[0] += DEFAULT_S
    mine.log(engine, 0)
    assert lines(caplog) == ["engine 000, connector two: failed_loads=2"]


def test_before_its_first_page_nothing_is_logged(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    pages, mine = Pages(), Summary()
    pages.writers[0].close()
    clock[0] += DEFAULT_S
    mine.log(pages.engine(), 0)
    assert lines(caplog) == []


def summarized(pages: Pages) -> dict[str, dict[str, int | float]]:
    engine = pages.engine()
    return summarize(CONNECTORS, engine.counts(), engine.rows())


def test_loads_have_their_times_and_gains_where_estimated() -> None:
    pages = Pages()
    pages.add(counted(0, signals.LOADS, "async", "ok"), 2)
    pages.add(counted(0, signals.LOADS, "sync", "ok"), 1)
    pages.add(counted(0, signals.LOADS, "async", "aborted"), 1)
    pages.add(counted(0, signals.LOAD_TOKENS), 320)
    for ms in (10, 20, 60):
        observe(pages, 0, signals.LOAD_DURATION, ms * MS, "async" if ms < 60 else "sync")
    assert summarized(pages)["one"] | {"load_p99_ms": 0} == {
        "loads": 3, "load_tokens": 320, "load_mean_ms": 30, "load_p99_ms": 0, "aborted_loads": 1, "estimated_loads": 0,
    }  # fmt: skip
    assert 50 < summarized(pages)["one"]["load_p99_ms"] < 72
    pages.add(counted(0, signals.ESTIMATED_LOADS), 2)
    pages.add(counted(0, signals.PREFILL_SAVED), 50 * MS)
    pages.add(counted(0, signals.LOAD_WAITED), 80 * MS)
    found = summarized(pages)["one"]
    assert (found["estimated_loads"], found["gain_ms"]) == (2, -30)
    assert list(summarized(pages)) == ["one"], "the other one was not used"


@pytest.mark.parametrize(("ns", "shown"), [(MS - 1, None), (MS, 1), (1_600_000, 2)])
def test_waits_of_a_millisecond_and_more_are_shown(ns: int, shown: int | None) -> None:
    pages = Pages()
    for signal in (signals.LOAD_STALL, signals.SAVE_STALL):
        observe(pages, 1, signal, ns)
    found = summarized(pages).get("two", {})
    assert (found.get("load_wait_ms"), found.get("save_wait_ms")) == (shown, shown)


@pytest.mark.parametrize(("value", "seconds"), [(None, DEFAULT_S), ("2.5", 2.5), ("often", DEFAULT_S)])
def test_the_interval_is_that_of_vllms_own_line(
    value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", value)
    assert interval_s() == seconds
