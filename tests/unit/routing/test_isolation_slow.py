"""A best-effort connector that is slow in the scheduler's step has failed."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.testing import Script
from tests.support.best_effort import KV, OF_SCHEDULER, OF_WORKER, Isolating, S
from tests.support.rig import assert_nothing_is_left, counted


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, engine: Isolating, a: Script) -> dict[str, float]:
    """Seconds that the best-effort child takes, by hook; asked of a clock of the test's own."""
    took: dict[str, float] = {}
    now = [0]

    def pass_time(hook: str, _detail: Any) -> None:
        now[0] += int(took.get(hook, 0) * S)

    monkeypatch.setattr("kvobs.children.gate.perf_counter_ns", lambda: now[0])
    a.on_call = pass_time
    return took


def test_a_slow_lookup_puts_it_out_and_is_not_repeated_while_it_is(
    engine: Isolating, a: Script, slow: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    slow["get_num_new_matched_tokens"] = 4.4
    a.offers["r"] = KV
    for request in ("r", "s", "t"):
        engine.rig.add(request, max_tokens=2)
    engine.run_to_end("r", "s", "t")
    assert engine.is_out
    assert counted(engine.rig, "kvobs_admitted_tokens_total", 0) == 0, "the load would be slow, or fail"
    assert len(a.called("get_num_new_matched_tokens")) == 1, "at most one call in a back-off is slow"
    assert "failed in get_num_new_matched_tokens, which took 4.4 s" in caplog.text
    engine.step(seconds=8 * 4.4 + 0.1)
    for request in ("u", "v"):
        engine.rig.add(request, max_tokens=2)
    engine.run_to_end("u", "v")
    assert a.called("get_num_new_matched_tokens") == ["r", "u"], "the next new request is the trial"
    assert engine.epoch == 2
    slow.clear()
    engine.step(seconds=60.1)
    a.offers["w"] = KV
    engine.rig.add("w", max_tokens=1)
    engine.step(2)
    engine.say(a, received="w")
    engine.run_to_end("w")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_a_slow_child_is_not_asked_about_what_it_knew_either(
    engine: Isolating, a: Script, b: Script, slow: dict[str, float]
) -> None:
    """It would block the step again; from then on it sees no more of that request than its end."""
    a.offers["r"] = [(None, False), (None, False), KV]
    engine.rig.add("r", max_tokens=2)
    engine.step()
    slow["update_connector_output"] = 3
    engine.step()
    assert engine.is_out
    asked = len(a.called("get_num_new_matched_tokens"))
    engine.run_to_end("r")
    assert len(a.called("get_num_new_matched_tokens")) == asked
    assert a.called("request_finished") == ["r"]
    assert_nothing_is_left(engine.rig)


def test_a_lookup_that_times_out_is_not_repeated_for_those_that_wait(
    engine: Isolating, a: Script, b: Script, slow: dict[str, float]
) -> None:
    """It raises after seconds, and has been asked about several requests before."""
    for request in ("r", "s", "t"):
        a.offers[request] = [(None, False), KV]
        engine.rig.add(request, max_tokens=2)
    engine.step()
    slow["get_num_new_matched_tokens"] = 3
    a.raises["get_num_new_matched_tokens"] = TimeoutError("no answer")
    engine.run_to_end("r", "s", "t")
    assert a.called("get_num_new_matched_tokens") == ["r", "s", "t", "r"]
    assert engine.epoch == 1
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta", "request_finished"])
def test_any_call_within_the_schedulers_step_may_be_the_slow_one(
    engine: Isolating, a: Script, slow: dict[str, float], hook: str
) -> None:
    slow[hook] = 1.1
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert engine.is_out
    assert engine.epoch == 1


def test_a_worker_may_take_its_time(engine: Isolating, a: Script, slow: dict[str, float]) -> None:
    slow.update({hook: 100 for hook in OF_WORKER if hook != "get_kv_connector_stats"})  # which has both sides
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out


def test_what_counts_as_slow_is_an_option(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, slow: dict[str, float]
) -> None:
    engine = Isolating(monkeypatch, a, b, isolate_slow_ms=5_000)
    slow.update(dict.fromkeys(OF_SCHEDULER, 4))
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out
