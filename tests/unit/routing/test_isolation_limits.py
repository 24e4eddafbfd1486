"""What can't be isolated, synchronous loads, and best-effort connectors that can't be built."""

from typing import Any

import pytest

from kvobs.schema.config import ConfigError
from kvobs.testing import BLOCK, ROUTERS, Rig, Script
from kvobs.vllm_api.versions import V2_RUNNER
from tests.support.best_effort import FAILURE, KV, SYNC, Isolating
from tests.support.rig import assert_nothing_is_left, child_config, counted


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"kv_role": "kv_producer"}, "has kv_role kv_producer"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": None}, "hands KV over to another engine"),
        ({"kv_connector": "MooncakeConnector", "kv_connector_module_path": None}, "hands KV over to another engine"),
        ({"kv_connector": "MultiConnector", "kv_connector_module_path": ROUTERS["stock"]}, "is a MultiConnector"),
    ],
)
def test_a_connector_that_can_not_be_left_out_is_refused_before_any_is_built(more: dict[str, Any], why: str) -> None:
    best, other = Script("best"), Script("other")
    connectors = [child_config(best) | more, child_config(other)]
    with pytest.raises(ConfigError, match=rf"isolate: found 'best' \(\w+\), which can.t be isolated: it {why}"):
        Rig("kvobs", connectors=connectors, kvobs={"names": ["best", "other"], "isolate": ["best"]})
    assert best.calls == other.calls == []


def test_the_operator_decides_who_is_best_effort(a: Script) -> None:
    """N9: that a class does not set ``requires_kv_delivery`` is no reason against it."""
    rig = Rig("kvobs", connectors=[child_config(a)], kvobs={"names": ["best"], "isolate": ["best"]})
    assert rig.workers[0].requires_kv_delivery is True


@pytest.mark.parametrize("hook", ["has_pending_push_work", "has_pending_block_frees"])
def test_quarantined_childs_pending_work_is_waited_for(engine: Isolating, a: Script, hook: str) -> None:
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
def test_nobody_waits_for_one_that_is_out(policy: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """It had said "not yet", and would have had a minute to say more."""
    engine = Isolating(monkeypatch, a, b, load_policy=policy, lookup_timeout_ms=60_000)
    a.offers["r"], b.offers["r"] = (None, False), KV
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    assert engine.rig.status("r") == "WAITING"
    a.raises["take_events"] = FAILURE
    engine.step()
    engine.step()
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    engine.say(b, received="r")
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1


@pytest.mark.parametrize("policy", ["first", "longest"])
def test_a_synchronous_offer_is_unused_beside_connectors_that_save(
    policy: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Isolating(monkeypatch, a, b, load_policy=policy)
    a.offers["r"], b.offers["r"] = (3 * BLOCK, False), SYNC
    engine.rig.add("r", max_tokens=1)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "sync", "ok") == 1
    assert counted(engine.rig, "kvobs_unused_hit_tokens_total", 0, "other_chosen") == BLOCK
    assert counted(engine.rig, "kvobs_offered_tokens_total", 0) == 3 * BLOCK
    assert "connector 'best' is isolated and offers a synchronous load: it is not used" in caplog.text


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


def test_under_the_v2_runner_a_synchronous_hit_is_not_used(a: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute wrong answers after a failure, in silence: W23."""
    monkeypatch.setenv(V2_RUNNER, "1")
    lone = Lone(a)
    lone.rig.run(4)
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [0]
    assert counted(lone.rig, "kvobs_unused_offers_total", 0) == 1
    assert list(lone.request.output_token_ids) == [7, 7, 7]
    assert_nothing_is_left(lone.rig)


@pytest.mark.parametrize(
    "hook",
    [
        *("start_load_kv", "wait_for_layer_load", "build_connector_meta", "bind_connector_metadata"),
        "update_state_after_alloc",
    ],
)
def test_a_synchronous_load_that_fails_is_recomputed_and_nothing_is_saved_in_its_step(a: Script, hook: str) -> None:
    lone = Lone(a)
    a.raises[hook] = FAILURE
    lone.rig.step()
    assert lone.rig.output is not None
    assert lone.rig.output.invalid_block_ids == set(a.called("update_state_after_alloc")[0][2][0][:2])
    assert lone.request.num_computed_tokens == 0
    assert bool(a.called("start_load_kv")) is hook.endswith(("load_kv", "layer_load", "after_alloc"))
    assert a.called("save_kv_layer") == a.called("wait_for_save") == [], "others may share the unfilled blocks"
    a.raises.clear()
    lone.rig.run(5)
    assert list(lone.request.output_token_ids) == [7, 7, 7]
    assert counted(lone.rig, "kvobs_loads_total", 0, "sync", "failed") == 1
    assert counted(lone.rig, "kvobs_failed_sync_loads_total", 0) == 1
    assert_nothing_is_left(lone.rig)


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
    engine = Isolating(monkeypatch, a, b)
    assert "connector 'best' can't be built (ConnectionError: store is gone)" in caplog.text
    assert engine.is_out, "before the first lookup: it may wait for an answer of the worker's side, forever"
    a.offers["early"] = b.offers["r"] = KV
    engine.rig.add("early", max_tokens=2)
    engine.step(2)
    engine.say(a, received="early")
    engine.run_to_end("early")
    assert engine.is_out
    engine.step(3, seconds=1000)
    assert engine.is_out
    engine.rig.add("r", max_tokens=2)
    engine.step(2)
    engine.say(b, received="r")
    engine.run_to_end("r")
    assert a.called("get_num_new_matched_tokens") == []
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 0
    assert counted(engine.rig, "kvobs_loads_total", 1, "async", "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_another_child_that_can_not_be_built_ends_start(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    b.raises["__init__"] = FAILURE
    with pytest.raises(ConnectionError, match="store is gone"):
        Isolating(monkeypatch, a, b)
    assert len(a.called("shutdown")) == 1
