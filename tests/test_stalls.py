"""The steps' waits add up to the calls' durations, child by child; what was not called is not observed."""

from __future__ import annotations

from kvobs import signals
from kvobs.recorder import SUM, Recorder
from kvobs.signals import locate
from kvobs.stalls import Stalls


def spend(recorder: Recorder, child: int, hook: str, ns: int) -> None:
    recorder.durations(child, hook)[SUM] += ns


def observed(recorder: Recorder) -> dict[tuple[int, str], int]:
    """Return (child, metric) -> how many observations."""
    found: dict[tuple[int, str], int] = {}
    for place, n in recorder.take().counts.items():
        series, offset, child = locate(place)
        if series.signal in (signals.LOAD_STALL, signals.SAVE_STALL) and offset <= len(series.signal.bounds):
            key = (child, series.signal.name)
            found[key] = found.get(key, 0) + n
    return found


def test_each_step_has_what_its_own_calls_took() -> None:
    recorder = Recorder(2)
    stalls = Stalls(2, recorder)
    for layer_ns in (3, 4):
        for _ in range(2):
            spend(recorder, 0, "wait_for_layer_load", layer_ns)
        spend(recorder, 1, "save_kv_layer", 5)
        spend(recorder, 1, "wait_for_save", 6)
        assert stalls.close_step(waits_for_start=False) == [2 * layer_ns, 0]
    assert observed(recorder) == {(0, "kvobs_load_stall_seconds"): 2, (1, "kvobs_save_stall_seconds"): 2}


def test_start_load_kv_is_waited_for_only_where_a_sync_load_is_due() -> None:
    recorder = Recorder(1)
    stalls = Stalls(1, recorder)
    spend(recorder, 0, "start_load_kv", 7)
    assert stalls.close_step(waits_for_start=False) == [0]
    spend(recorder, 0, "start_load_kv", 9)
    spend(recorder, 0, "wait_for_layer_load", 1)
    assert stalls.close_step(waits_for_start=True) == [10]
    assert observed(recorder) == {(0, "kvobs_load_stall_seconds"): 1}


def test_a_step_without_calls_is_not_observed() -> None:
    recorder = Recorder(1)
    stalls = Stalls(1, recorder)
    for waits in (False, True):
        assert stalls.close_step(waits_for_start=waits) == [0]
    assert observed(recorder) == {}
