"""Every call is timed, counted and let through; what is counted is in the page at once."""

import itertools
import logging
import threading
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs import faults
from kvobs.clock import WALL_OFFSET
from kvobs.probe import native, recorder
from kvobs.probe.pure import PureProbe
from kvobs.probe.recorder import ERROR_TYPES_AT_MOST, NEVER, SUM, CallEvent, Recorder, cost_of_recording
from kvobs.schema import signals
from kvobs.schema.signals import CALL_DURATION, CONNECTOR_WIDTH, OTHER_VALUE, PROCESS_WIDTH, Scope, Signal, slot
from tests.support.contexts import Noting
from tests.support.numbers import locate, numbers
from tests.support.probes import PROBES, Kind, each_probe, recorder_of

HOOK = "wait_for_save"


class Clock:
    """Reads these times, one after the other."""

    def __init__(self, *times: int) -> None:
        self.times = [*times]

    def __call__(self) -> int:
        return self.times.pop(0)


def series(counts: dict[int, int]) -> dict[tuple[int, str, tuple[str, ...]], dict[int, int]]:
    """Return (connector, metric, label values) -> which of its slots -> number, kvobs's own cost left out."""
    found: dict[Any, dict[int, int]] = {}
    for place, n in counts.items():
        of, offset, index = locate(place)
        if of.signal is not signals.OVERHEAD_SECONDS:
            found.setdefault((index, of.signal.name, of.values), {})[offset] = n
    return found


@each_probe
@given(st.integers(0, 2**40))
def test_a_call_falls_into_the_first_bucket_that_holds_it(kind: Kind, ns: int) -> None:
    mine = recorder_of(kind, 2, clock=Clock(1000, 1000 + ns))
    assert mine.timed(1, HOOK, lambda *args, **kwargs: (args, kwargs))(1, two=2) == ((1,), {"two": 2})
    bucket = next((i for i, k in enumerate(CALL_DURATION.bounds) if ns <= k), len(CALL_DURATION.bounds))
    expected = {bucket: 1, len(CALL_DURATION.bounds) + 1: ns}
    assert series(numbers(mine).counts) == {
        (1, CALL_DURATION.name, (HOOK,)): {offset: n for offset, n in expected.items() if n}
    }


@each_probe
@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_error_is_counted_by_class_and_goes_on_untouched(kind: Kind, error: BaseException) -> None:
    mine = recorder_of(kind, 2)

    def fail() -> None:
        raise error

    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            mine.timed(1, HOOK, fail)()
        assert raised.value is error
    found = numbers(mine)
    assert found.opened == [["kvobs_call_errors_total", 1, HOOK, type(error).__name__, 2]]
    assert series(found.counts).keys() == {(1, CALL_DURATION.name, (HOOK,))}


@each_probe
def test_a_call_that_raised_is_not_in_progress_in_the_page(kind: Kind) -> None:
    mine = recorder_of(kind, 1)
    with suppress(OSError):
        mine.timed(0, HOOK, Mock(side_effect=OSError))()
    begun = mine.page.marks(0, HOOK)
    assert 0 < mine.page.words[begun] == mine.page.words[begun + 1]


@each_probe
@pytest.mark.usefixtures("in_production")
def test_a_call_whose_exception_can_not_be_noted_is_over_as_well(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = recorder_of(kind, 1)
    monkeypatch.setattr(mine.page, "raised", Mock(side_effect=LookupError))
    with suppress(OSError):
        mine.timed(0, HOOK, Mock(side_effect=OSError))()
    begun = mine.page.marks(0, HOOK)
    assert 0 < mine.page.words[begun] == mine.page.words[begun + 1]
    assert faults.take() == {"record": 1}


@each_probe
def test_slow_calls_count_and_one_is_logged(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0, 50_000_000, 0, 50_000_001, 0, 90_000_000)
    mine = recorder_of(kind, 1, slow_ns=50_000_000, names=("disk",), clock=clock)
    call = mine.timed(0, HOOK, lambda: None)
    for _ in range(3):
        call()
    assert numbers(mine).counts[PROCESS_WIDTH + slot(signals.SLOW_CALLS, HOOK)] == 2
    assert [r.getMessage() for r in caplog.records] == [
        "connector 'disk': wait_for_save took 50 ms, more than slow_call_ms (50). Further slow calls are only counted "
        "(kvobs_slow_calls_total)"
    ]


def test_a_wait_for_a_core_is_not_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0, 70_000_000, 0, 70_000_000)
    mine = recorder_of(PureProbe, 1, slow_ns=50_000_000, names=("disk",), clock=clock)
    call = mine.timed(0, HOOK, lambda: None)
    with caplog.at_level(logging.INFO):
        for waited_ns in (30_000_000, 10_000_000):
            monkeypatch.setattr(mine.pauses, "waited_ns", lambda begin, spent, ns=waited_ns: ns)
            call()
    assert numbers(mine).counts[PROCESS_WIDTH + slot(signals.SLOW_CALLS, HOOK)] == 2
    text = "connector 'disk': wait_for_save took 70 ms, more than slow_call_ms (50)"
    assert [(line.levelno, line.getMessage().removeprefix(text)[:5]) for line in caplog.records] == [
        (logging.INFO, ", pos"), (logging.WARNING, ". Fur")
    ]  # fmt: skip


