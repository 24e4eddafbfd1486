"""Record loads and saves as numbers and log lines: those in progress, those that are stuck, and how they ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvobs.faults import contained
from kvobs.log import line, log, once
from kvobs.prediction.load_choice import Decision
from kvobs.schema import signals
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import Gain, InProgress, Load, Save, Slowest, Stray, Stuck, named_ranks
from kvobs.telemetry.recording.recorder import Recorder, wall_ns

_LOADS = {
    (mode, outcome): signals.slot(signals.LOADS, mode, outcome)
    for mode in signals.LOADS.labels["mode"]
    for outcome in signals.LOADS.labels["outcome"]
}
_DECISIONS = {
    reason: signals.slot(signals.LOAD_DECISIONS, reason) for reason in signals.LOAD_DECISIONS.labels["reason"]
}
_LOAD_TOKENS = signals.slot(signals.LOAD_TOKENS)
_LOAD_BYTES = signals.slot(signals.LOAD_BYTES)
_RECOMPUTED = signals.slot(signals.RECOMPUTED_TOKENS)
_ABORTED = signals.slot(signals.UNUSED_HIT_TOKENS, "aborted")
_PREFILL_SAVED = signals.slot(signals.PREFILL_SAVED)
_LOAD_WAITED = signals.slot(signals.LOAD_WAITED)
_SLOWER = signals.slot(signals.LOADS_SLOWER)
_SAVED, _ABANDONED = (signals.slot(signals.SAVES, outcome) for outcome in ("ok", "abandoned"))
_FAILED_SYNC = signals.slot(signals.FAILED_SYNC_LOADS)
_GAUGES = {
    kind: (signals.slot(signals.IN_FLIGHT, kind), signals.slot(signals.OLDEST_IN_FLIGHT, kind))
    for kind in signals.IN_FLIGHT.labels["kind"]
}
_HELD = {kind: signals.slot(signals.HELD_TOKENS, kind) for kind in signals.HELD_TOKENS.labels["kind"]}
_UNKNOWN_RANK = "unknown"
_NAMED_AT_MOST = 4  # requests in a log line


class Outcomes(TransferListener):
    """Records the ends of loads and saves as numbers and log lines."""

    def __init__(self, names: Sequence[str], recorder: Recorder) -> None:
        self._names = names
        self._recorder = recorder

    @contained("record")
    def decided(self, request_id: str, decision: Decision) -> None:
        self._recorder.count(decision.about, _DECISIONS[decision.reason])

    @contained("record")
    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        """Record that a request ended while its load was open; the load's later end is not counted.

        With kv_load_failure_policy "fail" a failed load itself ends the request: if its blocks are bad, vLLM ends it
        with an error before it passes on the workers' reports.
        """
        if load.failed or by_error:
            self._failed(load)
        else:
            self._recorder.count(load.child, _LOADS[_mode(load), "aborted"])
            self._recorder.count(load.child, _ABORTED, load.tokens)

    @contained("record")
    def load_ended(self, request_id: str, load: Load) -> None:
        if load.failed:
            if not load.aborted:
                self._failed(load)
            return
        count, mode = self._recorder.count, _mode(load)
        count(load.child, _LOAD_TOKENS, load.tokens)
        count(load.child, _LOAD_BYTES, load.size)
        if load.aborted:  # counted when its request ended
            return
        count(load.child, _LOADS[mode, "ok"])
        self._recorder.observe(load.child, signals.LOAD_DURATION, load.duration_ns, mode)
        self._compare_ranks(load.child, load.slowest, "load")

    def _failed(self, load: Load) -> None:
        self._recorder.count(load.child, _LOADS[_mode(load), "failed"])
        self._recorder.count(load.child, _RECOMPUTED, load.recomputed_tokens)

    @contained("record")
    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        """Record the time that a request waited for its load, and the time saved."""
        if gain.resume_ns is not None:
            self._recorder.observe(load.child, signals.LOAD_RESUME_DELAY, gain.resume_ns)
        if gain.saved_ns is not None:
            self._recorder.count(load.child, _PREFILL_SAVED, gain.saved_ns)
            self._recorder.count(load.child, _LOAD_WAITED, gain.waited_ns)
            self._recorder.count(load.child, _SLOWER, int(gain.is_slower))

    @contained("record")
    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        for child, save in early.items():
            self._saved(child, save, save.promised_ns)

    @contained("record")
    def saved(self, request_id: str, child: int, save: Save, ended_ns: int) -> None:
        if save.is_abandoned:
            self._recorder.count(child, _ABANDONED)
        else:
            self._saved(child, save, ended_ns)

    def _saved(self, child: int, save: Save, ended_ns: int) -> None:
        """Record a save that is done on every rank: its blocks were held from the promise until then."""
        self._recorder.count(child, _SAVED)
        self._recorder.observe(child, signals.SAVE_HOLD, ended_ns - save.promised_ns)
        self._compare_ranks(child, save.slowest, "save")

    def _compare_ranks(self, child: int, slowest: Slowest | None, kind: str) -> None:
        if slowest is not None:
            self._recorder.observe(child, signals.RANK_SKEW, slowest.skew_ns, kind)
            self._recorder.count_open(child, signals.SLOWEST_RANK, str(slowest.rank))

    @contained("record")
    def stray(self, report: Stray) -> None:
        """Count and log a stray report: its child does not own the transfer."""
        self._recorder.count(report.child, signals.slot(signals.STRAY_REPORTS, report.kind))
        name = self._names[report.child]
        once(
            f"stray:{name}:{report.kind}",
            logging.WARNING,
            "connector %r reported a %s of request %s that it does not own. kvobs ignores such reports and counts them "
            "(kvobs_stray_reports_total); with vLLM's own MultiConnector they can end the engine",
            name,
            report.kind,
            line(report.request),
        )

    @contained("record")
    def sync_loads_failed(self, child: int, loads: int, reset: Sequence[str]) -> None:
        """Count failed synchronous loads, and log who may have saved their blocks."""
        self._recorder.count(child, _FAILED_SYNC, loads)
        log.error(
            "a synchronous load of connector %r failed. In the same step other connectors (%s) may have saved its "
            "unfilled blocks, and later hits on these give wrong answers. %s (kvobs_failed_sync_loads_total)",
            self._names[child],
            ", ".join(name for sibling, name in enumerate(self._names) if sibling != child) or "none",
            f"The cache of {', '.join(reset)} was reset (reset_after_failed_sync_load)"
            if reset
            else "No cache was reset: clear theirs, or list them in reset_after_failed_sync_load",
        )


@dataclass(eq=False)
class OpenTransfers:
    """Watches the ledger's open transfers.

    Attributes:
        ranks: the number of workers that report.
        stuck_after_s: time after the first rank's report after which a missing report makes a transfer stuck.
    """

    names: Sequence[str]
    ledger: Ledger
    recorder: Recorder
    ranks: int
    stuck_after_s: float

    @contained("record")
    def measure(self, lookups: Sequence[InProgress]) -> None:
        """Set the gauges; ``lookups`` are those that requests wait for, by child."""
        for child in range(len(self.names)):
            loads, saves = self.ledger.in_flight(child)
            for kind, found in (("lookup", lookups[child]), ("load", loads), ("save", saves)):
                in_flight, oldest = _GAUGES[kind]
                self.recorder.set_gauge(child, in_flight, len(found))
                self.recorder.set_gauge(child, oldest, found.oldest_ns)
            self.recorder.set_gauge(child, _HELD["load"], loads.tokens)
            self.recorder.set_gauge(child, _HELD["save"], saves.tokens)

    @contained("record")
    def look_for_stuck(self) -> None:
        """Count and log transfers that have become stuck, each once."""
        before_ns = wall_ns() - int(self.stuck_after_s * 1e9)
        if found := self.ledger.incomplete.take_stuck(before_ns, self.ranks):
            self._note(found)

    @contained("record")
    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Count and log failed loads that are stuck in the aggregation of the workers' outputs.

        For all other transfers the ledger itself knows which ranks have reported.
        """
        load = self.ledger.load(stuck.request)
        if load is not None and load.is_in:
            self._note([(load.child, stuck._replace(kind="load"))])

    def _note(self, found: Sequence[tuple[int, Stuck]]) -> None:
        alike: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
        for child, (kind, request, missing) in found:
            alike.setdefault((child, kind, missing), []).append(request)
            for rank in missing or (_UNKNOWN_RANK,):
                self.recorder.count_open(child, signals.STUCK_TRANSFERS, str(rank))
        for (child, kind, missing), requests in alike.items():
            log.warning(
                "connector %r: %s of %d request%s (%s) stuck: %g s after another rank, not reported by %s. The blocks "
                "stay held until then; counted in kvobs_stuck_transfers_total",
                self.names[child],
                kind,
                len(requests),
                "" if len(requests) == 1 else "s",
                ", ".join(map(line, requests[:_NAMED_AT_MOST])) + (", ..." if len(requests) > _NAMED_AT_MOST else ""),
                self.stuck_after_s,
                named_ranks(missing),
            )


def _mode(load: Load) -> str:
    return "async" if load.is_async else "sync"
