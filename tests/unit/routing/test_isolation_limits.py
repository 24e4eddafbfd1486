"""What can't be isolated, synchronous loads, and best-effort connectors that can't be built."""

from typing import Any

import pytest

from kvobs.schema.config import ConfigError
from kvobs.testing import BLOCK, ROUTERS, Rig, Script
from kvobs.vllm_api.versions import V2_RUNNER
from tests.support.best_effort import FAILURE, KV, SYNC, Isolating
from tests.support.rig import assert_nothing_is_left, counted, entry_for


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"kv_role": "kv_producer"}, "has kv_role kv_producer"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": None}, "transfers KV to another engine"),
        ({"kv_connector": "MooncakeConnector", "kv_connector_module_path": None}, "transfers KV to another engine"),
        ({"kv_connector": "MultiConnector", "kv_connector_module_path": ROUTERS["stock"]}, "is a MultiConnector"),
    ],
)
def test_what_cannot_be_isolated_is_refused_before_any_is_built(more: dict[str, Any], why: str) -> None:
    best, other = Script("best"), Script("other")
    connectors = [entry_for(best) | more, entry_for(other)]
    with pytest.raises(ConfigError, match=rf"best_effort: found 'best' \(\w+\), which can.t be best-effort: it {why}"):
        Rig("kvobs", connectors=connectors, kvobs={"names": ["best", "other"], "best_effort": ["best"]})
    assert best.calls == other.calls == []


def test_the_operator_decides_who_is_best_effort(a: Script) -> None:
    """N9: that a class does not set ``requires_kv_delivery`` is no reason against it."""
    rig = Rig("kvobs", connectors=[entry_for(a)], kvobs={"names": ["best"], "best_effort": ["best"]})
    assert rig.workers[0].requires_kv_delivery is True


@pytest.mark.parametrize("hook", ["has_pending_push_work", "has_pending_block_frees"])
def test_quarantined_connectors_pending_work_is_waited_for(engine: Isolating, a: Script, hook: str) -> None:
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
def test_a_sync_offer_is_unused_next_to_connectors_that_save(
    policy: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Isolating(monkeypatch, a, b, load_policy=policy)
    a.offers["r"], b.offers["r"] = (3 * BLOCK, False), SYNC
    engine.rig.add("r", max_tokens=1)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 1, "sync", "ok") == 1
    assert counted(engine.rig, "kvobs_unused_hit_tokens_total", 0, "other_chosen") == BLOCK
    assert counted(engine.rig, "kvobs_offered_tokens_total", 0) == 3 * BLOCK
    assert "best-effort connector 'best' offers a synchronous load. The load is not used" in caplog.text


class Lone:
    """An engine whose only saving connector is isolated and offers synchronous loads, like LMCache V1."""

    def __init__(self, a: Script, *others: dict[str, Any]) -> None:
        connectors = [entry_for(a, "BestEffortConnector"), *others]
        self.rig = Rig("kvobs", connectors=connectors, kvobs={"names": ["best"], "best_effort": ["best"]})
        a.offers["r"] = [SYNC, (0, False)]
        self.request = self.rig.add("r", max_tokens=3)


