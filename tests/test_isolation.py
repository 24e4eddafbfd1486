"""A best-effort child fails, and nobody notices but the operator: vLLM's real scheduler, two ranks, two children."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.config import ConfigError
from kvobs.isolation import GIVE_UP_NS
from tests.rig import BLOCK, Rig, assert_nothing_is_left, child_config, counted
from tests.scripted import Script

S = 10**9
KV, SYNC = (2 * BLOCK, True), (2 * BLOCK, False)
FAILURE = ConnectionError("store is gone")

PER_REQUEST = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
OF_SCHEDULER = (*PER_REQUEST, "build_connector_meta", "update_connector_output", "take_events")
OF_WORKER = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer"),
    *("wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata"),
)


class Engine:
    """A rig whose first child is isolated, and its clock."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        best: Script,
        other: Script,
        *,
        other_class: str = "ScriptedConnector",
        lag: int = 0,
        **more: Any,
    ) -> None:
        self.now_ns = 1_700_000_000 * S
        for module in ("scheduler", "worker", "open_transfers", "isolation"):
            patch.setattr(f"kvobs.{module}.wall_ns", lambda: self.now_ns)
        connectors = [child_config(best, "BestEffortConnector"), child_config(other, other_class)]
        kvobs = {"names": ["best", "other"], "isolate": ["best"], **more}
        self.rig = Rig("kvobs", connectors=connectors, ranks=2, kvobs=kvobs, policy="recompute", lag=lag)
        self.side = self.rig.connector._side

    def step(self, steps: int = 1, seconds: float = 0.01) -> None:
        for _ in range(steps):
            self.now_ns += int(seconds * S)
            self.rig.step()

    def run_to_end(self, *requests: str) -> None:
        for _ in range(60):
            if all(self.rig.status(request) == "gone" for request in requests):
                return
            self.step()
        raise AssertionError({request: self.rig.status(request) for request in requests})

    @property
    def is_out(self) -> bool:
        return bool(self.side.isolation.is_out(0))

    @property
    def epoch(self) -> int:
        return int(self.side.isolation.words()[0].epoch)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> Engine:
    return Engine(monkeypatch, a, b)


@pytest.mark.parametrize("hook", [*OF_SCHEDULER, *OF_WORKER])
def test_a_failure_in_any_hook_keeps_the_child_out_until_it_is_over(
    engine: Engine, a: Script, b: Script, hook: str
) -> None:
    """The child has a load under way; a sibling goes on; after the quarantine it loads again."""
    engine.rig.add("before", max_tokens=2)
    engine.run_to_end("before")
    a.offers["load"] = KV
    a.raises[hook] = FAILURE
    for request in ("load", "plain"):
        engine.rig.add(request, max_tokens=3)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, received="load")
    if hook == "get_transfer_results":  # nobody will ever know
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("load", "plain")
    engine.step()
    assert engine.is_out
    epoch = engine.epoch
    assert epoch == (2 if hook == "get_transfer_results" else 1), "it was tried again meanwhile"

    a.raises.clear()
    a.offers["again"] = KV
    asked = len(a.called("get_num_new_matched_tokens"))
    engine.rig.add("out", max_tokens=1)
    engine.run_to_end("out")
    assert len(a.called("get_num_new_matched_tokens")) == asked, "a child that is out is not asked"
    assert len(b.called("request_finished")) == 4
    engine.step(seconds=epoch + 0.1)
    assert not engine.is_out, "the quarantine is over"
    engine.rig.add("again", max_tokens=1)
    engine.step(2)
    assert engine.rig.status("again") == "WAITING_FOR_REMOTE_KVS"
    for rank in (0, 1):
        a.say(rank, received="again")
    engine.run_to_end("again")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") >= 1
    engine.step(3, seconds=1)
    assert engine.epoch == epoch
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("hook", ["handle_preemptions", "bind_connector_metadata", "start_load_kv"])
@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
def test_a_load_that_did_not_begin_on_a_rank_is_recomputed(
    engine: Engine, a: Script, hook: str, ranks: set[int]
) -> None:
    """What begins on the other rank is waited for."""
    a.offers["r"] = KV
    a.raises, a.raises_on = {hook: FAILURE}, ranks
    engine.rig.add("r", max_tokens=1)
    engine.step(3)
    if len(ranks) == 1:
        assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
        a.say(1 - min(ranks), received="r")
    engine.run_to_end("r")
    assert engine.epoch == 1
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_recomputed_tokens_total", 0) == 2 * BLOCK
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta"])
def test_a_load_that_no_worker_was_told_of_is_recomputed(engine: Engine, a: Script, hook: str) -> None:
    a.offers["r"] = KV
    a.raises[hook] = FAILURE
    engine.rig.add("r", max_tokens=1)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert_nothing_is_left(engine.rig)


