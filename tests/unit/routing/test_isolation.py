"""A best-effort child fails, and nobody notices but the operator: vLLM's real scheduler, two ranks, two children.

By the rules N2 to N4 and N7 to N9 of the design: what it knew goes on being reported to it, what arrives while it is
out does not exist for it, and nothing is called, reset or saved that vLLM did not ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvobs.config import ConfigError
from kvobs.hooks import HOOKS
from kvobs.routing.isolation import GIVE_UP_NS
from kvobs.testing import BLOCK, ROUTERS, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config, counted
from tests.support.scripted import Stats

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
        for module in ("scheduler", "completions", "worker", "open_transfers", "isolation", "output_view"):
            patch.setattr(f"kvobs.routing.{module}.wall_ns", lambda: self.now_ns)
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
        return int(self.side.isolation.states()[0].epoch)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> Engine:
    return Engine(monkeypatch, a, b)


def named(script: Script, request: str) -> list[tuple[str, Any]]:
    """Return the calls of a child in which a request is named, by itself or in what it was shown."""

    def names(detail: Any) -> bool:
        if isinstance(detail, str):
            return detail == request
        if isinstance(detail, dict):
            return any(map(names, detail.values()))
        return isinstance(detail, tuple | list | set | frozenset) and any(map(names, detail))

    return [(hook, detail) for hook, detail in script.calls if names(detail)]


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
    # Nobody asks it, without metadata; or it never answers.
    is_given_up = hook in ("get_transfer_results", "build_connector_meta")
    if is_given_up:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("load", "plain")
    engine.step()
    assert engine.is_out
    epoch = engine.epoch
    assert epoch == (2 if is_given_up else 1), "it was tried again meanwhile"

    a.raises.clear()
    a.offers["again"] = KV
    engine.rig.add("out", max_tokens=1)
    engine.run_to_end("out")
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
    assert named(a, "out") == [], "a request that arrives while a child is out does not exist for it"
    assert a.called("reset_cache") == []
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
def test_a_load_that_did_not_begin_on_a_rank_is_recomputed(engine: Engine, a: Script, ranks: set[int]) -> None:
    """What begins on the other rank is waited for."""
    a.offers["r"] = KV
    a.raises, a.raises_on = {"bind_connector_metadata": FAILURE}, ranks
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


@pytest.mark.parametrize("ranks", [{0}, {0, 1}])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_load_that_may_have_begun_has_failed_and_is_waited_for(
    engine: Engine, a: Script, ranks: set[int], is_reported: bool
) -> None:
    """``start_load_kv`` raised half-way: something may be writing into these blocks."""
    a.offers["r"] = KV
    a.raises, a.raises_on = {"start_load_kv": FAILURE}, ranks
    engine.rig.add("r", max_tokens=1)
    engine.step(4)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    for rank in (0, 1) if is_reported else ():
        a.say(rank, received="r")
    if not is_reported:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_recomputed_tokens_total", 0) == 2 * BLOCK
    assert_nothing_is_left(engine.rig)


def test_a_load_under_way_survives_a_failure_before_it_begins(engine: Engine, a: Script) -> None:
    """In ``handle_preemptions``: the load itself begins all the same."""
    a.offers["r"] = KV
    a.raises["handle_preemptions"] = FAILURE
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, received="r")
    engine.run_to_end("r")
    assert engine.is_out
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("comes_late", [True, False])
def test_the_order_of_a_load_may_come_with_a_later_steps(engine: Engine, a: Script, comes_late: bool) -> None:
    """Connectors keep their orders when they raise: had it failed at once, it would write into another's blocks."""
    a.offers["r"] = KV
    a.raises["build_connector_meta"] = FAILURE
    engine.rig.add("r", max_tokens=1)
    engine.step(3)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    if comes_late:
        a.raises.clear()
        engine.step()
        for rank in (0, 1):
            a.say(rank, received="r")
    else:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok" if comes_late else "failed") == 1
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
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, received="r")
    engine.run_to_end("r")
    assert engine.is_out
    assert "failed in get_transfer_results" not in caplog.text
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


