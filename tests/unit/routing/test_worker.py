"""What a worker's side says to the scheduler, and what it keeps from vLLM."""

import dataclasses
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvobs.routing import worker
from kvobs.routing.metadata import LoadOrder, MultiKVConnectorMetadata, Orders
from kvobs.state.transfers import ReportKind
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, started


def side_of(rig: Rig, *loads: tuple[str, LoadOrder], failed: tuple[str, ...] = ()) -> Any:
    """Return rank 0's side with metadata of these loads bound."""
    side = rig.workers[0]._side
    metadata = rig.scheduler.schedule().kv_connector_metadata.metadata
    side.bind_connector_metadata(MultiKVConnectorMetadata(metadata=metadata, orders=Orders(dict(loads), failed=failed)))
    return side


def said(side: worker.WorkerSide) -> list[tuple[ReportKind, str, int]]:
    meta = side.build_connector_worker_meta()
    return (
        [] if meta is None else [(r.kind, request, r.connector_index) for r in meta.reports for request in r.requests]
    )


@pytest.mark.parametrize("hook", ["get_transfer_results", "get_finished"])
def test_vllm_gets_ordered_failures_only(hook: str, a: Script, b: Script) -> None:
    """From 0.30 on both hooks say the same."""
    side = side_of(Rig("kvobs", a, b), failed=("f",))
    a.say(0, received="r", saved="s")
    b.say(0, failed="q")
    both = KVConnectorTransferResults(finished_recving={"f"}, failed_recving={"f"})
    assert getattr(side, hook)(set()) == (both if hook == "get_transfer_results" else (None, {"f"}))
    assert said(side) == [(ReportKind.RECEIVED, "r", 0), (ReportKind.SAVED, "s", 0), (ReportKind.FAILED, "q", 1)]
    assert said(side) == []


def test_failures_of_several_connectors_are_returned_together(a: Script, b: Script) -> None:
    loads = [(request, LoadOrder(index, True, ((1,),))) for request, index in (("p", 0), ("q", 1))]
    side = side_of(Rig("kvobs", a, b), *loads)
    a.say(0, failed="p")
    b.say(0, failed="q")
    results = side.get_transfer_results(set())
    assert results == KVConnectorTransferResults(finished_recving={"p", "q"}, failed_recving={"p", "q"})


def test_a_second_loads_failure_is_returned_as_the_firsts(a: Script, b: Script) -> None:
    side = side_of(Rig("kvobs", a, b), ("r", LOAD))
    for _ in range(2):
        a.say(0, failed="r")
        assert side.get_transfer_results(set()).failed_recving == {"r"}
        side.bind_connector_metadata(side._meta)


