"""A best-effort connector sees a request whole or not at all."""

from kvobs.testing import BLOCK, Script
from kvobs.vllm_api.hooks import HOOKS
from tests.support.best_effort import FAILURE, KV, Isolating, named
from tests.support.rig import assert_nothing_is_left


def test_known_requests_go_on_being_reported_and_are_not_saved(engine: Isolating, a: Script) -> None:
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


def test_a_failure_without_requests_taints_none(engine: Isolating, a: Script) -> None:
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


def test_a_hidden_request_of_a_preemption_stays_hidden(engine: Isolating, a: Script, b: Script) -> None:
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.rig.add("hidden", max_tokens=20)
    engine.step(2)
    engine.step(2, seconds=2)
    assert not engine.is_out
    engine.rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step(3)
    assert len([r for r in b.called("get_num_new_matched_tokens") if r == "hidden"]) > 1, "it was looked up again"
    engine.run_to_end("hidden")
    engine.step(2)
    assert named(a, "hidden") == []
    assert_nothing_is_left(engine.rig)


def test_while_out_a_known_request_is_asked_about_but_not_loaded(engine: Isolating, a: Script) -> None:
    """N4: LMCache drops its old block table nowhere else."""
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=3)
    engine.step(2)
    engine.say(a, failed="r")
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.run_to_end("r")
    assert a.called("get_num_new_matched_tokens") == ["r", "r"]
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK, 0]
    assert_nothing_is_left(engine.rig)


def test_a_quarantined_connector_gets_exactly_what_vllm_calls(engine: Isolating, a: Script, b: Script) -> None:
    """N3, N2: around a quarantine the calls of a connector differ from its sibling's by what is hidden from it only."""
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