def test_a_load_that_is_given_up_ended_on_all_ranks_when_it_was(
    engine: Engine, a: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its duration, which spans and the slow rank are made of, is that of the wait."""
    ended: list[dict[int, int]] = []
    monkeypatch.setattr(engine.side._listener, "load_ended", lambda request, load: ended.append(dict(load.arrived)))
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=1)
    engine.step(3)
    a.raises["get_transfer_results"] = FAILURE
    engine.step(2)
    engine.step(seconds=GIVE_UP_NS / S)
    assert ended == [{0: engine.now_ns, 1: engine.now_ns}]


@pytest.mark.parametrize("is_reported", [True, False])
def test_what_a_child_promises_while_it_is_out_is_held_until_it_reports_or_is_given_up(
    engine: Engine, a: Script, is_reported: bool
) -> None:
    a.raises["start_load_kv"] = FAILURE
    a.promises.add("r")
    engine.rig.add("r", max_tokens=2)
    engine.step(3)
    assert engine.is_out
    assert engine.rig.status("r") == "FINISHED_LENGTH_CAPPED"
    if is_reported:
        for rank in (0, 1):
            a.say(rank, saved="r")
    else:
        a.raises.clear()
        engine.step(2, seconds=GIVE_UP_NS / S + 1)
    engine.run_to_end("r")
    engine.step()
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == int(is_reported)
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == int(not is_reported)
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


def test_events_that_fail_while_they_are_read_are_contained(engine: Engine, a: Script) -> None:
    """Those of OffloadingConnector, LMCache and MooncakeStore are a generator."""

    def events() -> Iterator[str]:
        yield "one"
        raise FAILURE

    a.answers["take_events"] = events()
    assert list(engine.rig.connector.take_events()) == []
    assert engine.is_out


# --- N7: a request is seen whole or not at all


def test_what_it_knew_goes_on_being_reported_and_is_not_saved_any_more(engine: Engine, a: Script) -> None:
    """It missed a step's block ids: what it would save later would be wrong blocks under right keys."""
    engine.rig.add("long", max_tokens=500)
    engine.step(2)
    assert "long" in a.called("build_connector_meta")[-1].scheduled
    a.raises["build_connector_meta"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.rig.add("hidden", max_tokens=2)
    engine.run_to_end("hidden")
    engine.step(3, seconds=5)
    assert not engine.is_out, "a long request keeps nobody out"
    engine.rig.add("new", max_tokens=2)
    engine.step(2)
    assert a.called("build_connector_meta")[-1].scheduled == {"new"}
    assert a.called("build_connector_meta")[-1].tokens == 1
    engine.rig.abort("long")
    engine.run_to_end("long", "new")
    engine.step(2)
    assert sorted(a.called("request_finished")) == ["long", "new"]
    finished = [shown.finished for shown in a.called("build_connector_meta")]
    assert frozenset().union(*finished) == {"new"}, "OffloadingConnector saves the rest of a request there"
    assert set().union(*a.called("get_transfer_results")) == {"long", "new"}, "LMCache keeps its promises there"
    assert named(a, "hidden") == []
    assert_nothing_is_left(engine.rig)


def test_a_failure_without_requests_taints_none(engine: Engine, a: Script) -> None:
    """A lookup that raised is about its request only; the others go on being saved."""
    engine.rig.add("known", max_tokens=20)
    engine.step(2)
    a.raises["get_num_new_matched_tokens"] = FAILURE
    engine.rig.add("r", max_tokens=20)
    engine.step()
    assert engine.is_out
    a.raises.clear()
    engine.step(2)
    assert a.called("build_connector_meta")[-1].scheduled == {"known"}
    engine.rig.abort("known")
    engine.step(2)
    assert "known" in frozenset().union(*(shown.finished for shown in a.called("build_connector_meta")))


def test_a_hidden_request_of_a_preemption_stays_hidden(engine: Engine, a: Script, b: Script) -> None:
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.rig.add("hidden", max_tokens=20)
    engine.step(2)
    engine.step(2, seconds=2)
    assert not engine.is_out
    scheduler = engine.rig.scheduler
    scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step(3)
    assert len([r for r in b.called("get_num_new_matched_tokens") if r == "hidden"]) > 1, "it was looked up again"
    engine.run_to_end("hidden")
    engine.step(2)
    assert named(a, "hidden") == []
    assert_nothing_is_left(engine.rig)


def test_a_known_request_is_looked_up_while_it_is_out_and_gets_nothing_to_load(engine: Engine, a: Script) -> None:
    """N4: LMCache drops its old block table nowhere else."""
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=3)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, failed="r")
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.run_to_end("r")
    assert a.called("get_num_new_matched_tokens") == ["r", "r"]
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK, 0]
    assert_nothing_is_left(engine.rig)