def test_before_030_vllm_asks_get_finished(a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(Rig("kvobs", a, b))
    answers = {0: (None, {"r"}), 1: ({"s"}, None)}
    for connector in side.connectors:
        monkeypatch.setattr(connector, "get_finished", lambda ids, i=connector.index: answers[i])
    monkeypatch.setattr(worker, "KVConnectorTransferResults", None)
    assert side.get_finished({"x"}) == (None, None)
    assert said(side) == [(ReportKind.RECEIVED, "r", 0), (ReportKind.SAVED, "s", 1)]


def test_an_idle_worker_says_nothing(a: Script, b: Script) -> None:
    side = side_of(Rig("kvobs", a, b))
    side._meta = dataclasses.replace(side._meta, has_forward=False)
    assert side.build_connector_worker_meta() is None
    assert side.get_kv_connector_stats() is None
    assert side.get_kv_connector_kv_cache_events() is None
    assert side.get_handshake_metadata() is None


LOAD = LoadOrder(0, is_async=True, blocks=((1,),))


def test_a_load_that_ends_before_its_requests_end_is_forgotten(a: Script, b: Script) -> None:
    side = side_of(Rig("kvobs", a, b), ("r", LOAD))
    side.bind_connector_metadata(dataclasses.replace(side._meta, orders=Orders(orphaned=["r"], closed=["r"])))
    assert (side._open.by_request, side._open._orphaned) == ({}, set())


def test_sync_loads_are_reported_when_their_step_is_over(a: Script, b: Script) -> None:
    good, bad, later = LoadOrder(0, False, ((1, 2),)), LoadOrder(1, False, ((3,),)), LoadOrder(0, True, ((4,),))
    side = side_of(Rig("kvobs", a, b), ("good", good), ("bad", bad), ("later", later))
    b.bad_blocks[0] = {3}
    assert side.get_block_ids_with_load_errors() == {3}
    assert said(side) == [(ReportKind.SYNC_DONE, "good", 0), (ReportKind.SYNC_FAILED, "bad", 1)]


def test_sync_loads_of_one_connector_share_their_steps_wait(a: Script, b: Script) -> None:
    """By their blocks; one without counts like one with a block. All of the time is divided."""
    blocks = {"r": (0, ((1,), ())), "s": (0, ((2, 3), (9,))), "t": (0, ()), "u": (1, ((4, 5),))}
    side = side_of(Rig("kvobs", a, b), *((r, LoadOrder(index, False, ids)) for r, (index, ids) in blocks.items()))
    side._load_ns = {0: 1003, 1: 70}
    sent = side.build_connector_worker_meta()
    assert [one.requests for one in sent.reports] == [("r", "s", "t"), ("u",)]
    assert [one.spent_ns for one in sent.reports] == [(200, 602, 201), (70,)]
    begun = {began_ns for one in sent.reports for began_ns in one.began_ns}
    assert {one.time_ns - min(begun) for one in sent.reports} == {1003, 70}, "they end when the step goes on"


@pytest.mark.parametrize(
    ("groups", "passed_on", "kind"),
    [(1, {4, 6}, ReportKind.BAD_BLOCKS), (2, set(), ReportKind.UNMAPPED_BAD_BLOCKS)],
    ids=["one group", "two groups"],
)
def test_bad_blocks_of_async_loads(
    groups: int, passed_on: set[int], kind: ReportKind, *, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    loads = [(name, LoadOrder(0, True, ((i, 40 + i),) * groups)) for name, i in (("r", 4), ("s", 5), ("t", 6))]
    side = side_of(Rig("kvobs", a, b, groups=groups), *loads)
    a.bad_blocks[0] = {4, 6}
    assert side.get_block_ids_with_load_errors() == passed_on
    assert said(side) == [(kind, "r", 0), (kind, "t", 0)]
    assert "no open load" not in caplog.text


@pytest.mark.parametrize("is_best_effort", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_bad_blocks_of_no_open_load_reach_vllm(
    groups: int, is_best_effort: bool, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """With several groups vLLM raises then, which an isolated connector must not cause."""
    options = {"best_effort": ["ScriptedConnector"]} if is_best_effort else None
    side = side_of(Rig("kvobs", a, b, groups=groups, kvobs=options), ("r", LoadOrder(1, True, ((4, 5),) * groups)))
    a.bad_blocks[0] = {9}
    reach_vllm = groups == 1 or not is_best_effort
    assert side.get_block_ids_with_load_errors() == ({9} if reach_vllm else set())
    assert said(side) == []
    outcome = "passed on to vLLM" if reach_vllm else "ignored, because vLLM would crash the engine"
    assert (
        f"reported load errors for blocks that belong to no open load (such as [9]); they are {outcome}"
    ) in caplog.text


@pytest.mark.parametrize(
    ("groups", "passed_on", "kind"),
    [(1, {4}, ReportKind.BAD_BLOCKS), (2, set(), ReportKind.UNMAPPED_BAD_BLOCKS)],
    ids=["one group", "two groups"],
)
def test_bad_blocks_in_the_async_load_of_another_count(
    groups: int, passed_on: set[int], kind: ReportKind, a: Script, b: Script
) -> None:
    side = side_of(Rig("kvobs", a, b, groups=groups), ("r", LoadOrder(0, True, ((4, 5),) * groups)))
    b.bad_blocks[0] = {4}
    assert side.get_block_ids_with_load_errors() == passed_on
    assert said(side) == [(kind, "r", 1)]


@pytest.mark.parametrize("by_request", [False, True])
def test_failures_in_the_sync_load_of_another_count(by_request: bool, a: Script, b: Script) -> None:
    """Whole loads as well as blocks: vLLM reads a failed load of a request that waits only."""
    side = side_of(Rig("kvobs", a, b), ("r", LoadOrder(0, False, ((4, 5),))), ("s", LoadOrder(0, False, ((6,),))))
    if by_request:
        b.say(0, failed="r")
    else:
        b.bad_blocks[0] = {4}
    assert side.get_transfer_results(set()).failed_recving == set(), "it is no load of its own"
    assert side.get_block_ids_with_load_errors() == ({4, 5} if by_request else {4})
    blame = (ReportKind.FAILED if by_request else ReportKind.BAD_BLOCKS, "r", 1)
    assert said(side) == [blame, (ReportKind.SYNC_FAILED, "r", 0), (ReportKind.SYNC_DONE, "s", 0)]
    assert side.get_block_ids_with_load_errors() == set(), "once"


def test_late_bad_blocks_of_a_sync_load_only_reach_vllm(a: Script, b: Script) -> None:
    """The scheduler is ahead, and has not closed the load: this step has none."""
    side = side_of(Rig("kvobs", a, b), ("r", LoadOrder(0, False, ((4, 5),))))
    side.bind_connector_metadata(dataclasses.replace(side._meta, orders=None))
    b.bad_blocks[0] = {4}
    assert side.get_block_ids_with_load_errors() == {4}
    assert said(side) == []


def test_fields_of_a_newer_vllm_are_passed_on(a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several connectors it is added up; of one it is as it was."""

    @dataclasses.dataclass
    class Newer(KVConnectorTransferResults):
        parked: set[str] = dataclasses.field(default_factory=set)
        note: str | None = None

    side = side_of(Rig("kvobs", a, b), ("r", LoadOrder(0, True, ())))
    a.reports[0] = Newer(finished_recving={"r"}, parked={"p"}, note="a note")
    b.reports[0] = Newer(parked={"q"})
    monkeypatch.setattr(worker, "KVConnectorTransferResults", Newer)
    monkeypatch.setattr(worker, "FURTHER_RESULTS", ("parked", "note"))
    assert side.get_transfer_results(set()) == Newer(finished_recving={"r"}, parked={"p", "q"}, note="a note")
    a.reports[0], b.reports[0] = Newer(), Newer()
    assert side.get_transfer_results(set()) == Newer(), "once"


@pytest.mark.parametrize(
    ("values", "one"),
    [
        ([{"p"}, {"q"}, {"p"}], {"p", "q"}),
        ([{"p": 1}, {"q": 2}], {"p": 1, "q": 2}),
        ([{"p": 1, "q": 2}, {"p": 3, "q": 2}, {"p": 1}], {"q": 2}),  # W24
        (["a", "a"], "a"),
        (["a", "b"], ""),
        ([3], 3),
    ],
)
def test_values_on_which_connectors_disagree_are_nobodys(values: list[object], one: object) -> None:
    assert worker.agreed(values) == one


@pytest.mark.parametrize("is_early", [False, True])
def test_a_rank_forgets_what_it_never_reports_when_that_is_over(is_early: bool, a: Script, b: Script) -> None:
    """A connector may report on one rank for all: the others are passed its loads and saves, too."""
    a.finished_count = 1
    a.offers["r"] = (2 * BLOCK, True)
    a.promises.add("r")
    rig = started("kvobs", a, b, ranks=2, max_tokens=1)
    assert all(list(w._side._began) == [(0, "r")] for w in rig.workers)
    a.say(0, received="r", saved="r" if is_early else "")  # in the step of its promise
    rig.run(3)
    assert all(list(w._side._began) == [(0, "r")] * (not is_early) for w in rig.workers), "the save is promised"
    a.say(0, saved="r")
    rig.run(2)
    assert_nothing_is_left(rig)


def test_last_begun_of_endless_transfers_are_known(a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEGUN_AT_MOST", 2)
    assert list(side_of(Rig("kvobs", a, b), *((name, LOAD) for name in "rst"))._began) == [(0, "s"), (0, "t")]


@pytest.mark.parametrize(("word", "is_load"), [("received", True), ("failed", True), ("saved", False)])
def test_a_report_has_its_order_and_end_times_and_duration(
    word: str, is_load: bool, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once: what a connector reports again began at an unknown time."""
    side = side_of(Rig("kvobs", a, b))
    monkeypatch.setattr(worker, "wall_ns", lambda: 100)
    ordered = Orders(loads={"r": LOAD}) if is_load else Orders(promised=[(0, "r")])
    side.bind_connector_metadata(dataclasses.replace(side._meta, orders=ordered))
    monkeypatch.setattr(worker, "wall_ns", lambda: 170)
    reports = []
    for _ in range(2):
        a.say(0, **{word: "r"})
        side.get_transfer_results(set())
        reports += side.build_connector_worker_meta().reports
    times = [(one.requests, one.began_ns, one.time_ns, one.spent_ns) for one in reports]
    assert times == [(("r",), (100,), 170, (70,)), (("r",), (0,), 170, (0,))]


def test_bad_blocks_do_not_end_a_load(a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receipt comes later, and has the time of its order."""
    monkeypatch.setattr(worker, "wall_ns", lambda: 100)
    side = side_of(Rig("kvobs", a, b), ("r", LOAD))
    a.bad_blocks[0] = {1}
    assert side.get_block_ids_with_load_errors() == {1}
    a.say(0, received="r")
    side.get_transfer_results(set())
    sent = side.build_connector_worker_meta()
    assert [(one.kind, *one.began_ns) for one in sent.reports] == [
        (ReportKind.BAD_BLOCKS, 0),
        (ReportKind.RECEIVED, 100),
    ]


@pytest.mark.parametrize("had_one", [False, True])
def test_outside_a_step_a_worker_has_no_metadata_and_is_silent(had_one: bool, a: Script, b: Script) -> None:
    """vLLM reads stats and events of a worker between steps, too."""
    rig = Rig("kvobs", a, b)
    side = rig.workers[0]._side
    if had_one:
        side = side_of(rig, ("r", LoadOrder(0, False, ((1,),))), failed=("f",))
        side.clear_connector_metadata()
    assert side.get_transfer_results({"x"}) == KVConnectorTransferResults()
    assert side.get_block_ids_with_load_errors() == set()
    assert side.get_kv_connector_stats() is None
    assert side.build_connector_worker_meta() is None
