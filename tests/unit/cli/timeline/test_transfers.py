"""A load has its parts on all ranks, whatever is missing: records, files, or the scheduler's machine."""

from pathlib import Path

import pytest
from kvobs.telemetry.timeline.flight import OWN, What, pack

from kvobs.cli.timeline import recordings
from kvobs.cli.timeline.recordings import UNREPORTED
from kvobs.cli.timeline.transfers import Joined, join
from kvobs.testing import Script
from tests.support.recording_rigs import served
from tests.support.recordings import recorded

EPOCH = 10**18
LOAD, LOADED = pack(What.LOAD_BEGUN, 0, n=64), pack(What.LOAD_ENDED, 0)
KEY = (What.LOAD_BEGUN, 0, 5)
BEGUN = (100, 0, LOAD, 5)
CALL = (50, 1, pack(What.CALL, 0, "take_events"), 0)


def only(joined: list[Joined]) -> Joined:
    (one,) = joined
    return one


def test_a_load_of_a_real_recording_has_a_part_on_each_rank(tmp_path: Path, a: Script, b: Script) -> None:
    served(tmp_path / "t", a, b)
    joined = join(recordings.load(tmp_path / "t"))
    assert [one.start for one in joined] == sorted(one.start for one in joined)
    kinds = sorted((one.kind, one.connector, one.outcome, len(one.parts), one.waits_for) for one in joined)
    assert kinds == sorted([
        *[("load", "one", "ok", 2, [])] * 2, ("load", "one", "failed", 2, []), ("save", "two", "ok", 2, []),
        *[("lookup", "", "ok", 0, [])] * 5, ("resume", "one", "ok", 0, []),
    ])  # fmt: skip
    for one in joined:
        assert one.spent_ns > 0
        for part in one.parts:
            assert part.start is not None
            assert one.start <= part.start <= (part.end or 0) <= (one.end or 0)


@pytest.mark.parametrize("offset", [-60, 0, 40])
def test_the_rank_that_took_longest_is_known_whatever_its_clock(offset: int) -> None:
    """Rank 1's begin lies before that of the load if its clock is behind."""
    times = [(110, 20), (110 + offset, 70), (110, 30)]
    ranks = [recorded((at, 0, LOAD, 5), (at, spent, LOADED, 5), rank=rank) for rank, (at, spent) in enumerate(times)]
    one = only(join([recorded(BEGUN, (100, 90, LOADED, 5)), *ranks]))
    assert one.slowest == (1, 50)
    assert [part.spent_ns for part in one.parts] == [20, 70, 30]
    assert (one.spent_ns, one.tokens, one.connector) == (90, 64, "one")


@pytest.mark.parametrize("other", [CALL, (150, 0, LOADED, 5), BEGUN], ids=["no part", "no begin", "no end"])
def test_ranks_are_compared_if_it_is_known_how_long_each_of_several_took(other: tuple[int, int, int, int]) -> None:
    ranks = [recorded(BEGUN, (100, 5, LOADED, 5), rank=0), recorded(other, rank=1)]
    assert only(join([recorded(BEGUN), *ranks])).slowest is None


def test_an_open_load_waits_for_ranks_that_have_not_reported() -> None:
    """Rank 0 has; rank 1 has not; rank 2 never got the order; rank 3's file does not reach back so far."""
    records = [CALL, BEGUN, (100, 5, LOADED, 5)], [CALL, BEGUN], [CALL], [(900, 1, CALL[2], 0)]
    ranks = [recorded(*own, rank=rank) for rank, own in enumerate(records)]
    one = only(join([recorded(BEGUN, (1000, 1, CALL[2], 0)), *ranks]))
    assert (one.is_open, one.outcome, one.waits_for) == (True, "open", [1, 2])
    assert one.spent_ns == 901, "until the engine's last record"


def test_a_rank_whose_records_are_overwritten_still_owes_what_its_table_has() -> None:
    late = (9000, 1, CALL[2], 0)
    ranks = [recorded(late, rank=0), recorded(late, rank=1, in_progress={KEY: (LOAD, 110)})]
    one = only(join([recorded(late, in_progress={KEY: (LOAD, 100)}), *ranks]))
    assert (one.start, one.tokens, one.waits_for) == (EPOCH + 100, 64, [1])


def test_a_request_that_loads_twice_has_two_loads_with_their_own_parts() -> None:
    twice = [BEGUN, (100, 50, LOADED, 5), (300, 0, LOAD, 5), (300, 80, LOADED, 5)]
    first, second = join([recorded(*twice), recorded(*[(s + 10, t, w, r) for s, t, w, r in twice], rank=0)])
    assert [part.start for part in (*first.parts, *second.parts)] == [EPOCH + 110, EPOCH + 310]


@pytest.mark.parametrize(
    ("spent", "outcome", "waits_for"), [((20, 70), "ok", []), ((20, None), "open", [1]), ((None, 70), "open", [0])]
)
def test_ranks_say_it_without_the_scheduler(spent: tuple[int | None, ...], outcome: str, waits_for: list[int]) -> None:
    """As on the second machine of an engine."""
    ends = [[] if ns is None else [(100, ns, LOADED, 5)] for ns in spent]
    one = only(join([recorded(BEGUN, *end, rank=rank) for rank, end in enumerate(ends)]))
    assert (one.outcome, one.waits_for, one.is_open) == (outcome, waits_for, bool(waits_for))
    assert one.spent_ns == max(ns or 0 for ns in spent)


def test_engines_and_runs_are_apart() -> None:
    each = {"engine": 1}, {"engine": 2}, {"engine": 1, "run": "q"}
    joined = join([recorded(BEGUN, rank=rank, **more) for more in each for rank in (None, 0)])
    assert [(one.run, one.engine, len(one.parts)) for one in joined] == [("r", 1, 1), ("r", 2, 1), ("q", 1, 1)]
    lookup = only(join([recorded((100, 0, pack(What.LOOKUP_BEGUN, OWN), 5)), recorded(CALL, rank=0)]))
    assert (lookup.kind, lookup.connector, lookup.waits_for) == ("lookup", "", [])


def test_a_rank_may_report_a_save_before_it_is_promised() -> None:
    save, saved = pack(What.SAVE_BEGUN, 1), pack(What.SAVE_ENDED, 1)
    early = recorded((100, 0, saved, 5), (210, 0, save, 5), rank=0)
    assert only(join([recorded((200, 0, save, 5)), early, recorded((210, 0, save, 5), rank=1)])).waits_for == [1]


def test_once_a_load_is_over_its_begin_or_end_on_a_rank_may_be_unknown() -> None:
    """The begin is overwritten, and the connector's report had none; what a rank never reported is not open."""
    ended, begun = (
        only(join([recorded(BEGUN, (100, 90, LOADED, 5)), recorded(own, rank=0)]))
        for own in ((150, 0, LOADED, 5), BEGUN)
    )
    assert [(part.start, part.spent_ns) for part in ended.parts] == [(None, None)]
    assert ([part.outcome for part in begun.parts], begun.waits_for) == ([UNREPORTED], [])
