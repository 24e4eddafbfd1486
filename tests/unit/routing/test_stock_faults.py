"""What is wrong in vLLM's own MultiConnector, by the names of the design: each test must fail there, and pass here.

Where stock has nothing to compare with, its docstring is the reason.
"""

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.connectors.configured import read_specs
from kvobs.testing import BLOCK, Rig, Script, engine_config, transfer_config
from tests.support.rig import Blocks, assert_gone_after, assert_nothing_is_left, counted, entry_for, started
from tests.support.scripted import Events, Handshake, Stats
from tests.support.stock import wrong_in_stock

KV = (2 * BLOCK, True)  # an offer of two blocks, loaded in the background
SYNC = (2 * BLOCK, False)


def build_prom(router: str, registry: CollectorRegistry, *connectors: dict[str, Any]) -> Any:
    """Build the metrics as vLLM's API server does, into a registry of the test's own."""
    config = engine_config(transfer_config(router, list(connectors)))
    cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return cls.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})


@wrong_in_stock(AssertionError, "unions all connectors' reports: the scheduler asserts, or resumes too early")
def test_w1_only_the_owners_report_of_a_load_counts(router: str, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    rig = started(router, a, b, ranks=2)
    b.say(0, received="r")
    a.say(0, received="r")
    b.say(1, received="r")
    assert rig.step().finished_recving is None
    a.say(1, received="r")
    assert rig.step().finished_recving == {"r"}
    b.say(0, received="r")
    b.say(1, received="r")
    rig.step()  # the request runs by now: stock's scheduler asserts
    rig.run(3)
    assert rig.status("r") == "gone"
    if router == "kvobs":
        assert counted(rig, "kvobs_unexpected_reports_total", 1, "load") == 4
        assert_nothing_is_left(rig)


@wrong_in_stock(AssertionError, "unions failures, each of which is a receipt: resumes while the owner loads")
def test_w2_a_failure_of_another_connector_is_no_receipt(router: str, a: Script, b: Script) -> None:
    """It may have written into these blocks: they are computed, once the owner no longer writes."""
    a.offers["r"] = [KV, (0, False)]
    rig = started(router, a, b)
    b.say(0, failed="r")
    rig.run(2)
    assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    a.say(0, received="r")
    computed = 0
    for _ in range(5):
        rig.step()
        computed = max(computed, rig.scheduled.num_scheduled_tokens.get("r", 0))
    assert computed > 2 * BLOCK
    assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(rig, "kvobs_unexpected_reports_total", 1, "failure") == 1
    assert_nothing_is_left(rig)


@wrong_in_stock(AssertionError, "the first non-zero hit wins the whole request")
def test_w3_policy_longest_takes_the_longest_offer(router: str, a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = (BLOCK, True), (3 * BLOCK, True)
    started(router, a, b, kvobs={"load_policy": "longest"})
    assert b.called("update_state_after_alloc")[0][1] == 3 * BLOCK


@wrong_in_stock(AssertionError, "one connector's 'not yet' hides an earlier connector's ready hit")
def test_w4_a_hit_needs_no_answer_from_later_connectors(router: str, a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = KV, (None, False)
    assert started(router, a, b, kvobs={"wait_for": "earlier"}).status("r") == "WAITING_FOR_REMOTE_KVS"


@pytest.mark.parametrize("router", ["kvobs", "stock"])
def test_w4_by_default_every_answer_is_waited_for_as_in_stock(router: str, a: Script, b: Script) -> None:
    """N5: LMCache's server keeps locks for a lookup that nobody comes back to."""
    a.offers["r"], b.offers["r"] = KV, [(None, False), (None, False), (0, False)]
    rig = started(router, a, b, steps=2)
    assert rig.status("r") == "WAITING"
    assert b.called("update_state_after_alloc") == []
    rig.step()
    assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [0]


@wrong_in_stock(AssertionError, "waits for a slow connector without end")
def test_w4_a_slow_connector_is_waited_for_only_so_long(router: str, a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = (None, False), KV
    rig = started(router, a, b, kvobs={"lookup_timeout_ms": 0.001}, steps=2)
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
    if router == "kvobs":
        assert counted(rig, "kvobs_lookups_total", 0, "timeout") == 1


@wrong_in_stock(AssertionError, "the choice made at an earlier lookup is never cleared")
def test_w5_a_stale_choice_does_not_load(router: str, a: Script, b: Script) -> None:
    """vLLM looks up again after it could not allocate; the hit is gone, and what it now loads is nobody's."""
    a.offers["r"] = [KV, (0, False)]
    rig = Rig(router, a, b)
    request = rig.add("r")
    rig.connector.get_num_new_matched_tokens(request, 0)
    rig.connector.get_num_new_matched_tokens(request, 0)
    rig.connector.update_state_after_alloc(request, Blocks([1, 2]), 2 * BLOCK)
    assert a.called("update_state_after_alloc")[-1][1] == 0


@wrong_in_stock(ValueError, "rebuilds stats through the registry of names: engine dead at the first transfer")
def test_w6_stats_of_a_connector_by_module_path_are_rebuilt(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, connectors=[entry_for(a, "SummedConnector"), entry_for(b)])
    a.stats.append(Stats(data={"n": 3}))
    rig.step()
    assert type(rig.connector).build_kv_connector_stats(rig.stats[-1])["SummedConnector"].to_dict() == {"n": 3}


@wrong_in_stock(AssertionError, "keys stats by class: connectors of one class are merged")
def test_w7_connectors_of_one_class_keep_their_own_stats(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    a.stats.append(Stats(data={"n": 3}))
    b.stats.append(Stats(data={"n": 4}))
    stats = rig.connector.get_kv_connector_stats()
    assert {name: s.data for name, s in stats.data.items() if name != "kvobs"} == {
        "ScriptedConnector": {"n": 3},
        "ScriptedConnector-2": {"n": 4},
    }


@wrong_in_stock(ValueError, "two classes that share a metrics class register the same names twice: no start")
def test_w8_a_metric_family_is_registered_once(router: str, a: Script, b: Script) -> None:
    registry = CollectorRegistry()
    build_prom(router, registry, entry_for(a, "MeteredConnector"), entry_for(b, "OtherMeteredConnector"))
    (family,) = [f for f in registry.collect() if f.name == "scripted_things"]
    assert family.documentation == "things"


@wrong_in_stock(AssertionError, "a connector that has stats and no metrics ends the API server (0.32)")
def test_w8_a_connector_without_metrics_is_skipped(router: str, a: Script, b: Script) -> None:
    metrics = build_prom(router, CollectorRegistry(), entry_for(a), entry_for(b, "MeteredConnector"))
    metrics.observe({"ScriptedConnector": {"n": 1}, "MeteredConnector": {"n": 2}})


def test_w7_w8_series_differ_by_the_connector_label(a: Script, b: Script) -> None:
    """Stock has no such label."""
    registry = CollectorRegistry()
    metrics = build_prom("kvobs", registry, entry_for(a, "MeteredConnector"), entry_for(b, "MeteredConnector"))
    metrics.observe({"MeteredConnector": {"n": 1}, "MeteredConnector-2": {"n": 2}}, 0)
    values = [
        registry.get_sample_value("scripted_things_total", {"model_name": "tiny", "engine": "0", "connector": name})
        for name in ("MeteredConnector", "MeteredConnector-2")
    ]
    assert values == [1, 2]


@wrong_in_stock(TypeError, "passes engine_id twice")
def test_w9_a_connector_may_have_its_own_engine_id(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, connectors=[entry_for(a, engine_id="mine"), entry_for(b)])
    ids = [connector._kv_transfer_config.engine_id for connector in rig.connector._connectors]
    assert ids[0] == "mine"
    assert ids[1] == rig.scheduler.vllm_config.kv_transfer_config.engine_id


def test_w9_the_data_parallel_suffix_is_added_once(a: Script, b: Script) -> None:
    """Stock can't be asked: it has failed before."""
    parent = transfer_config(
        "kvobs", [entry_for(a, engine_id="mine"), entry_for(b, engine_id="x_dp1")], engine_id="engine_dp1"
    )
    assert [spec.transfer_config.engine_id for spec in read_specs(parent)] == ["mine_dp1", "x_dp1"]


@wrong_in_stock(AssertionError, "keeps the first connector's handshake, and broadcasts it to all")
def test_w10_each_connector_gets_its_own_handshake_back(router: str, a: Script, b: Script) -> None:
    a.handshake, b.handshake = Handshake("a"), Handshake("b")
    Rig(router, a, b, ranks=2)
    for script in (a, b):
        (got,) = script.called("set_xfer_handshake_metadata")
        assert got == {0: Handshake(script.tag), 1: Handshake(script.tag)}


@wrong_in_stock(ValueError, "broadcasts: a connector that never shakes hands refuses pp_rank > 0")
def test_w10_pipelines_work_with_a_connector_without_handshake(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, connectors=[entry_for(a, "PipelineAwareConnector"), entry_for(b)])
    a.handshake = Handshake("a")
    a.calls.clear()
    b.calls.clear()
    sent = {(pp, 0): rig.workers[0].get_handshake_metadata() for pp in (0, 1)}
    rig.connector.set_xfer_handshake_metadata_pp_aware(sent)
    assert list(a.called("set_xfer_handshake_metadata_pp_aware")[0]) == [(0, 0), (1, 0)]
    assert b.called("set_xfer_handshake_metadata") == [{}]


@wrong_in_stock(AssertionError, "None from one connector hides the other's count: the request is never released")
def test_w11_a_connector_that_reports_on_one_rank_completes(router: str, a: Script, b: Script) -> None:
    b.finished_count = 1
    b.promises.add("r")
    assert_gone_after(started(router, a, b, ranks=2, steps=3), b, 2, saved="r")


@wrong_in_stock(ValueError, "unequal finished counts raise at start")
def test_w11_connectors_may_state_different_counts(router: str, a: Script, b: Script) -> None:
    a.finished_count, b.finished_count = 2, 1
    a.offers["r"] = KV
    b.promises.add("r")
    rig = started(router, a, b, ranks=2)
    for rank in (0, 1):
        a.say(rank, received="r")
    rig.run(4)
    assert_gone_after(rig, b, 2, saved="r")


@wrong_in_stock(AssertionError, "waits for reports of ranks that there are not")
def test_w11_a_count_above_the_number_of_ranks_is_theirs(router: str, a: Script) -> None:
    a.finished_count = 3
    a.offers["r"] = KV
    a.promises.add("r")
    rig = started(router, a, ranks=2)
    for word in ("received", "saved"):
        for rank in (0, 1):
            a.say(rank, **{word: "r"})
        rig.run(4)
    assert rig.status("r") == "gone"
    if router == "kvobs":
        assert_nothing_is_left(rig)


@wrong_in_stock(AssertionError, "any connector's report counts down another's promise")
def test_w12_only_the_promising_connectors_report_releases(router: str, a: Script, b: Script) -> None:
    a.promises.add("r")
    rig = started(router, a, b, steps=3)
    b.say(0, saved="r")
    rig.run(2)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    assert_gone_after(rig, a, 2, saved="r")


@wrong_in_stock(AssertionError, "does not count accepted partial tails: released before the tail is saved")
def test_w12_an_accepted_partial_tail_is_a_promise(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    request = rig.add("r")
    a.tails.add("r")
    b.promises.add("r")
    assert rig.connector.register_finished_partial_tail(request, ([1],), [(0, 1, 2)]) is True
    rig.abort("r")
    b.say(0, saved="r")
    rig.run(2)
    assert rig.status("r") != "gone"
    assert_gone_after(rig, a, 2, saved="r")


def test_w12_a_report_before_its_promise_is_held(a: Script, b: Script) -> None:
    """Stock passes it on at once, and its scheduler asserts; see the next test."""
    rig = Rig("kvobs", a, b)
    a.promises.add("r")
    request = rig.add("r", max_tokens=5)
    rig.step()
    a.say(0, saved="r")
    rig.step()
    assert rig.status("r") == "RUNNING"
    assert rig.connector.request_finished_all_groups(request, ([1],)) == (False, None)
    rig.step()
    assert a.called("update_connector_output")[-1]["sent"] == {"r"}
    assert counted(rig, "kvobs_saves_total", 0, "ok") == 1


@wrong_in_stock(AssertionError, "an early report frees a running request: the scheduler asserts")
def test_w12_a_running_request_survives_an_early_report(router: str, a: Script, b: Script) -> None:
    assert_gone_after(started(router, a, b, max_tokens=5), a, 8, saved="r")


@wrong_in_stock(AssertionError, "never collects the workers' KV cache events")
def test_w13_kv_cache_events_reach_the_connector_that_made_them(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b, ranks=2)
    b.events = {0: Events("x"), 1: Events("x", "y")}
    rig.step()
    assert a.called("update_connector_output")[-1]["events"] is None
    got = b.called("update_connector_output")[-1]["events"]
    assert got is not None
    assert sorted(got.get_all_events()) == ["x", "x", "y"]
    assert got.get_number_of_workers() == 2


@pytest.mark.parametrize("is_received_later", [True, False])
@wrong_in_stock(RuntimeError, "block errors with several KV cache groups end the engine")
def test_w16_with_several_groups_a_failed_load_is_recomputed(
    router: str, a: Script, b: Script, is_received_later: bool
) -> None:
    a.offers["r"] = [KV, (0, False)]
    rig = started(router, a, b, ranks=2, groups=2)
    a.bad_blocks[1] = {a.called("update_state_after_alloc")[0][2][1][1]}
    rig.run(int(is_received_later))
    for rank in (0, 1):
        a.say(rank, received="r")
    computed = 0
    for _ in range(8):
        rig.step()
        computed = max(computed, rig.scheduled.num_scheduled_tokens.get("r", 0))
    assert rig.status("r") == "gone"
    if router == "kvobs":
        assert computed > 2 * BLOCK, "nothing of the load is left"
        assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
        assert counted(rig, "kvobs_load_tokens_total", 0) == 0
        assert_nothing_is_left(rig)


def test_w17_offers_that_nobody_claimed_are_counted(a: Script, b: Script) -> None:
    """Stock counts nothing: a hand-off that waits for an unchosen decode connector is invisible there."""
    a.offers["r"], b.offers["r"] = KV, KV
    rig = Rig("kvobs", a, b)
    rig.add("r", do_remote_prefill=True)
    rig.step()
    assert counted(rig, "kvobs_unused_offers_total", 1) == 1
    assert counted(rig, "kvobs_unused_offers_total", 0) == 0


@wrong_in_stock(AssertionError, "does not say whose keys clash")
def test_w18_a_clash_names_both_owners_and_the_key(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b, kvobs={"names": ["one", "two"]})
    a.params["r"], b.params["r"] = {"host": 1}, {"host": 2}
    request = rig.add("r")
    with pytest.raises(RuntimeError) as error:
        rig.connector.request_finished_all_groups(request, ([1],))
    assert all(word in str(error.value) for word in ("'host'", "'one'", "'two'"))


@wrong_in_stock(AssertionError, "says nothing")
def test_w19_a_connectors_own_failure_policy_is_warned_of(
    router: str, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    Rig(router, connectors=[entry_for(a, kv_load_failure_policy="fail")])
    warnings = [r.getMessage() for r in caplog.records if "kv_load_failure_policy" in r.getMessage()]
    assert any("connectors[0]" in w and "recompute" in w and "no effect" in w for w in warnings)


@wrong_in_stock(AssertionError, "two completions for one request: the scheduler asserts, the server dies")
@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize("saver", ["a", "b"])
def test_w20_an_abort_of_a_load_with_a_save_completes_once(
    router: str, load_first: bool, saver: str, a: Script, b: Script
) -> None:
    """LMCache MP promises to save what it loads itself, and reports both."""
    a.offers["r"] = KV
    saves = a if saver == "a" else b
    saves.promises.add("r")
    rig = started(router, a, b, ranks=2)
    rig.abort("r")
    rig.step()
    completions = []
    for is_load in (load_first, not load_first):
        for rank in (0, 1):
            assert rig.status("r") == "FINISHED_ABORTED"
            (a if is_load else saves).say(rank, **{"received" if is_load else "saved": "r"})
            output = rig.step()
            completions += [*(output.finished_recving or ()), *(output.finished_sending or ())]
    assert completions == ["r"]
    assert rig.status("r") == "gone"
    if router == "kvobs":
        assert counted(rig, "kvobs_loads_total", 0, "async", "aborted") == 1
        assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 0
        assert counted(rig, "kvobs_saves_total", int(saves is b), "ok") == 1
        assert counted(rig, "kvobs_unexpected_reports_total", 0, "save") == 0
        assert_nothing_is_left(rig)


@wrong_in_stock(AssertionError, "says nothing, while the siblings keep the bad blocks: later hits are wrong")
def test_w21_a_failed_sync_load_names_siblings_that_may_save_it(
    router: str, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """N2: nothing is reset; what a sibling holds may be other engines', too."""
    a.offers["r"] = SYNC
    rig = Rig(router, a, b, kvobs={"names": ["one", "two"]})
    rig.add("r")
    a.bad_blocks[0] = {2}
    rig.step()
    assert 2 in a.called("update_state_after_alloc")[0][2][0][:2]
    assert a.called("reset_cache") == b.called("reset_cache") == []
    lines = [r.getMessage() for r in caplog.records if "synchronous load" in r.getMessage()]
    assert len(lines) == 1
    (line,) = lines
    assert "'one'" in line
    assert (
        "(two) may have saved its unfilled blocks in the same step, and later hits on these blocks give wrong "
        "answers. Clear"
    ) in line
    assert counted(rig, "kvobs_failed_sync_loads_total", 0) == 1


@wrong_in_stock(RuntimeError, "shows every connector the stats of all: one that refuses stats of another class ends it")
def test_w22_each_connector_is_shown_its_own_stats(router: str, a: Script, b: Script) -> None:
    """SpoolCache raises at any other; SparkCache reads its own out of what it is shown."""
    found = []

    def insist(output: Any) -> None:
        stats = output.kv_connector_stats
        if stats is not None and not isinstance(stats, Stats):
            raise RuntimeError(f"stats type is incompatible: {type(stats).__name__}")
        found.append(stats and dict(stats.data))

    a.on_output = insist
    rig = Rig(router, a, b, ranks=2)
    a.stats += [Stats(data={"n": 3}), Stats(data={"n": 4})]  # of the two ranks
    b.stats.append(Stats(data={"n": 5}))
    rig.step()
    b.stats.append(Stats(data={"n": 6}))
    rig.run(12)  # kvobs's numbers are among them
    assert found == [{"n": 7}] + [None] * 12
    assert rig.stats[0]["ScriptedConnector"] == {"n": 7}