def test_it_is_given_what_vllm_calls_and_nothing_else(engine: Engine, a: Script, b: Script) -> None:
    """N3, N2: around a quarantine the calls of a child differ from its sibling's by what is hidden from it only."""
    a.raises["wait_for_save"] = FAILURE
    engine.rig.add("r", max_tokens=4)
    engine.step(2)
    a.raises.clear()
    engine.step(6, seconds=0.5)
    engine.step(6, seconds=5)
    assert engine.epoch == 1
    for hook in sorted({hook for hook, _ in a.calls} - {"__init__"}):
        if hook in HOOKS and hook not in ("get_kv_connector_kv_cache_events", "get_kv_connector_stats"):
            theirs = b.called(hook)
            assert not theirs or len(a.called(hook)) == len(theirs), hook
    assert not {hook for hook, _ in a.calls} & {"reset_cache", "shutdown"}


# --- N8: a circuit breaker on time


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, engine: Engine, a: Script) -> dict[str, float]:
    """Seconds that the best-effort child takes, by hook; asked of a clock of the test's own."""
    took: dict[str, float] = {}
    now = [0]

    def pass_time(hook: str, _detail: Any) -> None:
        now[0] += int(took.get(hook, 0) * S)

    monkeypatch.setattr("kvobs.children.gate.perf_counter_ns", lambda: now[0])
    a.on_call = pass_time
    return took


