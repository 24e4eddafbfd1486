"""How long a best-effort connector is out, for slowness too, and what happens to requests and transfers meanwhile."""

from typing import Any

import pytest

from kvobs.testing import BLOCK, Script, ScriptedConnector
from tests.support.best_effort import FAILURE, KV, OF_SCHEDULER, OF_WORKER, Isolating, S
from tests.support.rig import assert_nothing_is_left, counted


def test_both_ranks_failing_in_one_step_is_one_failure(engine: Isolating, a: Script) -> None:
    engine.rig.add("r", max_tokens=20)
    a.raises["save_kv_layer"] = FAILURE
    engine.step(3)
    assert engine.epoch == 1
    assert len(a.called("save_kv_layer")) == 6, "in each step on each rank: it is only shown nothing to save"


def test_requests_that_ended_without_it_come_in_the_next_step(engine: Isolating, a: Script) -> None:
    """LMCache reports a promised save when it is given the request there."""
    engine.rig.add("r", max_tokens=1)
    engine.rig.add("longer", max_tokens=8)
    engine.step()
    a.raises["build_connector_meta"] = FAILURE
    engine.step()
    assert [given for given in a.called("get_transfer_results") if "r" in given] == []
    a.raises.clear()
    engine.step(2)
    assert [given for given in a.called("get_transfer_results") if "r" in given] == [{"r"}, {"r"}], "once on each rank"


def test_an_error_is_one_short_line_of_the_log(engine: Isolating, a: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.raises["build_connector_meta"] = RuntimeError("x\nINFO forged " + "x" * 10**6)
    engine.step()
    (line,) = (line.getMessage() for line in caplog.records if "It is in quarantine" in line.getMessage())
    assert len(line) < 1000
    assert "\n" not in line


@pytest.mark.parametrize("index", [1, 7, -1])
def test_failures_without_isolation_have_no_effect(engine: Isolating, index: int) -> None:
    engine.side.targets.isolation.record_failures([(index, 0)])
    assert not engine.is_out


@pytest.mark.parametrize(("seconds", "is_known"), [(0.5, False), (1.1, True)])
def test_a_request_after_quarantine_begins_trial(engine: Isolating, a: Script, seconds: float, is_known: bool) -> None:
    """An idle engine has no steps: its next request may be the first to arrive."""
    a.raises["take_events"] = FAILURE
    engine.rig.add("first", max_tokens=1)
    engine.run_to_end("first")
    assert engine.is_out
    a.raises.clear()
    engine.now_ns += int(seconds * S)
    engine.rig.add("second", max_tokens=1)
    assert engine.is_out is not is_known
    assert a.called("on_new_request") == (["first", "second"] if is_known else ["first"])


def test_a_load_that_failed_is_asked_for_again_and_not_tried(engine: Isolating, a: Script) -> None:
    """N4, of any connector: vLLM would load it again at once, and again; but the lookup cleans its books."""
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    engine.say(a, failed="r")
    engine.run_to_end("r")
    assert len(a.called("get_num_new_matched_tokens")) == 2
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK, 0]
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert not engine.is_out, "a failed load is no failed call"


def test_quarantined_connector_comes_back_by_itself_and_logs_it(
    engine: Isolating, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.raises["start_load_kv"] = FAILURE
    engine.rig.add("r", max_tokens=3)
    with caplog.at_level("INFO"):
        engine.step(2)
        assert "connector 'best' failed on a worker. It is in quarantine" in caplog.text
        a.raises.clear()
        engine.step(seconds=1.1)
        assert "connector 'best' left quarantine and is on probation" in caplog.text
        a.offers["s"] = KV
        engine.rig.add("s", max_tokens=2)
        engine.step(3, seconds=1000)
        assert "connector 'best' left probation" not in caplog.text, "time proves nothing"
        engine.say(a, received="s")
        engine.run_to_end("s")
        assert "connector 'best' left probation after a successful transfer; 1 requests were looked up" in caplog.text
    assert a.called("reset_cache") == []


def test_connector_that_failed_at_its_start_is_out(
    engine: Isolating, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.raises["set_host_xfer_buffer_ops"] = FAILURE
    engine.rig.workers[1].set_host_xfer_buffer_ops(print)
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert engine.is_out
    engine.step(3, seconds=1000)
    assert engine.is_out
    assert "new requests are served without it until a restart" in caplog.text


@pytest.mark.parametrize(
    ("hook", "is_out"), [("set_xfer_handshake_metadata", True), ("reset_cache", False), ("get_finished_count", False)]
)
def test_out_for_good_after_a_hook_that_is_called_once(engine: Isolating, a: Script, hook: str, is_out: bool) -> None:
    a.raises[hook] = FAILURE
    getattr(engine.rig.connector, hook)(*([{}] if is_out else []))
    assert engine.is_out
    engine.step(3, seconds=1000)
    assert engine.is_out is is_out


def test_a_connector_that_is_not_isolated_still_ends_the_step(engine: Isolating, b: Script) -> None:
    b.raises["start_load_kv"] = FAILURE
    engine.rig.add("r")
    with pytest.raises(ConnectionError, match="store is gone"):
        engine.step()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, engine: Isolating, a: Script) -> dict[str, float]:
    """Seconds that the best-effort connector takes, by hook; asked of a clock of the test's own."""
    took: dict[str, float] = {}
    now = [0]

    def pass_time(hook: str, _detail: Any) -> None:
        now[0] += int(took.get(hook, 0) * S)

    monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda: now[0])
    a.on_call = pass_time
    return took