def test_what_was_under_way_when_a_child_failed_elsewhere_may_still_arrive(engine: Engine, a: Script) -> None:
    a.offers["r"] = KV
    a.promises.add("saved")
    engine.rig.add("r", max_tokens=1)
    engine.rig.add("saved", max_tokens=1)
    engine.step(3)
    a.raises["get_num_new_matched_tokens"] = FAILURE
    engine.rig.add("other", max_tokens=1)
    engine.run_to_end("other")
    assert engine.is_out
    for rank in (0, 1):
        a.say(rank, received="r", saved="saved")
    engine.run_to_end("r", "saved")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_a_child_that_is_out_is_asked_for_results_as_it_is_otherwise(
    engine: Engine, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Some take results only while they have a step's metadata: those would fail in every step that they are out."""
    a.raises["update_state_after_alloc"] = FAILURE
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=8)
    engine.run_to_end("r")
    assert engine.is_out
    assert "get_transfer_results" not in caplog.text
    a.raises["bind_connector_metadata"] = FAILURE
    engine.rig.add("other", max_tokens=2)
    engine.run_to_end("other")
    engine.step(3, seconds=2)
    assert_nothing_is_left(engine.rig)


def test_what_never_arrives_is_given_up(engine: Engine, a: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.offers["r"] = KV
    a.promises.add("saved")
    engine.rig.add("r", max_tokens=1)
    engine.rig.add("saved", max_tokens=1)
    engine.step(3)
    a.raises["get_transfer_results"] = FAILURE
    engine.step(2)
    assert engine.is_out
    engine.step(seconds=GIVE_UP_NS / S - 0.1)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    engine.step(seconds=0.1)
    engine.run_to_end("r", "saved")
    assert "has not reported 1 loads and 1 saves 10 s after it failed" in caplog.text
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == 0
    assert_nothing_is_left(engine.rig)


def test_what_a_child_promises_while_it_is_out_is_not_waited_for(engine: Engine, a: Script) -> None:
    """It is told of the end of requests, but its saves are not ordered."""
    a.raises["start_load_kv"] = FAILURE
    a.promises.add("r")
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert engine.is_out
    engine.step()
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 0
    assert_nothing_is_left(engine.rig)


def test_what_was_open_at_each_of_several_failures_is_given_up(engine: Engine, a: Script) -> None:
    for request in ("first", "second"):
        a.promises.add(request)
        engine.rig.add(request, max_tokens=1)
        engine.step(3)
        a.raises["take_events"] = FAILURE
        engine.step()
        a.raises.clear()
        engine.step(4, seconds=1.5)  # out, on trial, fit
    assert engine.epoch == 2
    engine.step(seconds=GIVE_UP_NS / S - 12 + 4)
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 1
    engine.step(2, seconds=4)
    engine.run_to_end("first", "second")
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 2
    assert_nothing_is_left(engine.rig)


def test_what_begins_after_a_quarantine_is_not_given_up_with_what_was_before(engine: Engine, a: Script) -> None:
    engine.rig.add("first", max_tokens=1)
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.run_to_end("first")
    engine.step(seconds=1.1)
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    engine.step(2, seconds=GIVE_UP_NS / S)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"


def test_it_stays_out_until_the_requests_that_it_missed_something_of_are_gone(engine: Engine, a: Script) -> None:
    engine.rig.add("long", max_tokens=500)
    engine.step()
    a.raises["build_connector_meta"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.step(3, seconds=5)
    assert engine.is_out, "it would save the blocks of a request whose last steps it does not know"
    engine.rig.abort("long")
    engine.step(2, seconds=0.1)
    assert not engine.is_out


def test_a_quarantine_is_twice_as_long_each_time_that_its_trial_fails(engine: Engine, a: Script) -> None:
    engine.rig.add("r", max_tokens=10_000 // 64)
    lasted: list[int] = []
    for _ in range(8):
        a.raises["wait_for_save"] = FAILURE
        engine.step(2)
        assert engine.is_out
        began = engine.now_ns
        a.raises.clear()
        while engine.is_out:
            engine.step(seconds=0.25)
        lasted.append(round((engine.now_ns - began) / S))
    assert lasted == [1, 2, 4, 8, 16, 32, 60, 60]


def test_both_ranks_failing_in_one_step_is_one_failure(engine: Engine, a: Script) -> None:
    engine.rig.add("r", max_tokens=20)
    a.raises["save_kv_layer"] = FAILURE
    engine.step(3)
    assert engine.epoch == 1
    assert len(a.called("save_kv_layer")) == 2, "once on each rank, and then not any more"


def test_a_load_that_failed_is_not_asked_for_again(engine: Engine, a: Script) -> None:
    """Of any child: vLLM would look it up again at once, and again."""
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, failed="r")
    engine.run_to_end("r")
    assert len(a.called("get_num_new_matched_tokens")) == 1
    assert not engine.is_out, "a failed load is no failed call"


def test_a_synchronous_offer_is_forgone(engine: Engine, a: Script, b: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.offers["r"], b.offers["r"] = (3 * BLOCK, False), SYNC
    engine.rig.add("r", max_tokens=1)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "sync", "ok") == 1
    assert counted(engine.rig, "kvobs_forgone_tokens_total", 0) == BLOCK
    assert counted(engine.rig, "kvobs_offered_tokens_total", 0) == 3 * BLOCK
    assert "connector 'best' is isolated and offers a synchronous load: not taken" in caplog.text


def test_what_it_may_hold_wrongly_is_reset_when_it_takes_part_again(engine: Engine, a: Script, caplog: Any) -> None:
    a.answers["reset_cache"] = True
    a.raises["start_load_kv"] = FAILURE
    engine.rig.add("r", max_tokens=3)
    with caplog.at_level("INFO"):
        engine.step(2)
        a.raises.clear()
        engine.step(seconds=1.1)
        assert len(a.called("reset_cache")) == 1
        assert "connector 'best' takes part again, on trial; its cache was reset" in caplog.text
        engine.step(3, seconds=1)
        assert "connector 'best' is fit again" in caplog.text


def test_failing_in_the_reset_is_failing_the_trial(engine: Engine, a: Script) -> None:
    a.raises["start_load_kv"] = FAILURE
    engine.rig.add("r", max_tokens=3)
    engine.step(2)
    a.raises = {"reset_cache": FAILURE}
    engine.step(seconds=1.1)
    assert engine.is_out
    assert engine.epoch == 2


def test_a_child_that_failed_at_its_start_is_out_for_good(
    engine: Engine, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.raises["set_host_xfer_buffer_ops"] = FAILURE
    engine.rig.workers[1].set_host_xfer_buffer_ops(print)
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert engine.is_out
    engine.step(3, seconds=1000)
    assert engine.is_out
    assert "serving goes on without it, for good" in caplog.text


def test_a_child_that_is_not_isolated_still_ends_the_step(engine: Engine, b: Script) -> None:
    b.raises["start_load_kv"] = FAILURE
    engine.rig.add("r")
    with pytest.raises(ConnectionError, match="store is gone"):
        engine.step()


# --- what can't be isolated


@pytest.mark.parametrize(
    ("cls", "policy", "isolate", "says"),
    [
        ("BestEffortConnector", "fail", "best", "kv_load_failure_policy: found 'fail', needs 'recompute'"),
        ("ScriptedConnector", "recompute", "best", "isolate: found 'best', which must deliver what it saves"),
        ("BestEffortConnector", "recompute", "bset", r"isolate\[0\]: found 'bset', allowed: 'best', 'other'"),
    ],
)
def test_the_limits_of_isolation_are_errors_at_the_start(cls: str, policy: str, isolate: str, says: str) -> None:
    connectors = [child_config(Script("best"), cls), child_config(Script("other"))]
    with pytest.raises(ConfigError, match=says):
        Rig("kvobs", connectors=connectors, kvobs={"names": ["best", "other"], "isolate": [isolate]}, policy=policy)


def test_where_isolation_is_refused_children_that_were_built_are_shut_down(a: Script, b: Script) -> None:
    with pytest.raises(ConfigError, match="must deliver"):
        Rig("kvobs", a, b, kvobs={"names": ["best", "other"], "isolate": ["other"]}, policy="recompute")
    assert len(a.called("shutdown")) == len(b.called("shutdown")) == 1


@pytest.mark.parametrize("hook", ["has_pending_push_work", "has_pending_block_frees"])
def test_what_a_child_that_is_out_waits_for_does_not_keep_the_engine_awake(
    engine: Engine, a: Script, hook: str
) -> None:
    ask = getattr(engine.rig.connector, hook)
    a.answers[hook] = True
    assert ask()
    a.raises[hook] = FAILURE
    assert not ask()
    a.raises.clear()
    assert not ask()
    assert len(a.called(hook)) == 2


@pytest.mark.parametrize("policy", ["first", "longest"])
def test_nobody_waits_for_the_answer_of_a_child_that_is_out(
    policy: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """It had said "not yet", and would have had a minute to say more."""
    engine = Engine(monkeypatch, a, b, load_policy=policy, lookup_timeout_ms=60_000)
    a.offers["r"], b.offers["r"] = (None, False), KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    assert engine.rig.status("r") == "WAITING"
    a.raises["take_events"] = FAILURE
    engine.step()
    engine.step()
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    for rank in (0, 1):
        b.say(rank, received="r")
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1


def test_the_longest_offer_that_is_synchronous_and_isolated_loses(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    engine = Engine(monkeypatch, a, b, load_policy="longest")
    a.offers["r"], b.offers["r"] = (4 * BLOCK, False), KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    for rank in (0, 1):
        b.say(rank, received="r")
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_forgone_tokens_total", 0) == 2 * BLOCK
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1