def test_a_slow_lookup_puts_it_out_and_is_not_repeated_while_it_is(
    engine: Engine, a: Script, slow: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    slow["get_num_new_matched_tokens"] = 4.4
    for request in ("r", "s", "t"):
        engine.rig.add(request, max_tokens=2)
    engine.run_to_end("r", "s", "t")
    assert engine.is_out
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
    for rank in (0, 1):
        a.say(rank, received="w")
    engine.run_to_end("w")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_what_a_slow_lookup_found_is_not_loaded(engine: Engine, a: Script, slow: dict[str, float]) -> None:
    """The load would be slow, or fail."""
    slow["get_num_new_matched_tokens"] = 2
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_admitted_tokens_total", 0) == 0
    assert_nothing_is_left(engine.rig)


def test_a_slow_child_is_not_asked_about_what_it_knew_either(
    engine: Engine, a: Script, b: Script, slow: dict[str, float]
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
    engine: Engine, a: Script, b: Script, slow: dict[str, float]
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
    engine: Engine, a: Script, slow: dict[str, float], hook: str
) -> None:
    slow[hook] = 1.1
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert engine.is_out
    assert engine.epoch == 1


def test_a_worker_may_take_its_time(engine: Engine, a: Script, slow: dict[str, float]) -> None:
    slow.update({hook: 100 for hook in OF_WORKER if hook != "get_kv_connector_stats"})  # which has both sides
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out


def test_what_counts_as_slow_is_an_option(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Engine(monkeypatch, a, b, isolate_slow_ms=5_000)
    now = [0]

    def pass_time(_hook: str, _detail: Any) -> None:
        now[0] += 4 * S

    monkeypatch.setattr("kvobs.children.gate.perf_counter_ns", lambda: now[0])
    a.on_call = pass_time
    engine.rig.add("r", max_tokens=2)
    engine.run_to_end("r")
    assert not engine.is_out


# --- the quarantine


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
    assert len(a.called("save_kv_layer")) == 6, "in each step on each rank: it is only shown nothing to save"


def test_requests_that_ended_in_a_step_that_left_it_out_are_given_to_it_in_the_next(engine: Engine, a: Script) -> None:
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


def test_the_log_says_that_it_failed_on_a_worker(engine: Engine, a: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.raises["save_kv_layer"] = FAILURE
    engine.rig.add("r", max_tokens=2)
    engine.step(2)
    assert "connector 'best' failed on a worker. It is in quarantine" in caplog.text


@pytest.mark.parametrize(("seconds", "is_known"), [(0.5, False), (1.1, True)])
def test_a_request_that_arrives_after_the_quarantine_begins_the_probation_without_waiting_for_a_step(
    engine: Engine, a: Script, seconds: float, is_known: bool
) -> None:
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


def test_a_load_that_failed_is_asked_for_again_and_not_tried(engine: Engine, a: Script) -> None:
    """N4, of any child: vLLM would load it again at once, and again; but the lookup cleans the child's books."""
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, failed="r")
    engine.run_to_end("r")
    assert len(a.called("get_num_new_matched_tokens")) == 2
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK, 0]
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert not engine.is_out, "a failed load is no failed call"


def test_a_synchronous_offer_is_unused(engine: Engine, a: Script, b: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.offers["r"], b.offers["r"] = (3 * BLOCK, False), SYNC
    engine.rig.add("r", max_tokens=1)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "sync", "ok") == 1
    assert counted(engine.rig, "kvobs_unused_hit_tokens_total", 0, "other_chosen") == BLOCK
    assert counted(engine.rig, "kvobs_offered_tokens_total", 0) == 3 * BLOCK
    assert "connector 'best' is isolated and offers a synchronous load: it is not used" in caplog.text


def test_it_comes_back_by_itself_and_logs_it(engine: Engine, a: Script, caplog: pytest.LogCaptureFixture) -> None:
    a.raises["start_load_kv"] = FAILURE
    engine.rig.add("r", max_tokens=3)
    with caplog.at_level("INFO"):
        engine.step(2)
        a.raises.clear()
        engine.step(seconds=1.1)
        assert "connector 'best' is enabled again on probation" in caplog.text
        engine.step(3, seconds=1)
        assert "connector 'best' has recovered" in caplog.text
    assert a.called("reset_cache") == []


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
    assert "new requests are served without it until a restart" in caplog.text


@pytest.mark.parametrize(
    ("hook", "is_out"), [("set_xfer_handshake_metadata", True), ("reset_cache", False), ("get_finished_count", False)]
)
def test_a_child_is_out_for_good_after_a_failure_in_a_scheduler_hook_that_is_not_called_again(
    engine: Engine, a: Script, hook: str, is_out: bool
) -> None:
    a.raises[hook] = FAILURE
    getattr(engine.rig.connector, hook)(*([{}] if is_out else []))
    assert engine.is_out
    engine.step(3, seconds=1000)
    assert engine.is_out is is_out


def test_a_child_that_is_not_isolated_still_ends_the_step(engine: Engine, b: Script) -> None:
    b.raises["start_load_kv"] = FAILURE
    engine.rig.add("r")
    with pytest.raises(ConnectionError, match="store is gone"):
        engine.step()


# --- what can't be isolated


@pytest.mark.parametrize(
    ("policy", "isolate", "more", "says"),
    [
        ("fail", "best", {}, "kv_load_failure_policy: found 'fail', .* allowed: 'recompute'"),
        ("recompute", "bset", {}, r"isolate\[0\]: found 'bset', allowed: 'best', 'other'"),
        ("recompute", "best", {"kv_role": "kv_producer"}, "'best' .* has kv_role kv_producer"),
    ],
)
def test_the_limits_of_isolation_are_errors_at_the_start(
    policy: str, isolate: str, more: dict[str, Any], says: str
) -> None:
    best, other = Script("best"), Script("other")
    connectors = [child_config(best, **more), child_config(other)]
    with pytest.raises(ConfigError, match=says):
        Rig("kvobs", connectors=connectors, kvobs={"names": ["best", "other"], "isolate": [isolate]}, policy=policy)
    assert best.calls == other.calls == [], "before anything is built"


@pytest.mark.parametrize(
    ("connector", "why"),
    [
        ({"kv_connector": "NixlConnector"}, "hands KV over to another engine"),
        ({"kv_connector": "MooncakeConnector"}, "hands KV over to another engine"),
        ({"kv_connector": "MultiConnector", "kv_connector_module_path": ROUTERS["stock"]}, "is a MultiConnector"),
    ],
)
def test_a_connector_that_can_not_be_left_out_is_refused_and_named(connector: dict[str, str], why: str) -> None:
    entry = {
        **connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child_config(Script("x"))]},
    }
    connectors = [entry, child_config(Script("other"))]
    with pytest.raises(ConfigError, match=rf"isolate: found 'best' \(\w+\), which can.t be isolated: it {why}"):
        Rig("kvobs", connectors=connectors, kvobs={"names": ["best", "other"], "isolate": ["best"]})


