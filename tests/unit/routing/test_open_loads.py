"""Whose load a block is: over several steps, for one KV cache group and for several."""

import pytest

from kvobs.routing.metadata import LoadOrder, Orders
from kvobs.routing.open_loads import OpenLoads
from kvobs.state.transfers import ReportKind

ASYNC, SYNC = LoadOrder(0, True, ((1, 2), (3,))), LoadOrder(1, False, ((4, 5),))


def loads(*, ids_are_unique: bool = True, names_failed: bool = True, **ordered: LoadOrder) -> OpenLoads:
    made = OpenLoads(ids_are_unique=ids_are_unique, names_failed=names_failed)
    made.take(Orders(loads=ordered))
    return made


def test_a_bad_block_fails_the_load_that_it_is_in() -> None:
    found = loads(a=ASYNC, s=SYNC).attribute(0, {3, 4, 9}, {"a", "s"})
    assert found.passed_on == {3, 4}
    assert found.reports == [(ReportKind.BAD_BLOCKS, "a"), (ReportKind.BAD_BLOCKS, "s")]
    assert (found.failed_syncs, found.unknown) == ({"s"}, {9})


def test_the_owner_of_a_sync_load_need_not_report_it() -> None:
    assert loads(s=SYNC).attribute(1, {5}, {"s"}).reports == []


@pytest.mark.parametrize(("names_failed", "passed_on"), [(True, set()), (False, {1})])
def test_with_several_groups_an_async_load_fails_as_a_whole(names_failed: bool, passed_on: set[int]) -> None:
    found = loads(ids_are_unique=False, names_failed=names_failed, a=ASYNC).attribute(0, {1}, {"a"})
    assert found.passed_on == passed_on
    assert found.reports == [(ReportKind.BAD_BLOCKS if passed_on else ReportKind.UNMAPPED_BAD_BLOCKS, "a")]


def test_a_sync_load_is_one_of_its_step_only() -> None:
    made = loads(s=SYNC)
    assert made.syncs_of_others(0, {"s"}, {"s"}) == {"s": SYNC}
    assert made.syncs_of_others(1, {"s"}, {"s"}) == {}, "its own connector reports the blocks"
    assert made.syncs_of_others(0, {"s"}, ()) == {}
    assert made.attribute(0, {4}, ()) == ({4}, [], set(), set())


def test_a_receipt_is_owned_once_per_load() -> None:
    made = loads(a=ASYNC, s=SYNC)
    assert made.first_of_owned(0, {"a", "s", "unknown"}) == {"a"}
    assert made.first_of_owned(0, {"a"}) == set()
    assert made.first_of_owned(1, {"a", "s"}) == set()
    made.take(Orders(loads={"a": ASYNC}))
    assert made.first_of_owned(0, {"a"}) == {"a"}, "the request loads again"


def test_a_load_that_others_may_spoil_is_kept_for_one_step() -> None:
    hit = ASYNC._replace(hit_by=(1,))
    made = loads(a=hit, plain=ASYNC, gone=hit)
    assert made.take(Orders(closed=["a", "plain", "gone", "unknown"], orphaned=["gone"])) == [
        ("a", hit), ("plain", ASYNC), ("gone", hit)
    ]  # fmt: skip
    assert (made.by_request, made.resumed) == ({}, {"a": hit})
    made.end_step()
    assert made.resumed == {}
