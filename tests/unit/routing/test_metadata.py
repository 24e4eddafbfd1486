"""What travels between scheduler and workers survives the hop and merges rank by rank."""

import pickle
import threading
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs.routing.metadata import (
    Isolated,
    IsolatingMetadata,
    LoadOrder,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
    Orders,
    checked,
)
from kvobs.state.quarantine import IsolationState
from kvobs.state.transfers import ReportKind
from tests.support.reports import report
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


def test_worker_metadata_merges_by_rule_and_keeps_all_reports() -> None:
    reports = [report(rank, ReportKind.RECEIVED, "r", 0, rank) for rank in range(3)]
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


def test_ranks_with_other_connectors_are_refused_with_the_reason() -> None:
    one, two = MultiKVConnectorWorkerMetadata(metadata=(None,)), MultiKVConnectorWorkerMetadata(metadata=(None, None))
    with pytest.raises(TypeError, match="all ranks must run the same"):
        one.aggregate(two)
    with pytest.raises(TypeError, match="all ranks must run the same"):
        one.aggregate(Tally(1))


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_metadata_of_a_wrong_number_of_connectors_is_refused(parts: int) -> None:
    """With one rank nothing is aggregated, and nothing has compared them."""
    with pytest.raises(TypeError, match=f"{parts} connectors reached kvobs, which has 2"):
        checked(MultiKVConnectorWorkerMetadata((None,) * parts), 2, 2)


RECEIVED: Any = ReportKind.RECEIVED


@pytest.mark.parametrize(
    ("rank", "kind", "index"),
    [
        *((rank, RECEIVED, 0) for rank in (2, -1, 10**6)),
        *((0, kind, 0) for kind in (0, 7, None)),
        *((0, kind, index) for kind in (RECEIVED, ReportKind.SAVED, ReportKind.SYNC_FAILED) for index in (-1, 2)),
    ],
)
def test_a_report_that_no_worker_here_can_make_is_refused(rank: int, kind: Any, index: int) -> None:
    """Early, a load's blocks would be read before they are filled."""
    reports = [report(0, RECEIVED, "r"), report(rank, kind, "r", index)]
    with pytest.raises(
        ValueError, match="a worker's report can't belong to this engine: .* connectors 0 to 1, ranks 0 to"
    ):
        checked(MultiKVConnectorWorkerMetadata((None, None), reports), 2, 2)
    meta = MultiKVConnectorWorkerMetadata((None, None), reports[:1])
    assert checked(meta, 2, 2) is meta


@pytest.mark.parametrize("lacking", [{"spent_ns": ()}, {"began_ns": ()}])
def test_a_report_without_the_times_of_each_request_is_refused(lacking: Any) -> None:
    reports = [report(0, RECEIVED, "r"), report(1, RECEIVED, "r")._replace(**lacking)]
    with pytest.raises(ValueError, match="a worker's report can't belong to this engine: .* times of each request"):
        checked(MultiKVConnectorWorkerMetadata((None, None), reports), 2, 2)


def test_events_of_ranks_merge_by_each_connectors_own_rule() -> None:
    """Through the calls that vLLM's aggregator makes."""
    ranks: list[Any] = [MultiKVEvents({0: Events("x", "y")}), MultiKVEvents({0: Events("x"), 2: Events("z")})]
    merged, other = ranks
    merged.add_of_same_rank(MultiKVEvents({0: Events("z")}))  # of an earlier step
    other.add_of_same_rank(MultiKVEvents({}))
    merged.add_events(other.get_all_events())
    merged.increment_workers(1)
    assert merged.get_number_of_workers() == 2
    merged.aggregate()
    assert merged.by_index[0].get_all_events() == ["x"]
    assert merged.by_index[2].get_all_events() == ["z"]
    merged.clear_events()
    assert [events.get_all_events() for events in merged.by_index.values()] == [[], []]
    assert MultiKVEvents({}).get_number_of_workers() == 0


LOCK = threading.Lock()  # can't be pickled


class Clashing(Tally):
    """Can't be merged."""

    def aggregate(self, other: Any) -> Any:
        raise ArithmeticError


def isolating(*parts: Any) -> MultiKVConnectorMetadata:
    states = {0: IsolationState(0, is_out=False)}
    return IsolatingMetadata(metadata=parts, isolated=Isolated(states, {}))


def test_an_isolated_connectors_part_is_lost_alone() -> None:
    sent: Any = sent_over(isolating(LOCK, Tally(1)))
    assert (sent.metadata[0], sent.metadata[1].n, sent.lost) == (None, 1, {0})
    whole: Any = sent_over(isolating(Tally(2), None))
    assert (whole.metadata[0].n, whole.metadata[1], whole.lost) == (2, None, frozenset())
    with pytest.raises(TypeError, match="pickle"):
        sent_over(isolating(Tally(1), LOCK))


def sent_over(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_an_isolated_connectors_worker_metadata_is_lost_alone(is_lost_before: bool) -> None:
    def of(mine: Any, theirs: int) -> MultiKVConnectorWorkerMetadata:
        parts = (mine, Tally(theirs))
        return MultiKVConnectorWorkerMetadata(parts, isolated=frozenset({0}))

    first: Any = of(LOCK if is_lost_before else Clashing(1), 1)
    merged: Any = sent_over(first).aggregate(sent_over(of(Clashing(1), 2)))
    assert (merged.metadata[1].n, merged.lost) == (3, {0})
    assert is_lost_before or merged.metadata[0] is None


def test_others_worker_metadata_ends_the_merge_as_in_vllm() -> None:
    parts = (Tally(1), Clashing(1))
    one, two = (MultiKVConnectorWorkerMetadata(parts, isolated=frozenset({0})) for _ in range(2))
    with pytest.raises(ArithmeticError):
        one.aggregate(two)


class ClashingEvents(Events):
    def add_events(self, events: Any) -> None:
        raise ArithmeticError


@pytest.mark.parametrize("add", ["add_events", "add_of_same_rank"])
def test_an_isolated_connectors_events_are_lost_alone(add: str) -> None:
    def of() -> MultiKVEvents:
        made: Any = {0: ClashingEvents("a"), 1: Events("b")}
        return sent_over(MultiKVEvents(made, frozenset({0})))

    one, two = of(), of()
    for _ in range(2):  # once lost, it stays so
        getattr(one, add)(two.get_all_events() if add == "add_events" else two)
    left: Any = one.by_index
    assert (one.lost, list(left), left[1].events) == ({0}, [1], ["b", "b", "b"])
    assert one.get_all_events()[-1] == (0, None)
    further = of()
    further.add_events(one.get_all_events())
    assert further.lost == {0}


def test_another_connectors_events_end_the_merge_as_in_vllm() -> None:
    made: Any = [MultiKVEvents({0: ClashingEvents("a")}, frozenset({1})) for _ in range(2)]
    with pytest.raises(ArithmeticError):
        made[0].add_events(made[1].get_all_events())


def test_an_event_container_that_can_not_be_pickled_is_lost() -> None:
    made: Any = MultiKVEvents({0: LOCK, 1: Events("b")}, frozenset({0}))
    sent = sent_over(made)
    assert (sent.lost, list(sent.by_index)) == ({0}, [1])