def test_the_operator_decides_who_is_best_effort(a: Script) -> None:
    """N9: that a class does not set ``requires_kv_delivery`` is no reason against it."""
    rig = Rig("kvobs", connectors=[child_config(a)], kvobs={"names": ["best"], "isolate": ["best"]})
    assert rig.workers[0].requires_kv_delivery is True


@pytest.mark.parametrize("hook", ["has_pending_push_work", "has_pending_block_frees"])
def test_what_a_child_waits_for_while_it_is_out_is_still_waited_for(engine: Engine, a: Script, hook: str) -> None:
    """Its open transfers hold blocks, whether it takes part or not."""
    ask = getattr(engine.rig.connector, hook)
    a.answers[hook] = True
    assert ask()
    a.raises[hook] = FAILURE
    assert not ask()
    assert engine.is_out
    a.raises.clear()
    assert ask()


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
    assert counted(engine.rig, "kvobs_unused_hit_tokens_total", 0, "other_chosen") == 2 * BLOCK
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1


# --- N9: synchronous loads, alone or beside connectors that do not save


class Lone:
    """An engine whose only saving connector is isolated and offers synchronous loads, like LMCache V1."""

    def __init__(self, a: Script, *others: dict[str, Any]) -> None:
        connectors = [child_config(a, "BestEffortConnector"), *others]
        self.rig = Rig("kvobs", connectors=connectors, kvobs={"names": ["best"], "isolate": ["best"]})
        a.offers["r"] = [SYNC, (0, False)]
        self.request = self.rig.add("r", max_tokens=3)


@pytest.mark.parametrize("has_consumer", [False, True])
def test_a_synchronous_hit_is_used_where_no_other_connector_saves(a: Script, b: Script, has_consumer: bool) -> None:
    lone = Lone(a, *([child_config(b, kv_role="kv_consumer")] if has_consumer else []))
    lone.rig.step()
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK]
    lone.rig.run(4)
    assert counted(lone.rig, "kvobs_loads_total", 0, "sync", "ok") == 1
    assert_nothing_is_left(lone.rig)


@pytest.mark.parametrize("hook", ["start_load_kv", "wait_for_layer_load"])
def test_a_synchronous_load_that_raises_is_recomputed_and_nothing_is_saved_in_its_step(a: Script, hook: str) -> None:
    lone = Lone(a)
    a.raises[hook] = FAILURE
    lone.rig.step()
    assert lone.rig.output is not None
    assert lone.rig.output.invalid_block_ids == set(a.called("update_state_after_alloc")[0][2][0][:2])
    assert lone.request.num_computed_tokens == 0
    if hook == "start_load_kv":
        assert a.called("save_kv_layer") == []
    assert a.called("wait_for_save") == []
    a.raises.clear()
    lone.rig.run(5)
    assert lone.rig.status("r") == "gone"
    assert list(lone.request.output_token_ids) == [7, 7, 7]
    assert counted(lone.rig, "kvobs_loads_total", 0, "sync", "failed") == 1
    assert counted(lone.rig, "kvobs_failed_sync_loads_total", 0) == 1
    assert_nothing_is_left(lone.rig)


