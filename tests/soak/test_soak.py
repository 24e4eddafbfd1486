"""The soak's short form; and it can fail: completions lost or doubled, a number that differs, memory that grows."""

import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.page import files
from kvobs.state.ledger import Ledger as KvobsLedger
from kvobs.state.transfers import Closed
from kvobs.telemetry.transfers.outcomes import Outcomes
from tests.soak import inprocess, isolated, lives
from tests.soak.__main__ import is_whole
from tests.soak.inprocess import SHAPES
from tests.soak.ledger import Ledger
from tests.soak.memory import MIB, Sample, growth
from tests.soak.orders import ORDERS, TOKENS, expected
from tests.soak.report import Result, markdown

FAULTS = {
    *("failed load", "counted failure", "bad blocks of an async load", "bad blocks of a sync load", "offered again"),
    *("stray receipt", "stray failure", "stray save", "early save", "bad blocks in another's load", "two completions"),
    *("late by many steps", "reported twice", "never reported", "preempted", "not yet", "stats that can't be merged"),
    *("aborted, WAITING", "aborted, WAITING_FOR_REMOTE_KVS", "aborted, RUNNING", "aborted, FINISHED_LENGTH_CAPPED"),
    *("collector down", "collector hanging", "load after a load", "load of a preempted request"),
    *(fact for shape in SHAPES for fact in shape.running.seen - {"a rank works ahead"}),  # all work as late as they may
}


@pytest.fixture
def quiet() -> Iterator[None]:
    """Log nothing: vLLM logs every failed load."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
def test_thousands_of_requests_with_every_fault_there_is() -> None:
    result = inprocess.run(2_000, seed=7, show=lambda _: None, every=400)
    assert (result.lost, result.doubled) == (0, 0)
    assert sum(result.ends.values()) == result.requests >= 2_000
    assert result.completed > 1_000
    assert {fault for fault in FAULTS if not result.faults[fault]} == set()


@pytest.mark.usefixtures("quiet")
def test_requests_survive_connectors_that_fail_in_every_hook() -> None:
    result = isolated.run(480, seed=3, show=lambda _: None)
    assert result.wrong == []
    assert result.requests >= 480
    assert result.faults["quarantines"] > 20
    assert max(growth(samples)[1] for samples in result.memory.values()) < result.budget_objects


@pytest.mark.usefixtures("quiet")
def test_lives_of_engines_leave_no_page_thread_or_descriptor() -> None:
    result = lives.run(40, seed=5, show=lambda _: None)
    assert result.wrong == []
    assert result.faults["killed"] > 2
    assert result.ends["shut down"] > 8


@pytest.mark.usefixtures("quiet")
def test_a_page_that_is_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "clean", lambda *_, **__: None)
    assert [wrong for wrong in lives.run(16, seed=5, show=lambda _: None).wrong if wrong.endswith(".page is left")]


@pytest.mark.usefixtures("quiet")
def test_a_number_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, calls = Outcomes.saved, iter(range(1_000_000))
    monkeypatch.setattr(Outcomes, "saved", lambda *args: saved(*args) if next(calls) % 20 else None)
    with pytest.raises(AssertionError, match="kvobs_saves_total .* of connector"):
        inprocess.run(100, seed=1, show=lambda _: None, shapes=SHAPES[:1])


@pytest.mark.usefixtures("quiet")
def test_a_completion_that_never_reaches_vllm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = KvobsLedger.close

    def losing(self: KvobsLedger, *what: Any) -> Closed:
        closed = close(self, *what)
        return closed._replace(received=set(sorted(closed.received)[1:]))

    monkeypatch.setattr(KvobsLedger, "close", losing)
    monkeypatch.setattr("tests.soak.inprocess.STALLED_AFTER", 100)
    with pytest.raises(AssertionError, match="requests never end"):
        inprocess.run(100, seed=1, show=lambda _: None, shapes=SHAPES[:1])


def test_completions_are_reported_once() -> None:
    ledger = Ledger((1,), 1)
    ledger.arrived("r")
    ledger.finished("r", 0, promises=True)
    assert (ledger.awaited, ledger.doubled) == ({"r": "sent"}, 0)
    ledger.told_vllm([], ["r"])
    assert (ledger.awaited, ledger.completed, ledger.doubled) == ({}, 1, 0)
    ledger.told_vllm(["r"], ["r"])
    ledger.ended("r", "length")
    assert ledger.doubled == 2
    ledger.ended("r", "length")
    assert ledger.doubled == 3


levels = st.integers(200, 4_000)


@given(levels, st.lists(st.integers(-2, 2), min_size=20, max_size=60), st.integers(0, 5))
def test_growth_is_what_is_added_and_not_noise(level: int, noise: list[int], each: int) -> None:
    samples = [Sample(100 * i, (level + n + each * i) * MIB, level + each * i) for i, n in enumerate(noise)]
    size, objects = growth(samples)
    between = each * (len(noise) - 1)  # from the first sample to the last
    assert size / MIB <= between + 4
    assert size / MIB >= 0.5 * between - 4
    assert 0.5 * between <= objects <= between


def test_each_breach_is_reported() -> None:
    leaky = [Sample(i, (100 + i) * MIB, 1_000 * i) for i in range(40)]
    assert Result("x", 5, memory={"flat": [Sample(i, 100 * MIB, 1_000) for i in range(40)]}).mistakes == []
    wrong = Result("x", 5, lost=2, doubled=1, memory={"leaky": leaky})
    lost, doubled, grown = wrong.mistakes
    assert (lost, doubled) == ("2 completions lost", "1 completions doubled")
    assert grown.startswith("leaky: grown by ")


def test_orders_add_up() -> None:
    by_name = {order.name: order for order in ORDERS}
    counts = expected(Counter({by_name["loads between steps"]: 3, by_name["has bad blocks"]: 2, by_name["saves"]: 1}))
    assert counts["kvobs_loads_total/async/ok"] == 3
    assert counts["kvobs_loads_total/async/failed"] == 2
    assert counts["kvobs_admitted_tokens_total"] == 5 * TOKENS
    assert counts["kvobs_saves_total/ok"] == 1


def test_the_published_tables_have_every_count_and_the_memory() -> None:
    samples = [Sample(i, (100 + i) * MIB, 0) for i in range(3)]
    text = markdown([Result("Part", 5, requests=1_234, faults=Counter({"preemption": 3}), memory={"rank 0": samples})])
    assert text.startswith("**Part**\n\n|  |  |\n| --- | --- |\n| requests | 1,234 |\n|   preemption | 3 |\n")
    assert text.endswith("| rank 0 | 101.0 | 102.0 | +1.0 |  |")


def test_only_a_whole_soak_is_published() -> None:
    assert is_whole(Namespace(parts=[], requests=None))
    assert not is_whole(Namespace(parts=["server"], requests=None))
    assert not is_whole(Namespace(parts=[], requests=100))