def test_a_slow_lookup(engine: Isolating, a: Script, slow: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_slow_connector_is_not_asked_again(engine: Isolating, a: Script, b: Script, slow: dict[str, float]) -> None:
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


def test_a_slow_connector_that_fails_on_a_worker_saves_no_more(
    engine: Isolating, a: Script, slow: dict[str, float]
) -> None:
    """The report of that failure may come after the slow call."""
    engine.rig.add("r", max_tokens=20)
    engine.step()
    slow["update_connector_output"] = 3
    engine.step()
    engine.side.targets.isolation.record_failures([(0, 0)])
    for is_shown in (True, False):
        assert ("r" in a.called("build_connector_meta")[-1].scheduled) is is_shown
        engine.step()


def test_open_lookups_of_a_slow_connector_wait_for_its_return(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, slow: dict[str, float]
) -> None:
    engine = Isolating(monkeypatch, a, b, lookup_timeout_ms=1)
    a.offers["r"] = [(None, False)] * 100
    engine.rig.add("r", max_tokens=99)
    engine.step(3)
    assert engine.rig.status("r") == "RUNNING"
    slow["update_connector_output"] = 3
    engine.step()
    asked = len(a.called("get_num_new_matched_tokens"))
    engine.step()
    assert len(a.called("get_num_new_matched_tokens")) == asked
    slow.clear()
    engine.step(seconds=8 * 3 + 0.1)
    assert len(a.called("get_num_new_matched_tokens")) == asked + 1


def test_a_slow_connector_keeps_nothing_of_a_request_it_served(
    engine: Isolating, a: Script, b: Script, slow: dict[str, float]
) -> None:
    """Preempted while it is out, the request gets other blocks: not even its end is shown where some save the rest."""
    engine.rig.add("r", max_tokens=50)
    engine.step(2)
    slow["update_connector_output"] = 3
    engine.step()
    assert engine.rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step(2)
    assert a.called("get_num_new_matched_tokens") == ["r"]
    engine.rig.abort("r")
    engine.step(2)
    assert "r" not in frozenset().union(*(shown.finished for shown in a.called("build_connector_meta")))


def test_a_timed_out_lookup_is_not_repeated(engine: Isolating, a: Script, b: Script, slow: dict[str, float]) -> None:
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


def test_a_worker_may_take_its_time(engine: Isolating, a: Script, slow: dict[str, float]) -> None:
    slow.update({hook: 100 for hook in OF_WORKER if hook != "get_kv_connector_stats"})  # which has both sides
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out


def test_slowness_is_an_option(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, slow: dict[str, float]) -> None:
    engine = Isolating(monkeypatch, a, b, best_effort_slow_ms=5_000)
    slow.update(dict.fromkeys(OF_SCHEDULER, 4))
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out


@pytest.mark.parametrize("raises", [True, False])
def test_a_slow_call_that_raises_is_out_as_long_as_an_answer(
    engine: Isolating, a: Script, slow: dict[str, float], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The usual dead store: a timeout. Trials would take most of the time if each back-off were one second."""
    slow["get_num_new_matched_tokens"] = 5
    if raises:
        a.raises["get_num_new_matched_tokens"] = TimeoutError("no answer")
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    engine.step(seconds=39)
    assert engine.is_out
    engine.step(seconds=2)
    assert not engine.is_out
    if raises:
        assert "failed in get_num_new_matched_tokens after 5 s: TimeoutError: no answer" in caplog.text


@pytest.mark.parametrize("hook", ["build_connector_meta", "update_connector_output", "take_events"])
def test_a_slow_hook_of_each_step_is_left_out(
    engine: Isolating, a: Script, b: Script, slow: dict[str, float], hook: str
) -> None:
    """Until the requests that it knows have ended it must see the steps: it may be saving their blocks."""
    a.promises.add("known")
    engine.rig.add("known", max_tokens=4)
    engine.step(2)
    slow[hook] = 2
    engine.step()
    assert engine.is_out
    calls = len(a.called(hook))
    engine.step(3)
    can_wait = hook == "take_events"
    assert len(a.called(hook)) == calls + 3 * (not can_wait)
    engine.step(3)
    assert engine.rig.status("known") == "FINISHED_LENGTH_CAPPED"
    assert len(a.called(hook)) == calls + 6 * (not can_wait), "its save is under way"
    engine.say(a, saved="known")
    engine.run_to_end("known")
    engine.rig.add("hidden", max_tokens=12)
    engine.step(2)
    calls, theirs = len(a.calls), len(b.called(hook))
    engine.step(4)
    assert a.calls[calls:] == [], "nothing is under way, and it knows nothing"
    assert len(b.called(hook)) == theirs + 4
    slow.clear()
    engine.run_to_end("hidden")
    engine.step(2, seconds=20)
    engine.rig.add("after", max_tokens=2)
    engine.run_to_end("after")
    engine.step()
    assert a.called("request_finished") == ["known", "after"]
    assert set().union(*a.called("get_transfer_results")) == {"known", "after"}
    assert_nothing_is_left(engine.rig)


def test_probation_lasts_until_a_load_succeeds(engine: Isolating, a: Script) -> None:
    """Clients wait for the load that failed, and nothing is tried meanwhile."""
    lengths = []
    for attempt in range(5):
        name = f"load-{attempt}"
        a.offers[name] = [KV, (0, False)]
        a.raises["update_state_after_alloc"] = FAILURE
        engine.rig.add(name, max_tokens=1)
        engine.run_to_end(name)
        a.raises.clear()
        lengths.append(engine.side.targets.isolation._states[0].length_ns / S)
        engine.step(2, seconds=100)
        assert not engine.is_out
    assert lengths == [1, 2, 4, 8, 16]
    a.offers["good"] = KV
    engine.rig.add("good", max_tokens=1)
    engine.step(2)
    engine.say(a, received="good")
    engine.run_to_end("good")
    a.raises["take_events"] = FAILURE
    engine.step()
    assert engine.side.targets.isolation._states[0].length_ns == S


@pytest.mark.parametrize("has_loaded", [True, False])
def test_a_good_save_ends_probation_where_nothing_loads(engine: Isolating, a: Script, has_loaded: bool) -> None:
    if has_loaded:
        a.offers["load"] = KV
        engine.rig.add("load", max_tokens=1)
        engine.step(2)
        engine.say(a, received="load")
        engine.run_to_end("load")
    for name in ("first", "second"):
        a.raises["take_events"] = FAILURE
        engine.step()
        a.raises.clear()
        engine.step(seconds=3)
        a.promises.add(name)
        engine.rig.add(name, max_tokens=1)
        engine.step(3)
        engine.say(a, saved=name)
        engine.run_to_end(name)
    assert engine.side.targets.isolation._states[0].length_ns == (2 * S if has_loaded else S // 2)


def test_a_load_whose_allocation_call_raised_fails_at_once(engine: Isolating, a: Script, b: Script) -> None:
    """No worker has its order: the other connector, which has the same tokens, loads it."""
    a.offers["request-1"], b.offers["request-1"] = KV, KV
    a.raises["update_state_after_alloc"] = FAILURE
    engine.rig.add("request-1", max_tokens=1)
    engine.step(3)
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    engine.step()
    engine.say(b, received="request-1")
    engine.run_to_end("request-1")
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_a_load_that_is_ordered_all_the_same_is_waited_for(
    engine: Isolating, a: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had kept the order when it raised: a worker may be writing into these blocks."""
    build = ScriptedConnector.build_connector_meta

    def naming(self: Any, scheduler_output: Any) -> Any:
        meta: Any = build(self, scheduler_output)
        meta.tag = ["request-1"]
        return meta

    monkeypatch.setattr(ScriptedConnector, "build_connector_meta", naming)
    engine = Isolating(monkeypatch, a, Script("b"))
    a.offers["request-1"] = [KV, (0, False)]
    a.raises["update_state_after_alloc"] = FAILURE
    engine.rig.add("request-1", max_tokens=1)
    engine.step(5)
    a.raises.clear()
    assert engine.rig.status("request-1") == "WAITING_FOR_REMOTE_KVS"
    engine.say(a, received="request-1")
    engine.run_to_end("request-1")
