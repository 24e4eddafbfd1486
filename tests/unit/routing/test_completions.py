"""What has ended is closed and reported once, whether any connector looks at the output or none does."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from vllm.v1.outputs import KVConnectorOutput

from kvobs.routing.completions import Completions
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config
from tests.support.scheduler_life import Life, actions

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
