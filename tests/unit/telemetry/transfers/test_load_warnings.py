"""Log lines about loads: of slow ones and late ranks few, whatever comes, and one of what vLLM does not recompute."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvobs.state.transfers import Slowest
from kvobs.telemetry.transfers.load_warnings import FEW, LATE_NS, MANY, RECENT, SlowLoads
from kvobs.testing import BLOCK, Rig, Script
from kvobs.vllm_api.versions import V2_RUNNER

SLOW_NS = 10**9
NOT_RECOMPUTED = (
    "kv_load_failure_policy: found 'recompute', and 'ScriptedConnector' loads synchronously: vLLM's V2 model runner"
)


def load(ns: int, rank: int | None = None, *, index: int = 0, skew_ns: int = LATE_NS, **more: Any) -> Any:
    slowest = None if rank is None else Slowest(rank, skew_ns)
    usual = {
        "connector_index": index,
        "tokens": 64,
        "duration_ns": ns,
        "slowest": slowest,
        "failed": False,
        "aborted": False,
    }
    return SimpleNamespace(**{**usual, **more})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def ended(slow_loads: SlowLoads, *loads: Any) -> None:
    for each in loads:
        slow_loads.load_ended("r\n", each)


QUICK, SLOW = load(SLOW_NS), load(SLOW_NS + 1)


def test_the_first_slow_load_and_the_rule_are_logged_and_its_end(said: pytest.LogCaptureFixture) -> None:
    slow_loads = SlowLoads(["cpu", "remote"], SLOW_NS)
    ended(slow_loads, *[QUICK] * RECENT, *[SLOW] * (MANY - 1))
    assert said.messages == [
        "connector 'cpu' took 1 s to load 64 tokens of request r\\n, longer than slow_load_ms; further slow loads are "
        "only traced"
    ]
    ended(slow_loads, *[SLOW] * 50)
    assert said.messages[1:] == ["connector 'cpu' is slow: 15 of its last 20 loads took longer than slow_load_ms"]
    ended(slow_loads, *[QUICK] * (RECENT - FEW), SLOW, *[QUICK] * 50)
    assert said.messages[2:] == ["connector 'cpu' is no longer slow"]
    ended(slow_loads, *[SLOW] * MANY)
    assert [record.levelno for record in said.records] == [logging.WARNING] * 2 + [logging.INFO, logging.WARNING]


def test_a_rank_that_is_late_is_named_and_its_end(said: pytest.LogCaptureFixture) -> None:
    slow_loads = SlowLoads(["cpu"], SLOW_NS)
    ended(slow_loads, *[load(1, 1, skew_ns=LATE_NS - 1)] * RECENT, *[load(1, i % 2) for i in range(50)])
    assert said.messages == []
    ended(slow_loads, *[load(1, 1)] * 50)
    assert said.messages == [
        "rank 1 is late: it finished last in 15 of the last 20 loads from connector 'cpu', by 50 ms or more"
    ]
    ended(slow_loads, *[load(1, 0)] * RECENT)
    assert said.messages[1:] == [
        "rank 0 is late: it finished last in 15 of the last 20 loads from connector 'cpu', by 50 ms or more"
    ]
    ended(slow_loads, *[QUICK] * RECENT)
    assert said.messages[2:] == ["rank 0 is no longer late in loads from connector 'cpu'"]


def test_connectors_are_apart_and_other_ends_do_not_count(said: pytest.LogCaptureFixture) -> None:
    slow_loads = SlowLoads(["cpu", "remote"], SLOW_NS)
    ended(slow_loads, *[load(2 * SLOW_NS, failed=True), load(2 * SLOW_NS, aborted=True)] * RECENT)
    ended(slow_loads, *[QUICK, load(2 * SLOW_NS, index=1)] * RECENT)
    assert [message.split(" ")[1] for message in said.messages] == ["'remote'"] * 2


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([None, 0, 1])), max_size=200))
def test_at_most_one_line_in_ten_loads(said: pytest.LogCaptureFixture, lives: list[tuple[bool, int | None]]) -> None:
    said.clear()
    slow_loads = SlowLoads(["cpu"], SLOW_NS)
    for is_slow, rank in lives:
        slow_loads.load_ended("r", load(SLOW_NS + is_slow, rank))
    assert len(said.records) <= 1 + 2 * len(lives) / (MANY - FEW)


@pytest.mark.parametrize("settings", [("1", "recompute"), ("1", "fail"), ("0", "recompute")])
def test_the_first_load_that_is_not_recomputed_is_warned_of(
    a: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: tuple[str, str]
) -> None:
    runner, policy = settings
    monkeypatch.setenv(V2_RUNNER, runner)
    rig = Rig("kvobs", a, policy=policy)
    for request, is_async in (("r", True), ("s", False), ("t", False)):
        a.offers[request] = (2 * BLOCK, is_async)
        rig.add(request)
        rig.step()
        assert caplog.text.count(NOT_RECOMPUTED) == (settings == ("1", "recompute") and not is_async)
