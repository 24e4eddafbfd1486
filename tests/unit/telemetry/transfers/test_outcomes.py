"""Loads and saves count once each at their end, and are logged where an operator must know."""

from typing import Any

import pytest

from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import OVERHEAD_SECONDS, SAVE_HOLD, Kind
from kvobs.state.transfers import Gain, Load, Save, UnexpectedReport
from kvobs.telemetry.transfers.outcomes import Outcomes
from tests.support.numbers import locate, taken
from tests.support.reports import took


class Counted:
    def __init__(self, connectors: int) -> None:
        self.recorder = Recorder(connectors)
        self.outcomes = Outcomes(["one", "two", "three"][:connectors], self.recorder)

    def counts(self) -> dict[tuple[Any, ...], int]:
        """Return (connector, metric, label values) -> number, or a histogram's sum, without calls into connectors."""
        grown = taken(self.recorder)
        found: dict[tuple[Any, ...], int] = {}
        for place, n in grown.counts.items():
            series, offset, index = locate(place)
            if series.signal.name == "kvobs_call_duration_seconds" or series.signal is OVERHEAD_SECONDS:
                continue
            if series.signal.kind is not Kind.HISTOGRAM or offset == series.width - 1:
                found[index, series.signal.name, *series.values] = n
        return found | {(index, name, *values): n for name, index, *values, n in grown.opened}


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(("lost", "recomputed"), [(None, 32), (16, 16), (None, None)])
def test_a_load_counts_by_mode_and_outcome_and_tokens_if_good(
    is_async: bool, lost: int | None, recomputed: int | None
) -> None:
    """Of a load with holes only what is lost is computed again."""
    counted, failed_on = Counted(2), {0} if recomputed else set()
    ended: dict[str, Any] = {"failed_on": failed_on, "lost_tokens": lost, "arrived_ns": 107}
    counted.outcomes.load_ended("r", Load(1, 32, is_async, 1, 100, size=320, arrived=took(5), **ended))
    mode = "async" if is_async else "sync"
    assert counted.counts() == {(1, "kvobs_loads_total", mode, "failed" if recomputed else "ok"): 1} | (
        {(1, "kvobs_recomputed_tokens_total"): recomputed}
        if recomputed
        else {
            (1, "kvobs_load_tokens_total"): 32,
            (1, "kvobs_load_bytes_total"): 320,
            (1, "kvobs_load_duration_seconds", mode): 7 if is_async else 5,
        }
    )


@pytest.mark.parametrize(("outcome", "held"), [("ok", {(0, "kvobs_save_hold_seconds"): 250}), ("abandoned", {})])
def test_a_save_is_held_since_its_promise_unless_abandoned(outcome: str, held: dict[Any, int]) -> None:
    counted = Counted(1)
    counted.outcomes.saved("r", 0, Save(True, True, 1, 100, arrived_ns=300, is_abandoned=outcome == "abandoned"), 350)
    assert counted.counts() == {(0, "kvobs_saves_total", outcome): 1, **held}


@pytest.mark.parametrize("fails", [False, True])
def test_an_aborted_load_counts_as_that_and_its_tokens_later(fails: bool) -> None:
    counted = Counted(1)
    load = Load(0, 32, True, 1, size=320, aborted=True)
    counted.outcomes.aborted("r", load, by_error=False)
    aborted, unused = (0, "kvobs_loads_total", "async", "aborted"), (0, "kvobs_unused_hit_tokens_total", "aborted")
    assert counted.counts() == {aborted: 1, unused: 32}
    load.failed_on |= {0} if fails else set()
    counted.outcomes.load_ended("r", load)
    loaded = {(0, "kvobs_load_tokens_total"): 32, (0, "kvobs_load_bytes_total"): 320}
    assert counted.counts() == ({} if fails else loaded)


def test_stray_reports_count_each_and_are_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted(2)
    for request in ("r", "q"):
        counted.outcomes.unexpected(UnexpectedReport(1, "load", request))
    counted.outcomes.unexpected(UnexpectedReport(1, "save", "x\nINFO forged " + "x" * 10**6))
    assert counted.counts() == {
        (1, "kvobs_unexpected_reports_total", kind): n for kind, n in (("load", 2), ("save", 1))
    }
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("connector 'two' reported" in line and "it was not chosen" in line for line in lines)
    assert all(len(line) < 1000 and "\n" not in line for line in lines), "a client chooses the id"


def test_an_early_save_counts_no_time_and_an_open_one_nothing() -> None:
    counted = Counted(2)
    early = Save(True, True, 1, 100, arrived_ns=50)
    counted.outcomes.promised("r", {0: Save(True, promised_ns=100)}, {1: early})
    assert counted.counts() == {(1, "kvobs_saves_total", "ok"): 1}
    counted.outcomes.promised("r", {}, {1: early})
    holds = [n for p, n in taken(counted.recorder).counts.items() if locate(p)[0].signal is SAVE_HOLD]
    assert holds == [1], "one, of no length"


@pytest.mark.parametrize(
    ("gain", "counts"),
    [
        (Gain(None, 9, 4), (4, 0, 0, 0, 0)), (Gain(9, 7, 4), (4, 1, 9, 7, 0)), (Gain(7, 9), (0, 1, 7, 9, 1)),
        (Gain(0, 0), (0, 1, 0, 0, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_a_load_counts_with_its_saving_and_its_requests_wait(gain: Gain, counts: tuple[int, ...]) -> None:
    names = ("load_resume_delay_seconds", "estimated_loads_total", "prefill_saved_seconds_total")
    counted = Counted(2)
    counted.outcomes.load_weighed("r", Load(1, 32, True, 1), gain)
    expected = zip((*names, "load_waited_seconds_total", "loads_slower_than_computing_total"), counts, strict=True)
    assert counted.counts() == {(1, f"kvobs_{name}"): n for name, n in expected if n}
