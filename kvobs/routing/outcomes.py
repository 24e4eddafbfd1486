"""Record loads and saves as numbers and log lines: those in progress, those that are stuck, and how they ended."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from kvobs.clock import WALL_OFFSET, wall_ns
from kvobs.faults import contained
from kvobs.log import line, log, once
from kvobs.prediction.load_choice import Decision
from kvobs.schema import signals
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import Gain, InProgress, Load, Save, Slowest, Stray, Stuck, named_ranks
from kvobs.telemetry.recording.recorder import Recorder

_LOADS = {labels: signals.slot(signals.LOADS, *labels) for labels in product(*signals.LOADS.labels.values())}
_DECISIONS = {why: signals.slot(signals.LOAD_DECISIONS, why) for why in signals.LOAD_DECISIONS.labels["reason"]}
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
_AWAITED = {"lookup": "the connector's answer", "resume": "vLLM's scheduler"}
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
        name, kind = self._names[report.child], report.kind
        text = (
            "connector %r reported a %s of request %s that it does not own. kvobs ignores such reports and counts "
            "them (kvobs_stray_reports_total); with vLLM's own MultiConnector they can end the engine"
        )
        once(f"stray:{name}:{kind}", logging.WARNING, text, name, kind, line(report.request))

    @contained("record")
    def sync_loads_failed(self, child: int, loads: int, reset: Sequence[str]) -> None:
        """Count failed synchronous loads, and log who may have saved their blocks."""
        self._recorder.count(child, _FAILED_SYNC, loads)
        siblings = ", ".join(name for sibling, name in enumerate(self._names) if sibling != child) or "none"
        caches = "No cache was reset: clear theirs, or list them in reset_after_failed_sync_load"
        if reset:
            caches = f"The cache of {', '.join(reset)} was reset (reset_after_failed_sync_load)"
        text = (
            "a synchronous load of connector %r failed. In the same step other connectors (%s) may have saved its "
            "unfilled blocks, and later hits on these give wrong answers. %s (kvobs_failed_sync_loads_total)"
        )
        log.error(text, self._names[child], siblings, caches)


@dataclass(eq=False)
class OpenTransfers:
    """Watches the ledger's open transfers.

    ``stuck_after_s`` after the first rank's report a missing one makes a transfer stuck; and from this age on something
    in progress is logged that no rank has reported.
    """

    names: Sequence[str]
    ledger: Ledger
    recorder: Recorder
    ranks: int  # the number of workers that report
    stuck_after_s: float
    _shown: set[tuple[int, str]] = field(default_factory=set, init=False)

    @contained("record")
    def measure(self, lookups: Sequence[InProgress[str]]) -> None:
        """Set the gauges, and log once what waits for long; ``lookups`` are those that requests wait for, by child."""
        now_ns = wall_ns()
        before_ns = now_ns - int(self.stuck_after_s * 1e9)
        for child, waiting in enumerate(lookups):
            kinds = {"lookup": waiting, **self.ledger.in_flight[child]}
            for kind, found in kinds.items() if self._shown or any(kinds.values()) else ():
                n = len(found)
                if not n and (child, kind) not in self._shown:  # as most
                    continue
                (self._shown.add if n else self._shown.discard)((child, kind))
                in_flight, oldest = _GAUGES[kind]
                self.recorder.set_gauge(child, in_flight, n)
                self.recorder.set_gauge(child, oldest, found.oldest_ns - WALL_OFFSET if n else 0)
                if kind in _HELD:
                    self.recorder.set_gauge(child, _HELD[kind], found.tokens)
                late = found.take_late(before_ns)
                # Those that some ranks have reported are stuck.
                if late := [each for each in late if (kind, child, each[0]) not in self.ledger.incomplete]:
                    requests, since, tokens = zip(*late, strict=True)
                    age_s, awaited = (now_ns - since[0]) / 1e9, _AWAITED.get(kind) or named_ranks(range(self.ranks))
                    text = "connector %r: %s of %s in progress for %.0f s, with %d tokens: waits for %s"
                    log.warning(text, self.names[child], kind, _listed(requests), age_s, sum(tokens), awaited)

    @contained("record")
    def look_for_stuck(self) -> None:
        """Count and log transfers that have become stuck, each once."""
        before_ns = wall_ns() - int(self.stuck_after_s * 1e9)
        if found := self.ledger.take_stuck(before_ns, self.ranks):
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
            text = (
                "connector %r: %s of %s stuck: %g s after another rank, not reported by %s. The blocks stay held "
                "until then; counted in kvobs_stuck_transfers_total"
            )
            name, ranks = self.names[child], named_ranks(missing)
            log.warning(text, name, kind, _listed(requests), self.stuck_after_s, ranks)


def _listed(requests: Sequence[str]) -> str:
    names = ", ".join(map(line, requests[:_NAMED_AT_MOST])) + (", ..." if len(requests) > _NAMED_AT_MOST else "")
    return f"{len(requests)} request{'' if len(requests) == 1 else 's'} ({names})"


def _mode(load: Load) -> str:
    return "async" if load.is_async else "sync"