@each_probe
def test_two_threads_lose_nothing(kind: Kind) -> None:
    mine = recorder_of(kind, 1)
    call = mine.timed(0, HOOK, lambda: None)
    threads = [threading.Thread(target=lambda: [call() for _ in range(20_000)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        numbers(mine)  # a reader changes nothing
    (found,) = series(numbers(mine).counts).values()
    assert sum(n for offset, n in found.items() if offset <= len(CALL_DURATION.bounds)) == 40_000
    assert found[len(CALL_DURATION.bounds) + 1] == mine.words[mine.calls(0, HOOK) + SUM]


@pytest.mark.usefixtures("hasty_threads")
def test_errors_of_two_threads_are_counted_once() -> None:
    mine, counted = Recorder(1), 0
    labels = signals.CALL_ERRORS, HOOK, "OSError"
    threads = [
        threading.Thread(target=lambda: [mine.count_dynamic(0, *labels) for _ in range(50_000)]) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        before, counted = counted, sum(row[-1] for row in numbers(mine).opened)
        assert before <= counted
    assert numbers(mine).opened == [["kvobs_call_errors_total", 0, HOOK, "OSError", 100_000]]


counted = st.tuples(st.integers(0, 2), st.integers(0, CONNECTOR_WIDTH - 1), st.integers(0, 1000))


@each_probe
@given(st.lists(counted))
def test_counts_add_up(kind: Kind, events: list[tuple[int, int, int]]) -> None:
    mine = recorder_of(kind, 3)
    expected: dict[int, int] = {}
    for index, own, n in events:
        mine.count(index, own, n)
        place = PROCESS_WIDTH + index * CONNECTOR_WIDTH + own
        expected[place] = expected.get(place, 0) + n
        assert mine.words[mine.page.layout.counts + place] == expected[place], "at once"
    found = numbers(mine)
    assert found.counts | {at: n + 1 for at, n in found.gauges.items()} == {at: n for at, n in expected.items() if n}


histograms = st.sampled_from([s for s in signals.SIGNALS if s.bounds and s.scope is Scope.CONNECTOR])


@given(histograms, st.integers(-5, 2**40))
def test_an_observation_has_its_bucket_and_is_never_negative(signal: Signal, ns: int) -> None:
    mine = Recorder(1)
    mine.observe(0, signal, ns, *[next(iter(v)) for v in signal.labels.values()])
    (found,) = series(numbers(mine).counts).values()
    buckets = {offset: n for offset, n in found.items() if offset <= len(signal.bounds)}
    bucket = next((i for i, k in enumerate(signal.bounds) if ns <= k), len(signal.bounds))
    assert buckets == {bucket: 1}
    assert found.get(len(signal.bounds) + 1, 0) == max(0, ns)


def test_a_set_gauge_may_be_zero_and_one_that_was_not_is_none() -> None:
    mine = Recorder(2)
    of_connector, of_process = slot(signals.IN_FLIGHT, "load"), slot(signals.LOCAL_CACHE_TOKENS)
    assert numbers(mine).gauges == {}
    mine.set_gauge(None, of_process, 5)
    mine.set_gauge(1, of_connector, 3)
    place = PROCESS_WIDTH + CONNECTOR_WIDTH + of_connector
    assert numbers(mine).gauges == {of_process: 5, place: 3}
    mine.set_gauge(1, of_connector, 0)
    assert numbers(mine).gauges == {of_process: 5, place: 0}


@each_probe
def test_the_sum_of_a_histogram_may_wrap_around(kind: Kind) -> None:
    mine, ns = recorder_of(kind, 1), (2**63 - 1, 5, 2**62)
    for each in ns:
        mine.observe(0, signals.LOAD_RESUME_DELAY, each)
    at = mine.histogram(0, signals.LOAD_RESUME_DELAY) + signals.LOAD_RESUME_DELAY.sum_offset
    assert mine.words[at] % 2**64 == sum(ns) > 2**63, "readers take it without a sign"


def test_cost_of_recording_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost_of_recording() >= 0
    clock = itertools.count(0, 10).__next__
    monkeypatch.setattr(recorder, "perf_counter_ns", clock)
    monkeypatch.setattr(native, "probe", lambda *page: PROBES["python"](*page, clock))
    assert cost_of_recording.__wrapped__(calls=4, rounds=2) == 20, "two readings of the clock beyond the call"


@each_probe
@given(st.integers(0, 200), st.integers(1, 200), st.booleans(), st.booleans())
def test_the_tracer_gets_slow_failed_or_all(
    kind: Kind, spent: int, slow_ns: int, fails: bool, traces_all: bool
) -> None:
    def traced(subject: str) -> None:
        if fails:
            raise LookupError(subject)

    tracer: Any = Noting(traces_all)
    mine = recorder_of(kind, 2, slow_ns, listener=tracer, clock=Clock(1000, 1000 + spent))
    call = mine.timed(1, HOOK, traced)
    with suppress(LookupError):
        call("request")
    is_slow = spent > slow_ns
    error = "LookupError" if fails else ""
    start, is_only_slow = 1000 + WALL_OFFSET, is_slow and not fails
    expected = CallEvent(1, HOOK, start, spent, is_only_slow, error, "request", {}, is_many=False)
    assert tracer.noticed == ([expected] if fails or is_slow or traces_all else [])
    slow = numbers(mine).counts.get(PROCESS_WIDTH + CONNECTOR_WIDTH + slot(signals.SLOW_CALLS, HOOK), 0)
    assert slow == int(is_slow), "what is slow is counted whatever is traced"


def test_endless_error_classes_are_one_in_counts_and_spans() -> None:
    tracer: Any = Noting()
    mine = Recorder(1, listener=tracer)
    for i in range(ERROR_TYPES_AT_MOST + 5):
        mine.failed(0, HOOK, 0, 1, type(f"Error{i}" + "E" * 1000, (Exception,), {})())
    kinds = [event.error for event in tracer.noticed]
    assert len(set(kinds)) == ERROR_TYPES_AT_MOST + 1
    assert (kinds[-1], max(map(len, kinds))) == (OTHER_VALUE, 64)
    opened = numbers(mine).opened
    assert [row[3] for row in opened] == list(dict.fromkeys(kinds))
    assert opened[-1] == ["kvobs_call_errors_total", 0, HOOK, OTHER_VALUE, 5]


@pytest.mark.parametrize(
    ("hook", "limit"), [("start_load_kv", 100), ("register_kv_caches", NEVER), ("reset_cache", NEVER)]
)
@each_probe
def test_hooks_called_once_are_never_slow(kind: Kind, hook: str, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    tracer: Any = Noting()
    clock = Clock(0, min(limit, 2**61), 0, min(limit + 1, 2**61))
    mine = recorder_of(kind, 1, 100, ("disk",), listener=tracer, clock=clock)
    assert mine.slow_ns[hook] == limit
    call = mine.timed(0, hook, lambda: None)
    for _ in range(2):
        call()
    is_ever_slow = limit < 2**62
    labels = {values for _, name, values in series(numbers(mine).counts) if name == CALL_DURATION.name}
    assert labels == {(hook if is_ever_slow else "other",)}
    assert [event.spent_ns for event in tracer.noticed] == ([limit + 1] if is_ever_slow else [])
    assert ([f"more than slow_call_ms ({limit / 1e6:g})" in caplog.text] == [True]) is is_ever_slow
