"""What travels between scheduler and workers survives the hop and merges rank by rank."""

import pickle
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs.routing.metadata import (
    LoadOrder,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
    Orders,
    checked,
)
from kvobs.state.transfers import Report, ReportKind
from tests.support.scripted import Events, Tally


def test_metadata_is_a_kind_of_vllms_own() -> None:
    assert issubclass(MultiKVConnectorMetadata, stock.MultiKVConnectorMetadata)
    assert issubclass(MultiKVConnectorWorkerMetadata, stock.MultiKVConnectorWorkerMetadata)


def test_metadata_survives_a_process_hop() -> None:
    meta = MultiKVConnectorMetadata(
        metadata=(), orders=Orders({"r": LoadOrder(1, True, ((3, 4), ()))}, closed=["q"], failed=("p",))
    )
    arrived = pickle.loads(pickle.dumps(meta))
    assert arrived == meta
    assert arrived.orders.loads["r"].blocks == ((3, 4), ())


def test_worker_metadata_merges_childrens_by_their_rule_and_keeps_all_reports() -> None:
    reports = [Report(rank, ReportKind.RECEIVED, "r", 0, rank) for rank in range(3)]
    ranks = [
        MultiKVConnectorWorkerMetadata(metadata=(Tally(1), None, None), reports=reports[:1]),
        MultiKVConnectorWorkerMetadata(metadata=(Tally(10), Tally(5), None), reports=reports[1:2]),
        MultiKVConnectorWorkerMetadata(metadata=(None, Tally(2), None), reports=reports[2:]),
    ]
    merged = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    first, second, third = merged.metadata
    assert isinstance(first, Tally)
    assert isinstance(second, Tally)
    assert (first.n, second.n, third) == (11, 7, None)
    assert merged.reports == reports


def test_ranks_with_other_children_are_refused_with_the_reason() -> None:
    one, two = MultiKVConnectorWorkerMetadata(metadata=(None,)), MultiKVConnectorWorkerMetadata(metadata=(None, None))
    with pytest.raises(TypeError, match="all ranks must run the same"):
        one.aggregate(two)
    with pytest.raises(TypeError, match="all ranks must run the same"):
        one.aggregate(Tally(1))


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_metadata_of_too_few_or_many_children_is_refused_by_number(parts: int) -> None:
    """With one rank nothing is aggregated, and nothing has compared them."""
    with pytest.raises(TypeError, match=f"{parts} connectors reached kvobs, which has 2"):
        checked(MultiKVConnectorWorkerMetadata((None,) * parts), 2, 2)


RECEIVED: Any = ReportKind.RECEIVED


@pytest.mark.parametrize(
    ("rank", "kind", "child"),
    [
        *((rank, RECEIVED, 0) for rank in (2, -1, 10**6)),
        *((0, kind, 0) for kind in (0, 7, None)),
        *((0, kind, child) for kind in (RECEIVED, ReportKind.SAVED, ReportKind.SYNC_FAILED) for child in (-1, 2)),
    ],
)
def test_a_report_that_no_worker_of_this_engine_can_make_is_refused(rank: int, kind: Any, child: int) -> None:
    """Early, a load's blocks would be read before they are filled."""
    reports = [Report(0, RECEIVED, "r", 0, 1), Report(rank, kind, "r", child, 1)]
    with pytest.raises(ValueError, match="a worker's report can't be of this engine: .* connectors 0 to 1, ranks 0 to"):
        checked(MultiKVConnectorWorkerMetadata((None, None), reports), 2, 2)
    meta = MultiKVConnectorWorkerMetadata((None, None), reports[:1])
    assert checked(meta, 2, 2) is meta


def test_events_of_ranks_merge_by_each_childs_own_rule() -> None:
    """Through the calls that vLLM's aggregator makes."""
    ranks: list[Any] = [MultiKVEvents({0: Events("x", "y")}), MultiKVEvents({0: Events("x"), 2: Events("z")})]
    merged, other = ranks
    merged.add_of_same_rank(MultiKVEvents({0: Events("z")}))  # of an earlier step
    other.add_of_same_rank(MultiKVEvents({}))
    merged.add_events(other.get_all_events())
    merged.increment_workers(1)
    assert merged.get_number_of_workers() == 2
    merged.aggregate()
    assert merged.by_child[0].get_all_events() == ["x"]
    assert merged.by_child[2].get_all_events() == ["z"]
    merged.clear_events()
    assert [events.get_all_events() for events in merged.by_child.values()] == [[], []]
    assert MultiKVEvents({}).get_number_of_workers() == 0
