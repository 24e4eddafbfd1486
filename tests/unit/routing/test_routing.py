"""The routing contract on vLLM's real scheduler and aggregator: what holds in vLLM holds in both, and how loads end."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.testing import BLOCK, ROUTERS, Rig, Script, transfer_config
from tests.support.rig import assert_nothing_is_left, counted, entry_for, started

KV = (2 * BLOCK, True)  # an offer of two blocks, loaded in the background

both = pytest.mark.parametrize("router", list(ROUTERS))


@both
def test_r2_one_loads_and_others_get_its_blocks_without_tokens(router: str, a: Script, b: Script) -> None:
    b.offers["r"] = KV
    started(router, a, b)
    ((_, tokens_a, blocks_a),) = a.called("update_state_after_alloc")
    ((_, tokens_b, blocks_b),) = b.called("update_state_after_alloc")
    assert (tokens_a, tokens_b, blocks_a) == (0, 2 * BLOCK, blocks_b)


@both
def test_r4_the_end_delays_if_any_does_and_merges_params(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    a.params["r"], b.params["r"] = {"x": 1}, {"y": 2}
    b.promises.add("r")
    assert rig.connector.request_finished_all_groups(rig.add("r"), ([1],)) == (True, {"x": 1, "y": 2})


@both
def test_r5_blocks_are_released_once_after_the_last_save(router: str, a: Script, b: Script) -> None:
    a.promises.add("r")
    b.promises.add("r")
    rig = started(router, a, b, ranks=2, steps=3)
    released = []
    for script, rank in ((a, 0), (b, 1), (b, 0), (a, 1)):
        assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
        script.say(rank, saved="r")
        released.append(rig.step().finished_sending)
    assert released == [None, None, None, {"r"}]
    assert rig.status("r") == "gone"


@both
def test_r6_capabilities_combine_by_all_and_by_any(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    assert rig.connector.requires_kv_delivery is True
    assert rig.connector.supports_divergent_local_hybrid_hits is False
    assert rig.connector.has_pending_push_work() is False
    b.answers["has_pending_push_work"] = True
    assert rig.connector.has_pending_push_work() is True
    b.answers["has_pending_block_frees"] = True
    assert rig.connector.has_pending_block_frees() is True
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    cls = KVConnectorFactory.get_connector_class(transfer_config(router, [entry_for(a)]))
    assert cls.all_children_support_hma(transfer_config(router, [entry_for(a)])) is True
    assert cls.all_children_support_hma(transfer_config(router, [entry_for(a), example])) is False
    assert cls.requires_piecewise_for_cudagraph({"connectors": [entry_for(a)]}) is False


@both
def test_r7_at_most_one_memory_pool(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    assert rig.workers[0].get_mem_pool_context() is None
    b.answers["get_mem_pool_context"] = "pool b"
    assert rig.workers[0].get_mem_pool_context() == "pool b"
    a.answers["get_mem_pool_context"] = "pool a"
    with pytest.raises(ValueError, match="Connector"):
        rig.workers[0].get_mem_pool_context()


@both
def test_r8_reset_reaches_every_connector_after_a_no(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    a.answers["reset_cache"] = False
    assert rig.connector.reset_cache() is False
    assert len(b.called("reset_cache")) == 1
    a.answers["reset_cache"] = None
    assert rig.connector.reset_cache() is True


@both
def test_r8_shutdown_reaches_every_connector_after_one_raised(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    a.raises["shutdown"] = OSError("a is stuck")
    with pytest.raises(OSError, match="a is stuck"):
        rig.connector.shutdown()
    assert len(b.called("shutdown")) == 1


@both
def test_r9_the_second_call_has_no_tokens_and_keeps_the_owner(router: str, a: Script, b: Script) -> None:
    b.offers["r"] = KV
    rig = started(router, a, b)
    b.say(0, received="r")
    rig.run(2)
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK, 0]
    assert rig.connector._requests_to_connector["r"] == 1


# How loads and saves end


def test_a_failure_on_one_rank_is_reported_once_by_all(a: Script, b: Script) -> None:
    a.offers["r"] = [KV, (0, False)]
    rig = started("kvobs", a, b, ranks=2)
    a.say(0, failed="r")
    a.say(1, received="r")
    output = rig.step()
    assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"}), "as with vLLM's own router"
    assert a.called("update_connector_output")[-1]["failed"] == {"r"}
    output = rig.step()
    assert (output.finished_recving, output.failed_recving) == (None, set())
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [2 * BLOCK, 0], "it is computed again"
    rig.run(4)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert_nothing_is_left(rig)


def test_a_failed_load_of_an_aborted_request_releases_it_once(a: Script, b: Script) -> None:
    a.offers["r"] = KV
    b.promises.add("r")
    rig = started("kvobs", a, b)
    a.say(0, failed="r")
    rig.step()
    rig.abort("r")
    rig.step()
    assert rig.status("r") == "FINISHED_ABORTED"
    b.say(0, saved="r")
    assert rig.step().finished_sending == {"r"}
    assert_nothing_is_left(rig)
