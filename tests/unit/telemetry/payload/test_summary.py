"""The log says what a child was asked and what became of it, and leaves out what did not happen."""

from __future__ import annotations

import pytest

from kvobs.schema import signals
from kvobs.schema.signals import slot
from kvobs.telemetry.payload.summary import summarize
from kvobs.telemetry.recording.recorder import Recorder


def numbers(recorder: Recorder, *names: str) -> dict[str, dict[str, int | float]]:
    return summarize(names, recorder.take())


def test_a_busy_child_in_a_few_numbers() -> None:
    recorder = Recorder(2)
    for outcome, n in {"hit": 3, "miss": 4, "pending": 1}.items():
        recorder.count(1, slot(signals.LOOKUPS, outcome), n)
    for mode, n in {"async": 2, "sync": 1}.items():
        recorder.count(1, slot(signals.LOADS, mode, "ok"), n)
        for _ in range(n):
            recorder.observe(1, signals.LOAD_DURATION, 3_000_000, mode)
    recorder.count(1, slot(signals.LOADS, "async", "failed"))
    recorder.count(1, slot(signals.LOAD_TOKENS), 640)
    recorder.failed(1, "wait_for_save", 0, 5, OSError())
    recorder.observe(1, signals.LOAD_STALL, 12_400_000)
    recorder.observe(1, signals.SAVE_STALL, 400_000)
    assert numbers(recorder, "idle", "busy") == {
        "busy": {
            "lookups": 8,
            "hits": 3,
            "loads": 3,
            "load_tokens": 640,
            "load_p99_ms": 4.19,
            "failed_loads": 1,
            "errors": 1,
            "load_wait_ms": 12,
        }
    }


def test_an_idle_child_has_no_numbers() -> None:
    recorder = Recorder(1)
    recorder.timed(0, "wait_for_save", lambda: None)()
    assert numbers(recorder, "idle") == {}


@pytest.mark.parametrize(
    ("durations_ms", "bound"), [([1] * 99 + [900], 1.05), ([1] * 98 + [900] * 2, 1070.0), ([60_000, 10_000], 70_000.0)]
)
def test_the_99th_percentile_is_the_bound_of_its_bucket_or_of_all_together(
    durations_ms: list[int], bound: float
) -> None:
    recorder = Recorder(1)
    recorder.count(0, slot(signals.LOADS, "async", "ok"), len(durations_ms))
    for ms in durations_ms:
        recorder.observe(0, signals.LOAD_DURATION, ms * 1_000_000, "async")
    assert numbers(recorder, "c")["c"]["load_p99_ms"] == bound


def named(value: object) -> str:
    """Return a name that is the same in each of the processes that run tests: the order of a set is not."""
    return "+".join(sorted(value)) if isinstance(value, set) else str(getattr(value, "name", value))


COUNTED = [
    (signals.LOOKUPS, ("hit",), {"lookups", "hits"}),
    (signals.LOOKUPS, ("miss",), {"lookups"}),
    (signals.LOOKUPS, ("pending",), {"lookups"}),
    *((signals.LOADS, (mode, "ok"), {"loads"}) for mode in ("async", "sync")),
    *((signals.LOADS, (mode, "failed"), {"failed_loads"}) for mode in ("async", "sync")),
    *((signals.LOADS, (mode, "aborted"), {"aborted_loads"}) for mode in ("async", "sync")),
    (signals.LOAD_TOKENS, (), {"load_tokens"}),
    (signals.UNUSED_HIT_TOKENS, ("other_chosen",), {"unused_hit_tokens"}),
    (signals.UNUSED_HIT_TOKENS, ("aborted",), set()),
    *((signals.SAVES, (outcome,), {"promised_saves"}) for outcome in signals.SAVES.labels["outcome"]),
    (signals.SLOW_CALLS, ("wait_for_save",), {"slow_calls"}),
    (signals.STRAY_REPORTS, ("load",), set()),
]


@pytest.mark.parametrize(("signal", "values", "keys"), COUNTED, ids=named)
def test_each_count_is_under_its_keys_and_no_other(
    signal: signals.Signal, values: tuple[str, ...], keys: set[str]
) -> None:
    recorder = Recorder(2)
    recorder.count(0, slot(signal, *values), 7)
    assert numbers(recorder, "one", "two") == ({"one": dict.fromkeys(keys, 7)} if keys else {})


@pytest.mark.parametrize(
    ("signal", "key"), [(signals.LOAD_STALL, "load_wait_ms"), (signals.SAVE_STALL, "save_wait_ms")]
)
def test_waits_are_shown_from_a_millisecond_on(signal: signals.Signal, key: str) -> None:
    for ns, shown in ((999_999, {}), (1_000_000, {"c": {key: 1}}), (2_600_000, {"c": {key: 3}})):
        recorder = Recorder(1)
        recorder.observe(0, signal, ns)
        assert numbers(recorder, "c") == shown


def test_the_errors_of_a_child_are_its_own() -> None:
    recorder = Recorder(2)
    for _ in range(2):
        recorder.count_error(1, "wait_for_save", 0, 5, OSError())
    recorder.count_error(1, "wait_for_save", 0, 5, KeyError())
    recorder.count_open(0, signals.SLOWEST_RANK, "3")
    assert numbers(recorder, "one", "two") == {"two": {"errors": 3}}
