"""Which connectors of which vLLM get kvobs's aggregator once it is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.v1.executor import abstract as executors

from kvobs.aggregation.aggregator import Aggregation, KVOutputAggregator, install, obstacle
from kvobs.state.transfers import Stuck
from kvobs.vllm_api import versions


class Executor:
    """As much of vLLM's executor as it takes to make an aggregator."""

    parallel_config = SimpleNamespace(world_size=4)
    kv_output_aggregator: Any = None

    def aggregator_for(self, connector: Any) -> Any:
        executors.Executor.init_kv_output_aggregator(self, connector)
        return self.kv_output_aggregator


def connector(**attributes: Any) -> Any:
    return SimpleNamespace(get_finished_count=lambda: None, **attributes)


@pytest.fixture(autouse=True)
def _vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put vLLM's class back after the test."""
    monkeypatch.setattr(executors, "KVOutputAggregator", stock.KVOutputAggregator)


def ignore(_: Stuck) -> None:
    pass


ASKS = connector(aggregation=Aggregation(stuck_after_s=5, on_stuck=ignore))


def test_installed_it_serves_only_connectors_that_ask_for_it() -> None:
    for _ in range(2):
        install()
    ours = Executor().aggregator_for(ASKS)
    assert type(ours) is KVOutputAggregator
    assert (ours._expected_finished_count, ours._stuck_after_s, ours._on_stuck) == (4, 5, ignore)
    for other in (connector(), connector(aggregation=None)):
        theirs = Executor().aggregator_for(other)
        assert type(theirs) is stock.KVOutputAggregator
        assert theirs._expected_finished_count == 4
    counts = SimpleNamespace(get_finished_count=lambda: 2, aggregation=ASKS.aggregation)
    assert Executor().aggregator_for(counts)._expected_finished_count == 2, "a connector's own number is taken"


def test_a_vllm_whose_workers_say_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert versions.unknown_output_fields() == []
    newer = {*versions.output_fields(), "lost_blocks"}
    monkeypatch.setattr(versions, "output_fields", lambda: newer)
    assert versions.unknown_output_fields() == ["lost_blocks"]
    for _ in range(2):
        install()
    assert type(Executor().aggregator_for(ASKS)) is stock.KVOutputAggregator
    assert type(KVOutputAggregator.from_connector(ASKS, 4)) is stock.KVOutputAggregator
    (line,) = [record.getMessage() for record in caplog.records]
    assert "lost_blocks" in line


def tomorrows_method(self: Any) -> int:
    """As a newer vLLM's aggregator could have it: it reads the class's own books."""
    return len(self._recv_remaining_count)


def tomorrows_aggregate(self: Any, outputs: Any, output_rank: int = 0, *, deadline: float | None = None) -> None:
    """As a newer vLLM's executors could call it."""


@pytest.mark.parametrize(
    ("name", "member", "said_so"),
    [
        ("pending", tomorrows_method, "it has members that kvobs does not know: pending"),
        ("is_idle", property(tomorrows_method), "it has members that kvobs does not know: is_idle"),
        ("quorum", 3, "it has members that kvobs does not know: quorum"),
        ("aggregate", tomorrows_aggregate, "its methods have parameters that kvobs does not know: aggregate(deadline)"),
    ],
)
def test_a_vllm_whose_aggregator_can_do_more_keeps_its_own(
    name: str, member: Any, said_so: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert obstacle() is None
    monkeypatch.setattr(stock.KVOutputAggregator, name, member, raising=False)
    for _ in range(2):
        install()
    assert executors.KVOutputAggregator is stock.KVOutputAggregator
    assert type(KVOutputAggregator.from_connector(ASKS, 4)) is stock.KVOutputAggregator
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"vLLM's KVOutputAggregator stays in use instead of kvobs's, because {said_so}"


def test_a_public_attribute_that_only_instances_have_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stock.KVOutputAggregator.__init__

    def more(self: Any, expected_finished_count: int) -> None:
        real(self, expected_finished_count)
        self.history = []

    monkeypatch.setattr(stock.KVOutputAggregator, "__init__", more)
    assert versions.unknown_aggregator_members(stock.KVOutputAggregator) == ["history"]
    assert versions.unknown_aggregator_parameters(stock.KVOutputAggregator, KVOutputAggregator) == []


def test_anothers_aggregator_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(stock.KVOutputAggregator):
        """Of another plugin."""

    monkeypatch.setattr(executors, "KVOutputAggregator", Theirs)
    install()
    assert executors.KVOutputAggregator is Theirs
    assert "has a different one, tests.unit.aggregation.test_aggregator_installed" in caplog.text


def test_a_vllm_that_looks_elsewhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(executors, "KVOutputAggregator")
    install()
    assert not hasattr(executors, "KVOutputAggregator")
    assert len(caplog.records) == 1
