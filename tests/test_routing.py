"""The routing contract, on vLLM's real scheduler and aggregator.

R-tests hold for vLLM's own MultiConnector and for kvobs's. W-tests are the faults of vLLM's own: each runs against it
too, and must fail there for the stated reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tests.rig import BLOCK, ROUTERS, Rig, child_config, engine_config, transfer_config
from tests.scripted import Script

KV = (2 * BLOCK, True)  # an offer of two blocks, loaded in the background
SYNC = (2 * BLOCK, False)

both = pytest.mark.parametrize("router", list(ROUTERS))


def wrong_in_stock(raises: type[Exception], reason: str) -> pytest.MarkDecorator:
    """Run for kvobs and for stock, where the test must fail in this way."""
    stock = pytest.param("stock", marks=pytest.mark.xfail(raises=raises, reason=reason, strict=True))
    return pytest.mark.parametrize("router", ["kvobs", stock])


def counted(rig: Rig, metric: str, child: int, *labels: str) -> int:
    """Return what kvobs's scheduler side has counted so far."""
    from kvobs.recorder import WIDTH
    from kvobs.signals import SLOT

    return rig.connector._side.recorder._counts[child * WIDTH + SLOT[(metric, *labels)]]


def assert_nothing_is_left(rig: Rig) -> None:
    """Every block is free, and no book of kvobs's holds anything."""
    rig.run(3)
    assert rig.scheduler.requests == {}
    assert rig.free_blocks == rig.scheduler.kv_cache_config.num_blocks - 1
    side = rig.connector._side
    assert len(side.ledger) == len(side._offers) == 0
    assert not side._orders
    assert [worker._side._loads for worker in rig.workers] == [{}] * len(rig.workers)


@pytest.fixture
def a() -> Script:
    return Script("a")


@pytest.fixture
def b() -> Script:
    return Script("b")


