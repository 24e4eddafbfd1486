"""Loads and saves count once each: in progress, stuck and at their end; and are logged where an operator must know."""

from typing import Any

import pytest

from kvobs.routing import outcomes
from kvobs.routing.outcomes import OpenTransfers, Outcomes
from kvobs.schema import signals
from kvobs.schema.signals import SAVE_HOLD, SELF_SECONDS, Kind, locate
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Gain, InProgress, Load, Report, ReportKind, Save, Stray, Stuck
from kvobs.telemetry.recording.recorder import Recorder


class Counted:
    def __init__(self, children: int) -> None:
        self.recorder = Recorder(children)
        self.outcomes = Outcomes(["one", "two", "three"][:children], self.recorder)

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


@pytest.mark.parametrize(("outcome", "held"), [("ok", {(0, "kvobs_save_hold_seconds"): 250}), ("abandoned", {})])
def test_a_save_is_held_from_the_promise_to_now_unless_it_is_abandoned(outcome: str, held: dict[Any, int]) -> None:
    counted = Counted(1)
    counted.outcomes.saved("r", 0, Save(True, True, 1, 100, {0: 300}, is_abandoned=outcome == "abandoned"), 350)
    assert counted.counts() == {(0, "kvobs_saves_total", outcome): 1, **held}


@pytest.mark.parametrize("fails", [False, True])
def test_an_aborted_load_counts_as_that_and_what_it_loaded_when_it_arrives(fails: bool) -> None:
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
        counted.outcomes.stray(Stray(1, "load", request))
    counted.outcomes.stray(Stray(1, "save", "x\nINFO forged " + "x" * 10**6))
    assert counted.counts() == {(1, "kvobs_stray_reports_total", kind): n for kind, n in (("load", 2), ("save", 1))}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("connector 'two' reported" in line and "that it does not own" in line for line in lines)
    assert all(len(line) < 1000 and "\n" not in line for line in lines), "a client chooses the id"


def test_a_save_done_before_its_promise_was_held_for_no_time_and_an_open_one_is_not_counted_yet() -> None:
    counted = Counted(2)
    early = Save(True, True, 1, 100, {0: 50})
    counted.outcomes.promised("r", {0: Save(True, promised_ns=100)}, {1: early})
    assert counted.counts() == {(1, "kvobs_saves_total", "ok"): 1}
    counted.outcomes.promised("r", {}, {1: early})
    holds = [n for p, n in counted.recorder.take().counts.items() if locate(p)[0].signal is SAVE_HOLD]
    assert holds == [1], "one, of no length"


