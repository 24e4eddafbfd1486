"""What has ended is closed and reported once, whether any connector looks at the output or none does."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.routing.completions import Completions, released_set
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config
from tests.support.scheduler_life import Life, actions

Said: TypeAlias = tuple[int, int, int]  # child, rank, request
KINDS = ("ScriptedConnector", "UnwatchingConnector")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(actions, max_size=40), st.sampled_from([0, 1]))
def test_vllm_gets_the_same_whether_the_connectors_look_or_not(plan: list[Any], lag: int) -> None:
    """Without a connector that looks, most outputs are passed over at once."""
    lives = [Life("first", 64, lag, "off", cls) for cls in KINDS]
    for action in plan:
        for life in lives:
            life.act(action)
        assert seen(lives[0].rig) == seen(lives[1].rig), action
    for life in lives:
        life.end()
        assert_nothing_is_left(life.rig)


def seen(rig: Rig) -> Any:
    """Return what vLLM has read of the last step, and made of it."""
    output = rig.output
    ends = output and (output.finished_recving, output.finished_sending, output.failed_recving)
    return ends, rig.free_blocks, {request: rig.status(request) for request in rig.scheduler.requests}


@pytest.fixture
def idle() -> Completions:
    """Return the completions of an engine without requests, at which no connector looks."""
    rig = Rig("kvobs", connectors=[child_config(Script(name), "UnwatchingConnector") for name in "ab"])
    completions: Completions = rig.connector._side._completions
    return completions


def test_an_output_without_news_is_not_looked_into(idle: Completions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobs.routing.completions.checked", pytest.fail)
    output = KVConnectorOutput(finished_recving=set(), finished_sending={"vLLM's own count of another router"})
    idle.take_in(output)
    assert (output.finished_recving, output.finished_sending) == (None, None)


def test_what_ended_without_a_report_is_taken_in_all_the_same(idle: Completions) -> None:
    """As a save that its loader promised: it ends with the load, and is reported with the next output."""
    ledger = idle._ledger
    ledger.arrive("r")
    ledger.propose("r", (0, True))
    ledger.admit("r", BLOCK, 1)
    ledger.finish("r", [])
    ledger.close_load("r")
    assert ledger.has_ended
    output = KVConnectorOutput()
    idle.take_in(output)
    assert output.finished_recving == {"r"}
    assert not ledger.has_ended


def test_saves_that_were_done_before_their_promise_are_not_kept(idle: Completions) -> None:
    idle.early.add("r")
    idle.take_in(KVConnectorOutput())
    assert idle.early == set()


def test_a_failure_that_vllm_reads_closes_its_load(idle: Completions) -> None:
    ledger = idle._ledger
    ledger.arrive("r")
    ledger.propose("r", (0, True))
    ledger.admit("r", BLOCK, 1)
    ledger.fail("r", 0)
    ledger.take_failures()
    idle.take_in(KVConnectorOutput(failed_recving={"r"}))
    assert ledger.load("r") is None
    assert idle._next.take().closed == ["r"]


def freed(router: str, plan: Sequence[Sequence[Said]], promises: Sequence[set[int]], *, is_aggregated: bool) -> Any:
    """Return the free blocks after each step, in their order; ``promises`` are the children's, by request."""
    a, b = Script("a"), Script("b")
    rig = Rig(router, a, b, ranks=2 if is_aggregated else 1, blocks=200)
    rig.scheduler.max_num_running_reqs = len(promises)
    if not is_aggregated:
        rig.aggregator = SimpleNamespace(aggregate=lambda outputs, rank: outputs[rank])
    for i, children in enumerate(promises):
        for script in (a, b):
            script.promises |= {f"r{i}"} if (script is b) in children else set()
        rig.add(f"r{i}", max_tokens=1, tokens=2 * BLOCK + i)
    rig.run(2)
    orders = []
    for step in plan:
        for child, rank, request in step:
            (a, b)[child].say(rank, saved=f"r{request}")
        rig.step()
        free = rig.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        orders.append([block.block_id for block in free])
    return orders


@pytest.mark.parametrize("is_aggregated", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_are_freed_in_the_order_of_vllms_own_router(is_aggregated: bool, data: st.DataObject) -> None:
    """It is that of sets that are made again and again: of a worker, by pickle, of the aggregator."""
    promises = data.draw(st.lists(st.sampled_from([{0}, {1}, {0, 1}]), min_size=2, max_size=14))
    reports = [
        (child, rank, request)
        for request, children in enumerate(promises)
        for child in children
        for rank in range(1 + is_aggregated)
    ]
    plan: list[list[Said]] = [[], [], []]
    for report in data.draw(st.permutations(reports)):
        plan[data.draw(st.sampled_from([0, 0, 0, 1, 2]))].append(report)
    with pytest.MonkeyPatch.context() as patch:
        if not is_aggregated:  # the worker is in the scheduler's process: nothing is pickled
            patch.setattr("kvobs.testing.rig.pickle", SimpleNamespace(dumps=lambda sent: sent, loads=lambda sent: sent))
        stock, ours = (freed(router, plan, promises, is_aggregated=is_aggregated) for router in ("stock", "kvobs"))
    assert ours == stock


# The order of releases: sets are made as pickle and vLLM's aggregator make them

requests = st.lists(st.sampled_from([f"r{i}" for i in range(30)]), unique=True)


def made_by_worker(saved: list[str]) -> set[str]:
    made: set[str] = set()
    for request in saved:
        made.add(request)
    return made


def output(saved: list[str]) -> ModelRunnerOutput:
    sent: KVConnectorOutput = pickle.loads(pickle.dumps(KVConnectorOutput(finished_sending=made_by_worker(saved))))
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=sent)


@given(st.lists(requests, min_size=1, max_size=3))
def test_the_order_is_that_of_vllms_aggregator(by_rank: list[list[str]]) -> None:
    combined = KVOutputAggregator(len(by_rank)).aggregate([output(saved) for saved in by_rank])
    assert combined is not None
    assert combined.kv_connector_output is not None
    expected = list(combined.kv_connector_output.finished_sending or ())
    ended = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    assert list(released_set(ended, by_rank, is_aggregated=True)) == expected


@given(requests)
def test_without_an_aggregator_it_is_the_workers(saved: list[str]) -> None:
    assert list(released_set(saved, [saved], is_aggregated=False)) == list(made_by_worker(saved))


@given(requests, requests)
def test_a_save_that_no_rank_has_reported_is_released_too(ended: list[str], reported: list[str]) -> None:
    """A connector may be given up, or has reported before its promise."""
    assert released_set(ended, [reported], is_aggregated=True) == set(ended)