@pytest.mark.parametrize("hook", ["build_connector_meta", "bind_connector_metadata"])
def test_a_synchronous_load_that_was_not_ordered_is_recomputed(a: Script, hook: str) -> None:
    lone = Lone(a)
    a.raises[hook] = FAILURE
    lone.rig.step()
    assert lone.request.num_computed_tokens == 0
    assert a.called("start_load_kv") == a.called("wait_for_save") == []
    lone.rig.run(5)
    assert list(lone.request.output_token_ids) == [7, 7, 7]
    assert_nothing_is_left(lone.rig)


# --- what can't be built


@pytest.mark.parametrize("where", ["scheduler", "worker 0", "worker 1", "everywhere"])
def test_a_child_that_can_not_be_built_is_out_for_the_engines_life(
    where: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[str] = []

    def refuse(hook: str, role: Any) -> None:
        if hook == "__init__":
            built.append("scheduler" if role.name == "SCHEDULER" else f"worker {sum('worker' in b for b in built)}")
            if where in (built[-1], "everywhere"):
                raise FAILURE

    a.on_call = refuse
    engine = Engine(monkeypatch, a, b)
    assert "connector 'best' can't be built (ConnectionError: store is gone)" in caplog.text
    a.offers["early"] = b.offers["r"] = KV
    engine.rig.add("early", max_tokens=2)
    engine.step(2)
    for rank in (0, 1):
        a.say(rank, received="early")
    engine.run_to_end("early")
    assert engine.is_out
    before = len(a.called("get_num_new_matched_tokens"))
    engine.step(3, seconds=1000)
    assert engine.is_out
    engine.rig.add("r", max_tokens=2)
    engine.step(2)
    for rank in (0, 1):
        b.say(rank, received="r")
    engine.run_to_end("r")
    assert len(a.called("get_num_new_matched_tokens")) == before
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 0
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_a_child_that_is_not_isolated_and_can_not_be_built_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    b.raises["__init__"] = FAILURE
    with pytest.raises(ConnectionError, match="store is gone"):
        Engine(monkeypatch, a, b)
    assert len(a.called("shutdown")) == 1


# --- a router within the router


def test_a_nested_multi_connector_loads_saves_and_has_stats(
    a: Script, b: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": ROUTERS["stock"],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child_config(a), child_config(b)]},
    }
    outer = Script("outer")
    rig = Rig("kvobs", connectors=[inner, child_config(outer)], ranks=2)
    b.offers["r"] = KV
    a.promises.add("r")
    rig.add("r")
    rig.step()
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [0]
    for rank in (0, 1):
        b.say(rank, received="r")
    rig.run(3)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    for rank in (0, 1):
        a.say(rank, saved="r")
    rig.run(2)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert counted(rig, "kvobs_saves_total", 0, "ok") == 1
    assert_nothing_is_left(rig)


def test_a_nested_multi_connectors_stats_pass_through(a: Script, b: Script) -> None:
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": ROUTERS["stock"],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child_config(a)]},
    }
    rig = Rig("kvobs", connectors=[inner, child_config(b)])
    a.stats.append(Stats(data={"n": 3}))
    rig.run(2)
    noted = [payload for payload in rig.stats if "MultiConnector" in payload]
    assert str(noted).count("'n': 3") >= 1


def test_kvobs_within_kvobs_is_refused(a: Script, b: Script) -> None:
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvobs",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child_config(a)]},
    }
    with pytest.raises(ConfigError, match=r"connectors\[0\].*kvobs within kvobs; list its connectors here"):
        Rig("kvobs", connectors=[inner, child_config(b)])
    assert a.calls == b.calls == []