class TestWhatHoldsInVllm:
    @both
    def test_r1_every_child_hears_of_everything(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        rig.add("r")
        rig.run(3)
        for hook in (
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "handle_preemptions",
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_layer_load",
            "save_kv_layer",
            "wait_for_save",
            "get_transfer_results",
            "update_connector_output",
            "request_finished",
        ):
            assert a.called(hook), hook
            assert len(a.called(hook)) == len(b.called(hook)), hook

    @both
    def test_r2_one_child_loads_and_the_others_get_the_same_blocks_and_no_tokens(
        self, router: str, a: Script, b: Script
    ) -> None:
        b.offers["r"] = KV
        rig = Rig(router, a, b)
        rig.add("r")
        rig.step()
        ((_, tokens_a, blocks_a),) = a.called("update_state_after_alloc")
        ((_, tokens_b, blocks_b),) = b.called("update_state_after_alloc")
        assert (tokens_a, tokens_b) == (0, 2 * BLOCK)
        assert blocks_a == blocks_b
        assert len(blocks_a[0]) >= 2

    @both
    def test_r3_metadata_goes_by_position_both_ways(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b, ranks=2)
        a.worker_meta[0] = Tally(1)
        a.worker_meta[1] = Tally(10)
        b.worker_meta[1] = Tally(100)
        rig.step()
        assert [meta.tag for meta in a.called("bind_connector_metadata")] == ["a", "a"]
        assert [meta.tag for meta in b.called("handle_preemptions")] == ["b", "b"]
        assert a.called("update_connector_output")[-1]["meta"].n == 11
        assert b.called("update_connector_output")[-1]["meta"].n == 100

    @both
    def test_r4_the_end_delays_if_any_child_does_and_merges_params(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.params["r"], b.params["r"] = {"x": 1}, {"y": 2}
        b.promises.add("r")
        request = rig.add("r")
        assert rig.connector.request_finished_all_groups(request, ([1],)) == (True, {"x": 1, "y": 2})

    @both
    def test_r5_blocks_are_released_once_after_the_last_promised_save_on_every_rank(
        self, router: str, a: Script, b: Script
    ) -> None:
        rig = Rig(router, a, b, ranks=2)
        a.promises.add("r")
        b.promises.add("r")
        rig.add("r")
        rig.run(3)
        released = []
        for script, rank in ((a, 0), (b, 1), (b, 0), (a, 1)):
            assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
            script.say(rank, saved="r")
            released.append(rig.step().finished_sending)
        assert released == [None, None, None, {"r"}]
        assert rig.status("r") == "gone"

    @both
    def test_r6_capabilities_combine_by_all_and_by_any(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        assert rig.connector.requires_kv_delivery is True
        assert rig.connector.supports_divergent_local_hybrid_hits is False
        assert rig.connector.has_pending_push_work() is False
        b.answers["has_pending_push_work"] = True
        assert rig.connector.has_pending_push_work() is True
        b.answers["has_pending_block_frees"] = True
        assert rig.connector.has_pending_block_frees() is True
        example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        cls = KVConnectorFactory.get_connector_class(transfer_config(router, [child_config(a)]))
        assert cls.all_children_support_hma(transfer_config(router, [child_config(a)])) is True
        assert cls.all_children_support_hma(transfer_config(router, [child_config(a), example])) is False
        assert cls.requires_piecewise_for_cudagraph({"connectors": [child_config(a)]}) is False

    @both
    def test_r7_at_most_one_memory_pool(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        assert rig.workers[0].get_mem_pool_context() is None
        b.answers["get_mem_pool_context"] = "pool b"
        assert rig.workers[0].get_mem_pool_context() == "pool b"
        a.answers["get_mem_pool_context"] = "pool a"
        with pytest.raises(ValueError, match="Connector"):
            rig.workers[0].get_mem_pool_context()

    @both
    def test_r8_reset_reaches_every_child_after_a_no(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.answers["reset_cache"] = False
        assert rig.connector.reset_cache() is False
        assert len(b.called("reset_cache")) == 1
        a.answers["reset_cache"] = None
        assert rig.connector.reset_cache() is True

    @both
    def test_r8_shutdown_reaches_every_child_after_one_raised(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.raises["shutdown"] = OSError("a is stuck")
        with pytest.raises(OSError, match="a is stuck"):
            rig.connector.shutdown()
        assert len(b.called("shutdown")) == 1

    @both
    def test_r9_the_second_allocation_call_has_no_tokens_and_keeps_the_owner(
        self, router: str, a: Script, b: Script
    ) -> None:
        b.offers["r"] = KV
        rig = Rig(router, a, b)
        rig.add("r")
        rig.step()
        b.say(0, received="r")
        rig.run(2)
        assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK, 0]
        assert rig.connector._requests_to_connector["r"] == 1

    def test_r9_r10_attempts_and_admissions_are_counted_apart(self, a: Script, b: Script) -> None:
        """Stock counts nothing per child."""
        a.offers["r"] = [(None, False), (None, False), KV]
        rig = Rig("kvobs", a, b)
        rig.add("r")
        rig.run(3)
        a.say(0, received="r")
        rig.run(3)
        assert counted(rig, "kvobs_lookups_total", 0, "pending") == 2
        assert counted(rig, "kvobs_lookups_total", 0, "hit") == 1
        assert counted(rig, "kvobs_lookups_total", 0, "miss") == 0
        assert counted(rig, "kvobs_admitted_tokens_total", 0) == 2 * BLOCK
        assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 1
        assert_nothing_is_left(rig)

    @both
    def test_r11_the_allocation_may_come_steps_after_the_lookup(self, router: str, a: Script, b: Script) -> None:
        b.offers["r"] = KV
        rig = Rig(router, a, b)
        request = rig.add("r")
        rig.connector.get_num_new_matched_tokens(request, 0)
        rig.connector.build_connector_meta(None)
        rig.connector.build_connector_meta(None)
        rig.connector.update_state_after_alloc(request, Blocks([1, 2]), 2 * BLOCK)
        assert b.called("update_state_after_alloc")[-1][1] == 2 * BLOCK


class TestWhatIsWrongInStock:
    @wrong_in_stock(AssertionError, "unions all children's reports: the scheduler asserts, or resumes too early")
    def test_w1_only_the_owners_report_of_a_load_counts(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"] = KV
        rig = Rig(router, a, b, ranks=2)
        rig.add("r")
        rig.step()
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
            assert counted(rig, "kvobs_foreign_reports_total", 1, "load") == 4
            assert_nothing_is_left(rig)

    def test_w1_foreign_reports_are_logged_once_with_the_childs_name(
        self, a: Script, b: Script, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig = Rig("kvobs", a, b, kvobs={"names": ["one", "two"]})
        for _ in range(3):
            b.say(0, received="nobody")
            rig.step()
        (line,) = [r.getMessage() for r in caplog.records if "does not own" in r.getMessage()]
        assert "'two'" in line

    @wrong_in_stock(AssertionError, "unions failures: a load that its owner completed is recomputed")
    def test_w2_a_failure_of_a_child_that_owns_no_load_has_no_effect(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"] = KV
        rig = Rig(router, a, b)
        request = rig.add("r")
        rig.step()
        b.say(0, failed="r")
        a.say(0, received="r")
        rig.step()
        assert request.num_computed_tokens == 2 * BLOCK
        assert "r" not in rig.scheduler.failed_recving_kv_req_ids

    @wrong_in_stock(AssertionError, "the first non-zero hit wins the whole request")
    def test_w3_policy_longest_takes_the_longest_offer(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"], b.offers["r"] = (BLOCK, True), (3 * BLOCK, True)
        rig = Rig(router, a, b, kvobs={"load_policy": "longest"})
        rig.add("r")
        rig.step()
        assert b.called("update_state_after_alloc")[0][1] == 3 * BLOCK

    def test_w3_what_the_losers_offered_beyond_the_winner_is_counted(self, a: Script, b: Script) -> None:
        """Stock counts nothing per child."""
        a.offers["r"], b.offers["r"] = (BLOCK, True), (3 * BLOCK, True)
        rig = Rig("kvobs", a, b)
        rig.add("r")
        rig.step()
        assert counted(rig, "kvobs_offered_tokens_total", 1) == 3 * BLOCK
        assert counted(rig, "kvobs_forgone_tokens_total", 1) == 2 * BLOCK
        assert counted(rig, "kvobs_forgone_tokens_total", 0) == 0
        assert counted(rig, "kvobs_admitted_tokens_total", 0) == BLOCK

    @wrong_in_stock(AssertionError, "one child's 'not yet' hides an earlier child's ready hit")
    def test_w4_a_hit_needs_no_answer_from_later_children(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"], b.offers["r"] = KV, (None, False)
        rig = Rig(router, a, b)
        rig.add("r")
        rig.step()
        assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"

    @wrong_in_stock(AssertionError, "waits for a slow child without end")
    def test_w4_a_slow_child_is_waited_for_only_so_long(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"], b.offers["r"] = (None, False), KV
        rig = Rig(router, a, b, kvobs={"lookup_timeout_ms": 0.001})
        rig.add("r")
        rig.run(2)
        assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
        if router == "kvobs":
            assert counted(rig, "kvobs_lookups_total", 0, "timeout") == 1

    @wrong_in_stock(AssertionError, "the choice made at an earlier lookup is never cleared")
    def test_w5_a_stale_choice_does_not_load(self, router: str, a: Script, b: Script) -> None:
        """vLLM looks up again after it could not allocate; the hit is gone, and what it now loads is nobody's."""
        a.offers["r"] = [KV, (0, False)]
        rig = Rig(router, a, b)
        request = rig.add("r")
        rig.connector.get_num_new_matched_tokens(request, 0)
        rig.connector.get_num_new_matched_tokens(request, 0)
        rig.connector.update_state_after_alloc(request, Blocks([1, 2]), 2 * BLOCK)
        assert a.called("update_state_after_alloc")[-1][1] == 0

    @wrong_in_stock(ValueError, "rebuilds stats through the registry of names: engine dead at the first transfer")
    def test_w6_stats_of_a_child_loaded_by_module_path_are_rebuilt(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.stats.append(Stats(data={"n": 3}))
        rig.step()
        rebuilt = type(rig.connector).build_kv_connector_stats(rig.stats[-1])
        assert rebuilt["ScriptedConnector"].to_dict() == {"n": 3}

    @wrong_in_stock(AssertionError, "keys stats by class: children of one class are merged")
    def test_w7_children_of_one_class_keep_their_own_stats(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.stats.append(Stats(data={"n": 3}))
        b.stats.append(Stats(data={"n": 4}))
        stats = rig.connector.get_kv_connector_stats()
        assert {name: s.data for name, s in stats.data.items() if name != "kvobs"} == {
            "ScriptedConnector": {"n": 3},
            "ScriptedConnector-2": {"n": 4},
        }

    @wrong_in_stock(ValueError, "two classes that share a metrics class register the same names twice: no start")
    def test_w8_a_metric_family_is_registered_once(self, router: str, a: Script, b: Script) -> None:
        registry = CollectorRegistry()
        build_prom(router, registry, child_config(a, "MeteredConnector"), child_config(b, "OtherMeteredConnector"))
        (family,) = [f for f in registry.collect() if f.name == "scripted_things"]
        assert family.documentation == "things"

    @wrong_in_stock(AssertionError, "a child that has stats and no metrics ends the API server (0.32)")
    def test_w8_a_child_without_metrics_is_skipped(self, router: str, a: Script, b: Script) -> None:
        metrics = build_prom(router, CollectorRegistry(), child_config(a), child_config(b, "MeteredConnector"))
        metrics.observe({"ScriptedConnector": {"n": 1}, "MeteredConnector": {"n": 2}})

    def test_w7_w8_series_are_told_apart_by_the_connector_label(self, a: Script, b: Script) -> None:
        """Stock has no such label."""
        registry = CollectorRegistry()
        metrics = build_prom(
            "kvobs", registry, child_config(a, "MeteredConnector"), child_config(b, "MeteredConnector")
        )
        metrics.observe({"MeteredConnector": {"n": 1}, "MeteredConnector-2": {"n": 2}}, 0)
        values = [
            registry.get_sample_value("scripted_things_total", {"engine": "0", "connector": name})
            for name in ("MeteredConnector", "MeteredConnector-2")
        ]
        assert values == [1, 2]

    @wrong_in_stock(TypeError, "passes engine_id twice")
    def test_w9_a_child_may_have_its_own_engine_id(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, connectors=[child_config(a, engine_id="mine"), child_config(b)])
        ids = [child._kv_transfer_config.engine_id for child in rig.connector._connectors]
        assert ids[0] == "mine"
        assert ids[1] == rig.scheduler.vllm_config.kv_transfer_config.engine_id

    def test_w9_the_data_parallel_suffix_is_added_once(self, a: Script, b: Script) -> None:
        """Stock can't be asked: it has failed before."""
        from kvobs.children import specs

        parent = transfer_config(
            "kvobs", [child_config(a, engine_id="mine"), child_config(b, engine_id="x_dp1")], engine_id="engine_dp1"
        )
        assert [spec.transfer_config.engine_id for spec in specs(parent)] == ["mine_dp1", "x_dp1"]

    @wrong_in_stock(AssertionError, "keeps the first child's handshake, and broadcasts it to all")
    def test_w10_each_child_gets_its_own_handshake_back(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b, ranks=2)
        a.handshake, b.handshake = Handshake("a"), Handshake("b")
        sent = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(rig.workers)}
        rig.connector.set_xfer_handshake_metadata_pp_aware(sent)
        for script in (a, b):
            (got,) = script.called("set_xfer_handshake_metadata")
            assert got == {0: Handshake(script.tag), 1: Handshake(script.tag)}

    @wrong_in_stock(ValueError, "broadcasts: a child that never shakes hands refuses pp_rank > 0")
    def test_w10_pipeline_parallel_works_beside_a_child_without_handshake(
        self, router: str, a: Script, b: Script
    ) -> None:
        rig = Rig(router, connectors=[child_config(a, "PipelineAwareConnector"), child_config(b)])
        a.handshake = Handshake("a")
        sent = {(pp, 0): rig.workers[0].get_handshake_metadata() for pp in (0, 1)}
        rig.connector.set_xfer_handshake_metadata_pp_aware(sent)
        assert list(a.called("set_xfer_handshake_metadata_pp_aware")[0]) == [(0, 0), (1, 0)]

    @wrong_in_stock(AssertionError, "None from one child hides the other's count: the request is never released")
    def test_w11_a_child_that_reports_on_one_rank_completes(self, router: str, a: Script, b: Script) -> None:
        b.finished_count = 1
        rig = Rig(router, a, b, ranks=2)
        b.promises.add("r")
        rig.add("r")
        rig.run(3)
        b.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") == "gone"

    @wrong_in_stock(ValueError, "unequal finished counts raise at start")
    def test_w11_children_may_state_different_counts(self, router: str, a: Script, b: Script) -> None:
        a.finished_count, b.finished_count = 2, 1
        rig = Rig(router, a, b, ranks=2)
        a.offers["r"] = KV
        b.promises.add("r")
        rig.add("r")
        rig.step()
        for rank in (0, 1):
            a.say(rank, received="r")
        rig.run(4)
        b.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") == "gone"

    @wrong_in_stock(AssertionError, "any child's report counts down another's promise")
    def test_w12_only_the_promising_childs_report_releases(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        a.promises.add("r")
        rig.add("r")
        rig.run(3)
        b.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
        a.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") == "gone"

    @wrong_in_stock(AssertionError, "does not count accepted partial tails: released before the tail is saved")
    def test_w12_an_accepted_partial_tail_is_a_promise(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        request = rig.add("r")
        a.tails.add("r")
        b.promises.add("r")
        assert rig.connector.register_finished_partial_tail(request, ([1],), [(0, 1, 2)]) is True
        rig.abort("r")
        b.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") != "gone"
        a.say(0, saved="r")
        rig.run(2)
        assert rig.status("r") == "gone"

    def test_w12_a_report_before_its_promise_is_held(self, a: Script, b: Script) -> None:
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
    def test_w12_a_running_request_survives_an_early_report(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b)
        rig.add("r", max_tokens=5)
        rig.step()
        a.say(0, saved="r")
        rig.run(8)
        assert rig.status("r") == "gone"

    @wrong_in_stock(AssertionError, "never collects the workers' KV cache events")
    def test_w13_kv_cache_events_reach_the_child_that_made_them(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b, ranks=2)
        b.events = {0: Events(["x"]), 1: Events(["x", "y"])}
        rig.step()
        assert a.called("update_connector_output")[-1]["events"] is None
        got = b.called("update_connector_output")[-1]["events"]
        assert got is not None
        assert sorted(got.get_all_events()) == ["x", "x", "y"]
        assert got.get_number_of_workers() == 2

    @wrong_in_stock(AssertionError, "pools block errors without an owner: a load that went well is cut")
    def test_w16_block_errors_of_a_child_that_owns_no_load_have_no_effect(
        self, router: str, a: Script, b: Script
    ) -> None:
        a.offers["r"] = KV
        rig = Rig(router, a, b)
        request = rig.add("r")
        rig.step()
        blocks = a.called("update_state_after_alloc")[0][2][0]
        b.bad_blocks[0] = {blocks[0]}
        a.say(0, received="r")
        rig.step()
        assert request.num_computed_tokens == 2 * BLOCK

    @wrong_in_stock(RuntimeError, "block errors with several KV cache groups end the engine")
    def test_w16_with_several_groups_the_load_fails_and_is_recomputed(self, router: str, a: Script, b: Script) -> None:
        a.offers["r"] = [KV, (0, False)]
        rig = Rig(router, a, b, ranks=2, groups=2)
        rig.add("r")
        rig.step()
        blocks = a.called("update_state_after_alloc")[0][2][1]
        a.bad_blocks[1] = {blocks[1]}
        for rank in (0, 1):
            a.say(rank, received="r")
        rig.run(8)
        assert rig.status("r") == "gone"
        if router == "kvobs":
            assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
            assert counted(rig, "kvobs_load_tokens_total", 0) == 0
            assert_nothing_is_left(rig)

    def test_w17_offers_that_nobody_claimed_are_counted(self, a: Script, b: Script) -> None:
        """Stock counts nothing: a hand-off that waits for an unchosen decode child is invisible there."""
        a.offers["r"], b.offers["r"] = KV, KV
        rig = Rig("kvobs", a, b)
        rig.add("r", do_remote_prefill=True)
        rig.step()
        assert counted(rig, "kvobs_unclaimed_offers_total", 1) == 1
        assert counted(rig, "kvobs_unclaimed_offers_total", 0) == 0

    @wrong_in_stock(AssertionError, "does not say whose keys clash")
    def test_w18_a_clash_names_both_owners_and_the_key(self, router: str, a: Script, b: Script) -> None:
        rig = Rig(router, a, b, kvobs={"names": ["one", "two"]})
        a.params["r"], b.params["r"] = {"host": 1}, {"host": 2}
        request = rig.add("r")
        with pytest.raises(RuntimeError) as error:
            rig.connector.request_finished_all_groups(request, ([1],))
        assert all(word in str(error.value) for word in ("'host'", "'one'", "'two'"))

    @wrong_in_stock(AssertionError, "says nothing")
    def test_w19_a_childs_own_failure_policy_is_warned_of(
        self, router: str, a: Script, caplog: pytest.LogCaptureFixture
    ) -> None:
        Rig(router, connectors=[child_config(a, kv_load_failure_policy="fail")])
        warnings = [r.getMessage() for r in caplog.records if "kv_load_failure_policy" in r.getMessage()]
        assert any("connectors[0]" in w and "recompute" in w and "no effect" in w for w in warnings)

    @wrong_in_stock(AssertionError, "two completions for one request: the scheduler asserts, the server dies")
    @pytest.mark.parametrize("load_first", [True, False])
    def test_w20_an_abort_during_a_load_with_a_promised_save_completes_once(
        self, router: str, load_first: bool, a: Script, b: Script
    ) -> None:
        a.offers["r"] = KV
        b.promises.add("r")
        rig = Rig(router, a, b, ranks=2)
        rig.add("r")
        rig.step()
        rig.abort("r")
        rig.step()
        completions = []
        for script in (a, b) if load_first else (b, a):
            for rank in (0, 1):
                assert rig.status("r") == "FINISHED_ABORTED"
                script.say(rank, received="r" if script is a else "", saved="r" if script is b else "")
                output = rig.step()
                completions += [*(output.finished_recving or ()), *(output.finished_sending or ())]
        assert completions == ["r"]
        assert rig.status("r") == "gone"
        if router == "kvobs":
            assert counted(rig, "kvobs_loads_total", 0, "async", "aborted") == 1
            assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 0
            assert_nothing_is_left(rig)

    @wrong_in_stock(AssertionError, "says nothing, and the siblings keep the bad blocks: later hits are wrong")
    def test_w21_after_a_failed_sync_load_the_siblings_caches_are_reset(
        self, router: str, a: Script, b: Script, caplog: pytest.LogCaptureFixture
    ) -> None:
        a.offers["r"] = SYNC
        b.answers["reset_cache"] = True
        rig = Rig(router, a, b, kvobs={"names": ["one", "two"]})
        rig.add("r")
        a.bad_blocks[0] = {2}
        rig.step()
        assert 2 in a.called("update_state_after_alloc")[0][2][0][:2]
        assert len(b.called("reset_cache")) == 1
        assert a.called("reset_cache") == []
        (line,) = [r.getMessage() for r in caplog.records if "synchronous load" in r.getMessage()]
        assert "'one'" in line
        assert "two" in line


class TestFailedLoads:
    def test_a_failure_on_one_rank_is_told_once_by_all(self, a: Script, b: Script) -> None:
        a.offers["r"] = [KV, (0, False)]
        rig = Rig("kvobs", a, b, ranks=2)
        request = rig.add("r")
        rig.step()
        a.say(0, failed="r")
        a.say(1, received="r")
        output = rig.step()
        assert (output.finished_recving, output.failed_recving) == (None, set())
        output = rig.step()
        assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"})
        assert a.called("update_connector_output")[-1]["failed"] == {"r"}
        assert request.num_computed_tokens == 0
        rig.run(4)
        assert rig.status("r") == "gone"
        assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
        assert_nothing_is_left(rig)

    def test_a_failed_load_of_an_aborted_request_releases_it_once(self, a: Script, b: Script) -> None:
        a.offers["r"] = KV
        b.promises.add("r")
        rig = Rig("kvobs", a, b)
        rig.add("r")
        rig.step()
        a.say(0, failed="r")
        rig.step()
        rig.abort("r")
        rig.step()
        assert rig.status("r") == "FINISHED_ABORTED"
        b.say(0, saved="r")
        assert rig.step().finished_sending == {"r"}
        assert_nothing_is_left(rig)

    def test_policy_fail_ends_the_request_and_releases_its_blocks(self, a: Script, b: Script) -> None:
        a.offers["r"] = KV
        rig = Rig("kvobs", a, b, policy="fail")
        rig.add("r")
        rig.step()
        a.say(0, failed="r")
        rig.run(3)
        assert_nothing_is_left(rig)

    def test_bad_blocks_of_the_owner_reach_vllm_with_one_group(self, a: Script, b: Script) -> None:
        a.offers["r"] = KV
        rig = Rig("kvobs", a, b)
        request = rig.add("r")
        rig.step()
        second = a.called("update_state_after_alloc")[0][2][0][1]
        a.bad_blocks[0] = {second}
        a.say(0, received="r")
        rig.step()
        assert request.num_computed_tokens == BLOCK
        assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1

    def test_a_sync_load_is_counted_when_its_step_is_over(self, a: Script, b: Script) -> None:
        b.offers["r"] = SYNC
        rig = Rig("kvobs", a, b, ranks=2)
        rig.add("r", max_tokens=1)
        rig.step()
        assert counted(rig, "kvobs_loads_total", 1, "sync", "ok") == 1
        assert counted(rig, "kvobs_load_tokens_total", 1) == 2 * BLOCK
        assert_nothing_is_left(rig)

    def test_a_child_may_withdraw_a_save_and_complete_it_later(self, a: Script, b: Script) -> None:
        """MoRIIO parks acknowledgements there, and reaps those that never came."""
        rig = Rig("kvobs", a, b)
        a.promises.add("r")
        rig.add("r")
        rig.run(3)

        def withdraw(view: Any) -> None:
            view.finished_sending = None

        def reap(view: Any) -> None:
            view.finished_sending = {"r"}

        a.on_output = withdraw
        a.say(0, saved="r")
        assert rig.step().finished_sending is None
        a.on_output = reap
        assert rig.step().finished_sending == {"r"}
        a.on_output = None
        assert_nothing_is_left(rig)


class Blocks:
    """Stands for vLLM's KVCacheBlocks."""

    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups


class Tally(KVConnectorWorkerMetadata):
    def __init__(self, n: int) -> None:
        self.n = n

    def aggregate(self, other: Any) -> Tally:
        return Tally(self.n + other.n)


class Stats(KVConnectorStats):
    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> Stats:
        self.data["n"] += other.data["n"]
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int]:
        return dict(self.data)


class Handshake(KVConnectorHandshakeMetadata):
    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handshake) and other.tag == self.tag

    def __hash__(self) -> int:
        return hash(self.tag)


class Events:
    """A container of events as LMCache and Mooncake have them."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.workers = events, 1

    def add_events(self, events: list[str]) -> None:
        self.events = self.events + events

    def get_all_events(self) -> list[str]:
        return self.events

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_number_of_workers(self) -> int:
        return self.workers


def build_prom(router: str, registry: CollectorRegistry, *connectors: dict[str, Any]) -> Any:
    """Build the metrics as vLLM's API server does, into a registry of the test's own."""
    from functools import partial

    config = engine_config(transfer_config(router, list(connectors)))
    cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return cls.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
