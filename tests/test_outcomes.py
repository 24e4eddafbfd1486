"""How loads and saves end is counted once each, and logged where an operator must know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.children import Child
from kvobs.ledger import Foreign, Load
from kvobs.outcomes import Outcomes
from kvobs.recorder import WIDTH, Recorder
from kvobs.signals import SLOTS


class Counted:
    def __init__(self, *resets: Any) -> None:
        self.reset: list[str] = []
        self.recorder = Recorder(len(resets))
        names = ["one", "two", "three"]
        children = [
            Child(i, names[i], SimpleNamespace(reset_cache=self._reset(names[i], r)), True)
            for i, r in enumerate(resets)
        ]
        self.outcomes = Outcomes(children, self.recorder)

    def _reset(self, name: str, answer: Any) -> Any:
        def reset_cache() -> Any:
            self.reset.append(name)
            return answer

        return reset_cache

    def counts(self) -> dict[tuple[Any, ...], int]:
        flat = self.recorder.take()
        keys = [(slot // WIDTH, SLOTS[slot % WIDTH][0].name, *SLOTS[slot % WIDTH][1]) for slot in flat[::2]]
        return dict(zip(keys, flat[1::2], strict=True))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("failed", [True, False])
def test_a_load_counts_by_mode_and_outcome_and_its_tokens_if_it_went_well(is_async: bool, failed: bool) -> None:
    counted = Counted(None, None)
    counted.outcomes.loaded(Load(1, 32, is_async, 1, failed=failed))
    mode = "async" if is_async else "sync"
    expected = {(1, "kvobs_loads_total", mode, "failed" if failed else "ok"): 1}
    assert counted.counts() == expected | ({} if failed else {(1, "kvobs_load_tokens_total"): 32})


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
    counted.outcomes.sync_load_failed(0)
    assert counted.reset == ["two", "three"]
    assert "except of three, which can't be" in caplog.text
    assert counted.counts() == {(0, "kvobs_failed_sync_loads_total"): 1}