@pytest.mark.parametrize("has_consumer", [False, True])
def test_a_sync_hit_is_used_where_no_other_connector_saves(a: Script, b: Script, has_consumer: bool) -> None:
    lone = Lone(a, *([entry_for(b, kv_role="kv_consumer")] if has_consumer else []))
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
def test_a_failed_sync_load_is_recomputed_and_nothing_is_saved(a: Script, hook: str) -> None:
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
def test_a_connector_that_fails_to_build_is_out_for_good(
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


def test_another_connector_that_can_not_be_built_ends_start(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    b.raises["__init__"] = FAILURE
    with pytest.raises(ConnectionError, match="store is gone"):
        Isolating(monkeypatch, a, b)
    assert len(a.called("shutdown")) == 1


def test_the_start_logs_the_isolated_ones_and_the_longest_wait(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Isolating(monkeypatch, a, b)
    assert (
        "best-effort connectors: best. A connector that fails goes into quarantine. A request whose load it may have "
        "started"
    ) in caplog.text
    assert "waits up to 10 s" in caplog.text


class OfAnother:
    """An engine in which an isolated connector had a hit, and another one loads; then the former raises half-way."""

    def __init__(self, a: Script, b: Script, answer: Any) -> None:
        connectors = [entry_for(a), entry_for(b, "BestEffortConnector")]
        self.rig = Rig(
            "kvobs", connectors=connectors, kvobs={"names": ["disk", "best"], "best_effort": ["best"]}, ranks=2
        )
        a.offers["r"] = [answer, (0, False)]
        a.offers["theirs"] = answer
        b.offers["r"] = (BLOCK, True)
        self.request = self.rig.add("r", max_tokens=3)
        self.rig.add("theirs", max_tokens=3)

    def end(self) -> None:
        self.rig.run(6)
        assert list(self.request.output_token_ids) == [7, 7, 7]
        assert counted(self.rig, "kvobs_quarantines_total", 1) == 1
        assert_nothing_is_left(self.rig)

    def outcomes(self, mode: str) -> tuple[int, ...]:
        return tuple(counted(self.rig, "kvobs_loads_total", 0, mode, outcome) for outcome in ("ok", "failed"))


def test_a_sync_load_that_an_isolated_one_may_overwrite_fails(a: Script, b: Script) -> None:
    engine = OfAnother(a, b, SYNC)
    b.raises["start_load_kv"] = FAILURE
    engine.rig.step()
    assert engine.rig.output is not None
    blocks = {request: ids for request, _, (ids,) in a.called("update_state_after_alloc")}
    assert engine.rig.output.invalid_block_ids == set(blocks["r"][:2]), "of the other request it knew nothing"
    assert engine.request.num_computed_tokens == 0
    b.raises.clear()
    engine.end()
    assert engine.outcomes("sync") == (1, 1)


@pytest.mark.parametrize("is_same_step", [True, False])
def test_an_asynchronous_load_that_it_may_have_overwritten_fails(is_same_step: bool, a: Script, b: Script) -> None:
    """Also one that began before, and is still under way."""
    engine = OfAnother(a, b, KV)
    if not is_same_step:
        engine.rig.run(2)
    b.raises["start_load_kv"] = FAILURE
    engine.rig.step()
    b.raises.clear()
    for rank in (0, 1):
        a.say(rank, received="r theirs")
    engine.end()
    assert engine.outcomes("async") == (1, 1)


def test_a_load_maybe_overwritten_at_resumption_is_recomputed(a: Script, b: Script) -> None:
    """Connectors load what is scheduled for the first time: here after another one's load."""
    engine = OfAnother(a, b, KV)
    engine.rig.run(2)
    for rank in (0, 1):
        a.say(rank, received="r theirs")
    engine.rig.step()
    b.raises["start_load_kv"] = FAILURE
    engine.rig.step()
    assert engine.rig.output is not None
    blocks = {request: ids for request, tokens, (ids,) in a.called("update_state_after_alloc") if tokens}
    assert engine.rig.output.invalid_block_ids == set(blocks["r"][:2])
    assert engine.request.num_computed_tokens == 0
    b.raises.clear()
    engine.end()


def test_a_hit_without_a_load_costs_nothing(a: Script, b: Script) -> None:
    """The forward computes these tokens after the connector has raised."""
    engine = OfAnother(a, b, (0, False))
    b.offers["r"] = SYNC
    b.raises["start_load_kv"] = FAILURE
    engine.rig.step()
    assert engine.rig.output is not None
    assert engine.rig.output.invalid_block_ids == set()
    b.raises.clear()
    engine.end()


def test_bad_blocks_that_can_not_be_read_fail_the_load(engine: Isolating, a: Script) -> None:
    """They may be any of its blocks, and the receipt comes all the same."""
    a.offers["r"] = [KV, (0, False)]
    engine.rig.add("r", max_tokens=2)
    engine.step(2)
    engine.say(a, received="r")
    a.raises["get_block_ids_with_load_errors"], a.raises_on = FAILURE, {1}
    engine.step()
    a.raises.clear()
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert_nothing_is_left(engine.rig)


def test_with_several_groups_a_raise_in_a_load_ends_no_engine(a: Script, b: Script) -> None:
    """vLLM ends the engine on bad blocks there."""
    a.offers["r"] = b.offers["r"] = (2 * BLOCK, False)
    a.raises["start_load_kv"] = OSError("a is stuck")
    rig = Rig(
        "kvobs", connectors=[entry_for(a), entry_for(b)], kvobs={"names": ["a", "b"], "best_effort": ["a"]}, groups=2
    )
    rig.add("r")
    rig.run(4)
    assert rig.status("r") == "gone"
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