@pytest.mark.parametrize(
    ("gain", "counts"),
    [
        (Gain(None, 9, 4), (4, 0, 0, 0)), (Gain(9, 7, 4), (4, 9, 7, 0)), (Gain(7, 9), (0, 7, 9, 1)),
        (Gain(0, 0), (0, 0, 0, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_a_load_counts_with_what_it_saved_and_how_long_its_request_waited(gain: Gain, counts: tuple[int, ...]) -> None:
    names = ("load_resume_delay_seconds", "prefill_saved_seconds_total", "load_waited_seconds_total")
    counted = Counted(2)
    counted.outcomes.load_weighed("r", Load(1, 32, True, 1), gain)
    expected = zip((*names, "loads_slower_than_computing_total"), counts, strict=True)
    assert counted.counts() == {(1, f"kvobs_{name}"): n for name, n in expected if n}


# --- those in progress, and those that are stuck

RANKS = 2
TOKENS = 16


def half_loaded(ledger: Ledger, requests: int, expected: int = RANKS) -> None:
    for i in range(requests):
        ledger.propose(f"r{i}", (1, True))
        ledger.admit(f"r{i}", TOKENS, expected)
        ledger.record(Report(0, ReportKind.RECEIVED, f"r{i}", 1, 0), now_ns=1)


def watched(ledger: Ledger, recorder: Recorder, stuck_after_s: float = 2.5) -> OpenTransfers:
    return OpenTransfers(["one", "two"], ledger, recorder, RANKS, stuck_after_s)


@pytest.mark.parametrize(
    ("requests", "named"),
    [(1, "1 request (r0)"), (4, "4 requests (r0, r1, r2, r3)"), (5, "5 requests (r0, r1, r2, r3, ...)")],
)
def test_requests_that_wait_for_ranks_share_a_line(requests: int, named: str, caplog: pytest.LogCaptureFixture) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, requests)
    transfers = watched(ledger, recorder)
    transfers.look_for_stuck()
    transfers.look_for_stuck()
    assert [record.getMessage() for record in caplog.records] == [
        f"connector 'two': load of {named} stuck: 2.5 s after another rank, not reported by rank 1. The blocks stay "
        "held until then; counted in kvobs_stuck_transfers_total"
    ]
    assert recorder.take().opened == [[signals.STUCK_TRANSFERS.name, 1, "1", requests]]


def test_where_it_is_not_known_who_was_to_report_no_rank_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    transfers = OpenTransfers(["one", "two"], ledger, recorder, 4, 1)
    half_loaded(ledger, 1, expected=2)
    transfers.look_for_stuck()
    assert "not reported by all expected ranks" in caplog.text
    assert recorder.take().opened == [[signals.STUCK_TRANSFERS.name, 1, "unknown", 1]]


def test_a_failed_load_that_is_stuck_in_aggregation_is_its_owners(caplog: pytest.LogCaptureFixture) -> None:
    """Of any other load that passes there the ledger knows itself which ranks have reported."""
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 2)
    ledger.fail("r0", 0)
    transfers = watched(ledger, recorder)
    transfers.note_in_aggregator(Stuck("failure", "r0", (0, 1)))
    transfers.note_in_aggregator(Stuck("load", "r1", (1,)))
    transfers.note_in_aggregator(Stuck("save", "nobody's", (1,)))
    (ours,) = (record.getMessage() for record in caplog.records)
    assert ours.startswith("connector 'two': load of 1 request (r0) stuck: 2.5 s after")
    assert recorder.take().opened == [[signals.STUCK_TRANSFERS.name, 1, rank, 1] for rank in ("0", "1")]


def test_transfer_that_no_rank_reports_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 1)
    for request in ("a", "b", "young"):
        ledger.propose(request, (0, True))
        ledger.admit(request, TOKENS, RANKS, now_ns=10**10 if request == "young" else 0)
    ledger.finish("s", [(1, RANKS)], 2 * 10**9, 100)
    lookups = (InProgress[str](), InProgress[str]())
    lookups[0].begin("l", 0, 5)
    monkeypatch.setattr(outcomes, "wall_ns", lambda: 11 * 10**9)
    transfers = watched(ledger, recorder)
    transfers.look_for_stuck()  # what it returns is forgotten before the gauges are set
    transfers.measure(lookups)
    transfers.measure(lookups)
    assert [record.getMessage() for record in caplog.records] == [
        "connector 'two': load of 1 request (r0) stuck: 2.5 s after another rank, not reported by rank 1. The blocks "
        "stay held until then; counted in kvobs_stuck_transfers_total",
        "connector 'one': lookup of 1 request (l) in progress for 11 s, with 5 tokens: waits for the connector's "
        "answer",
        "connector 'one': load of 2 requests (a, b) in progress for 11 s, with 32 tokens: waits for rank 0, 1",
        "connector 'two': save of 1 request (s) in progress for 9 s, with 100 tokens: waits for rank 0, 1",
    ]


def test_the_gauges_follow_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The begin of the oldest is by this process's monotonic clock."""
    monkeypatch.setattr(outcomes, "WALL_OFFSET", 5)
    monkeypatch.setattr(outcomes, "wall_ns", lambda: 10)
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 3)
    lookups = (InProgress[str](), InProgress[str]())
    lookups[1].begin("r9", 7)
    transfers = watched(ledger, recorder)
    transfers.measure(lookups)
    gauges = {
        signals.slot(signals.IN_FLIGHT, "load"): 3,
        signals.slot(signals.HELD_TOKENS, "load"): 3 * TOKENS,
        signals.slot(signals.IN_FLIGHT, "lookup"): 1,
        signals.slot(signals.OLDEST_IN_FLIGHT, "lookup"): 2,
        signals.slot(signals.OLDEST_IN_FLIGHT, "load"): -5,
    }
    assert recorder.take().gauges == {signals.place(1, slot): value for slot, value in gauges.items()}
    lookups[1].end("r9")
    ledger.finish("r9", [(1, 2)], 8, 100)
    transfers.measure(lookups)
    gauges = {
        signals.slot(signals.IN_FLIGHT, "lookup"): 0,
        signals.slot(signals.OLDEST_IN_FLIGHT, "lookup"): 0,
        signals.slot(signals.IN_FLIGHT, "save"): 1,
        signals.slot(signals.OLDEST_IN_FLIGHT, "save"): 3,
        signals.slot(signals.HELD_TOKENS, "save"): 100,
    }
    assert recorder.take().gauges == {signals.place(1, slot): value for slot, value in gauges.items()}
