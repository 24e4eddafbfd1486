"""A call into a connector is seen from another thread, with its connector, hook and beginning."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvobs.export.current_call import CurrentCall, current_call
from kvobs.telemetry.recording.recorder import Recorder


def seen_from_outside(call: Callable[..., object]) -> CurrentCall | None:
    """Return what is seen of a thread that makes this call; the call itself waits until it was looked at."""
    is_in, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_in.set()
        may_end.wait(10)

    thread = threading.Thread(target=call, args=(wait,))
    thread.start()
    assert is_in.wait(10)
    assert thread.ident is not None
    found = current_call(thread.ident)
    may_end.set()
    thread.join()
    assert current_call(thread.ident) is None
    return found


def test_a_call_in_progress_is_seen() -> None:
    begin = time.time_ns()
    found = seen_from_outside(Recorder(2).timed(1, "build_connector_meta", lambda wait: wait()))
    assert found is not None
    assert found[:2] == (1, "build_connector_meta")
    assert found.began_ns == pytest.approx(begin, abs=5e8)


def test_of_nested_calls_the_outermost_is_seen() -> None:
    recorder = Recorder(2)
    inner = recorder.timed(1, "take_events", lambda wait: wait())
    found = seen_from_outside(recorder.timed(0, "request_finished", inner))
    assert found is not None
    assert found[:2] == (0, "request_finished")


def test_what_is_no_call_into_a_connector_is_not_seen() -> None:
    assert seen_from_outside(lambda wait: wait()) is None
