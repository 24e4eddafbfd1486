"""How loads and saves end is counted once each, and logged where an operator must know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.children import Child
from kvobs.outcomes import Outcomes
from kvobs.recorder import Recorder
from kvobs.reports import Foreign
from kvobs.signals import SELF_SECONDS, Kind, locate
from kvobs.transfers import Load, Save


class Counted:
    def __init__(self, *resets: Any) -> None:
        self.reset: list[str] = []
        self.recorder = Recorder(len(resets))
        names = ["one", "two", "three"]
        children = [
            Child(i, names[i], SimpleNamespace(reset_cache=self._reset(names[i], r)), True, self.recorder)
            for i, r in enumerate(resets)
        ]
        self.outcomes = Outcomes(children, self.recorder, bytes_per_token=10)

    def _reset(self, name: str, answer: Any) -> Any:
        def reset_cache() -> Any:
            self.reset.append(name)
            return answer

        return reset_cache

    def counts(self) -> dict[tuple[Any, ...], int]:
        """Return (child, metric, label values) -> number, or a histogram's sum; calls into the children left out."""
        taken = self.recorder.take()
        found: dict[tuple[Any, ...], int] = {}
        for place, n in taken.counts.items():
            series, offset, child = locate(place)
            if series.signal.name == "kvobs_call_duration_seconds" or series.signal is SELF_SECONDS:
                continue
            if series.signal.kind is not Kind.HISTOGRAM or offset == series.width - 1:
                found[child, series.signal.name, *series.values] = n
        return found | {(child, name, *values): n for name, child, *values, n in taken.opened}


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("failed", [True, False])
def test_a_load_counts_by_mode_and_outcome_and_its_tokens_if_it_went_well(is_async: bool, failed: bool) -> None:
    counted = Counted(None, None)
    counted.outcomes.loaded(
        Load(1, 32, is_async, 1, failed_on={0} if failed else set(), opened_ns=100, arrived={0: 107})
    )
    mode = "async" if is_async else "sync"
    assert counted.counts() == {(1, "kvobs_loads_total", mode, "failed" if failed else "ok"): 1} | (
        {(1, "kvobs_recomputed_tokens_total"): 32}
        if failed
        else {
            (1, "kvobs_load_tokens_total"): 32,
            (1, "kvobs_load_bytes_total"): 320,
            (1, "kvobs_load_duration_seconds", mode): 7 if is_async else 107,
        }
    )


@pytest.mark.parametrize(
    ("arrived", "skew", "slowest"), [({0: 5, 1: 9, 2: 6}, 4, "1"), ({2: 7, 0: 7, 1: 3}, 4, "2")], ids=str
)
@pytest.mark.parametrize("kind", ["load", "save"])
def test_ranks_are_compared(arrived: dict[int, int], skew: int, slowest: str, kind: str) -> None:
    counted = Counted(None)
    if kind == "load":
        counted.outcomes.loaded(Load(0, 1, True, 3, arrived=arrived))
    else:
        counted.outcomes.saved(0, Save(True, True, 3, 1, arrived), 1)
    counts = counted.counts()
    assert counts[0, "kvobs_rank_skew_seconds", kind] == skew
    assert counts[0, "kvobs_slowest_rank_total", slowest] == 1


def test_one_rank_alone_is_not_the_slowest() -> None:
    counted = Counted(None)
    counted.outcomes.loaded(Load(0, 1, True, 1, arrived={0: 5}))
    assert not [key for key in counted.counts() if "rank" in key[1]]


def test_a_save_is_held_from_the_promise_to_now() -> None:
    counted = Counted(None)
    counted.outcomes.saved(0, Save(True, True, 1, 100, {0: 300}), 350)
    assert counted.counts() == {(0, "kvobs_saves_total", "ok"): 1, (0, "kvobs_save_hold_seconds"): 250}


def test_of_a_load_with_holes_only_what_is_lost_is_computed_again() -> None:
    counted = Counted(None)
    counted.outcomes.loaded(Load(0, 48, True, 1, failed_on={0}, lost_tokens=16))
    assert counted.counts()[0, "kvobs_recomputed_tokens_total"] == 16


def test_an_aborted_load_counts_as_that_and_not_again_when_it_arrives() -> None:
    counted = Counted(None)
    load = Load(0, 32, True, 1, aborted=True)
    counted.outcomes.aborted(load)
    counted.outcomes.loaded(load)
    assert counted.counts() == {(0, "kvobs_loads_total", "async", "aborted"): 1}


def test_foreign_reports_count_each_and_are_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted(None, None)
    for request in ("r", "q"):
        counted.outcomes.foreign(Foreign(1, "load", request))
    counted.outcomes.foreign(Foreign(1, "save", "r"))
    assert counted.counts() == {
        (1, "kvobs_foreign_reports_total", "load"): 2,
        (1, "kvobs_foreign_reports_total", "save"): 1,
    }
    assert len(caplog.records) == 2


def test_a_failed_sync_load_resets_the_siblings_and_names_those_that_can_not_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted(True, True, None)
    counted.outcomes.sync_loads_failed(0, 1)
    assert counted.reset == ["two", "three"]
    assert "except of three, which can't be" in caplog.text
    assert counted.counts() == {(0, "kvobs_failed_sync_loads_total"): 1}
