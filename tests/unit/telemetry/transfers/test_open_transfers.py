"""Transfers in progress are gauges with an age; late and stuck ones are logged and counted once each."""

from collections.abc import Sequence

import pytest

from kvobs.clock import wall_ns
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import InProgress, ReportKind, Stuck
from kvobs.telemetry.transfers import open_transfers
from kvobs.telemetry.transfers.open_transfers import OpenTransfers
from tests.support.numbers import taken
from tests.support.reports import report

RANKS = 2
TOKENS = 16


def half_loaded(ledger: Ledger, requests: int, expected: int = RANKS) -> None:
    for i in range(requests):
        ledger.propose(f"r{i}", (1, True))
        ledger.admit(f"r{i}", TOKENS, expected)
        ledger.record(report(0, ReportKind.RECEIVED, f"r{i}", 1), now_ns=1)


def watched(
    ledger: Ledger,
    recorder: Recorder,
    stuck_after_s: float = 2.5,
    lookups: Sequence[InProgress[str]] = (),
    ranks: int = RANKS,
) -> OpenTransfers:
    return OpenTransfers(["one", "two"], ledger, lookups, recorder, ranks, stuck_after_s)


@pytest.mark.parametrize(
    ("requests", "named"),
    [(1, "1 request (r0)"), (4, "4 requests (r0, r1, r2, r3)"), (5, "5 requests (r0, r1, r2, r3, ...)")],
)
def test_requests_that_wait_for_ranks_share_a_line(requests: int, named: str, caplog: pytest.LogCaptureFixture) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, requests)
    transfers = watched(ledger, recorder)
    transfers.awaiting_ranks()
    transfers.awaiting_ranks()
    assert [record.getMessage() for record in caplog.records] == [
        f"connector 'two': load of {named} is stuck: 2.5 s after another rank reported it, there is no report from "
        "rank 1. The blocks stay held until it arrives (kvobs_stuck_transfers_total)"
    ]
    assert taken(recorder).opened == [[signals.STUCK_TRANSFERS.name, 1, "1", requests]]


def test_young_transfers_are_not_stuck(caplog: pytest.LogCaptureFixture) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    ledger.propose("r", (0, True))
    ledger.admit("r", 16, RANKS)
    ledger.record(report(0, ReportKind.RECEIVED, "r"), now_ns=wall_ns())
    watched(ledger, recorder, 1000).awaiting_ranks()
    assert caplog.text == ""
    assert taken(recorder).opened == []


def test_without_known_reporters_no_rank_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    transfers = watched(ledger, recorder, 1, ranks=4)
    half_loaded(ledger, 1, expected=2)
    transfers.awaiting_ranks()
    assert "there is no report from all expected ranks" in caplog.text
    assert taken(recorder).opened == [[signals.STUCK_TRANSFERS.name, 1, "unknown", 1]]


def test_a_failed_load_stuck_in_aggregation_is_its_owners(caplog: pytest.LogCaptureFixture) -> None:
    """Of any other load that passes there the ledger knows itself which ranks have reported."""
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 2)
    ledger.fail("r0", 0)
    transfers = watched(ledger, recorder)
    transfers.note_in_aggregator(Stuck("failure", "r0", (0, 1)))
    transfers.note_in_aggregator(Stuck("load", "r1", (1,)))
    transfers.note_in_aggregator(Stuck("save", "nobody's", (1,)))
    (ours,) = (record.getMessage() for record in caplog.records)
    assert ours.startswith("connector 'two': load of 1 request (r0) is stuck: 2.5 s after")
    assert taken(recorder).opened == [[signals.STUCK_TRANSFERS.name, 1, rank, 1] for rank in ("0", "1")]


def test_silent_ranks_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 1)
    for request in ("a", "b", "young"):
        ledger.propose(request, (0, True))
        ledger.admit(request, TOKENS, RANKS, now_ns=10**10 if request == "young" else 0)
    ledger.finish("s", [(1, RANKS)], 2 * 10**9, 100)
    lookups = (InProgress[str](), InProgress[str]())
    lookups[0].begin("l", 0, 5)
    monkeypatch.setattr(open_transfers, "wall_ns", lambda: 11 * 10**9)
    transfers = watched(ledger, recorder, lookups=lookups)
    transfers.awaiting_ranks()  # what it returns is stuck, and not late
    for _ in range(2):
        transfers.measure()
        transfers.log_late()
    assert [record.getMessage() for record in caplog.records] == [
        "connector 'two': load of 1 request (r0) is stuck: 2.5 s after another rank reported it, there is no report "
        "from rank 1. The blocks stay held until it arrives (kvobs_stuck_transfers_total)",
        "connector 'one': lookup of 1 request (l) in progress for 11 s (5 tokens), waiting for the connector's answer",
        "connector 'one': load of 2 requests (a, b) in progress for 11 s (32 tokens), waiting for rank 0, 1",
        "connector 'two': save of 1 request (s) in progress for 9 s (100 tokens), waiting for rank 0, 1",
    ]


def test_a_save_that_is_in_is_not_late(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 1), (1, 1)], 0, TOKENS)
    ledger.settle([report(0, ReportKind.SAVED, "r", 0)], (), 1)
    watched(ledger, Recorder(2), lookups=(InProgress[str](), InProgress[str]())).log_late()
    assert [record.getMessage()[:15] for record in caplog.records] == ["connector 'two'"]


def test_the_gauges_follow_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The begin of the oldest is by this process's monotonic clock."""
    monkeypatch.setattr(open_transfers, "WALL_OFFSET", 5)
    monkeypatch.setattr(open_transfers, "wall_ns", lambda: 10)
    ledger, recorder = Ledger(), Recorder(2)
    half_loaded(ledger, 3)
    lookups = (InProgress[str](), InProgress[str]())
    lookups[1].begin("r9", 7)
    transfers = watched(ledger, recorder, lookups=lookups)
    transfers.measure()
    gauges = {
        signals.slot(signals.IN_FLIGHT, "load"): 3,
        signals.slot(signals.HELD_TOKENS, "load"): 3 * TOKENS,
        signals.slot(signals.IN_FLIGHT, "lookup"): 1,
        signals.slot(signals.OLDEST_IN_FLIGHT, "lookup"): 2,
        signals.slot(signals.OLDEST_IN_FLIGHT, "load"): -5,
    }
    assert taken(recorder).gauges == {signals.word(1, slot): value for slot, value in gauges.items()}
    assert not transfers.changes
    lookups[1].end("r8")  # which was not in
    assert not transfers.changes
    lookups[1].end("r9")
    ledger.finish("r9", [(1, 2)], 8, 100)
    transfers.measure()
    gauges = {
        signals.slot(signals.IN_FLIGHT, "lookup"): 0,
        signals.slot(signals.OLDEST_IN_FLIGHT, "lookup"): 0,
        signals.slot(signals.IN_FLIGHT, "save"): 1,
        signals.slot(signals.OLDEST_IN_FLIGHT, "save"): 3,
        signals.slot(signals.HELD_TOKENS, "save"): 100,
    }
    assert taken(recorder).gauges == {signals.word(1, slot): value for slot, value in gauges.items()}
