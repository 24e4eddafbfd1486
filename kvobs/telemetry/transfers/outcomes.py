"""Record how loads and saves ended, and which connectors are in quarantine, as numbers and log lines."""

import logging
from collections.abc import Mapping, Sequence
from itertools import product

from kvobs.log import line, log, once
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import Gain, Load, Save, Slowest, UnexpectedReport
from kvobs.telemetry.events import TelemetryObserver

_LOADS = {labels: signals.slot(signals.LOADS, *labels) for labels in product(*signals.LOADS.labels.values())}
_DURATIONS = signals.slots(signals.LOAD_DURATION)
_DURATION_SUM = signals.LOAD_DURATION.sum_offset
_LOAD_TOKENS = signals.slot(signals.LOAD_TOKENS)
_LOAD_BYTES = signals.slot(signals.LOAD_BYTES)
_RECOMPUTED = signals.slot(signals.RECOMPUTED_TOKENS)
_ABORTED = signals.slot(signals.UNUSED_HIT_TOKENS, "aborted")
_PREFILL_SAVED = signals.slot(signals.PREFILL_SAVED)
_LOAD_WAITED = signals.slot(signals.LOAD_WAITED)
_ESTIMATED = signals.slot(signals.ESTIMATED_LOADS)
_SLOWER = signals.slot(signals.LOADS_SLOWER)
_SAVED, _ABANDONED = (signals.slot(signals.SAVES, outcome) for outcome in ("ok", "abandoned"))
_FAILED_SYNC = signals.slot(signals.FAILED_SYNC_LOADS)
_UNEXPECTED = {
    kind: f"connector %r reported {what} of request %s, which it was not chosen to {deed}. {effect}. Such reports are "
    "counted (kvobs_unexpected_reports_total)"
    for kind, what, deed, effect in (
        (
            "load",
            "the end of a load",
            "load",
            "kvobs ignores the report; vLLM's own MultiConnector can crash the engine here",
        ),
        (
            "save",
            "the end of a save",
            "save",
            "kvobs ignores the report; vLLM's own MultiConnector can crash the engine here",
        ),
        ("failure", "a failed load", "load", "If a load of this request is open, it counts as failed"),
        ("blocks", "bad blocks in a load", "load", "That load counts as failed, and vLLM handles the blocks"),
    )
}
_QUARANTINED, _QUARANTINES = map(signals.slot, (signals.QUARANTINED, signals.QUARANTINES))


class Outcomes(TelemetryObserver):
    """Records the ends of loads and saves, and quarantines."""

    def __init__(self, names: Sequence[str], recorder: Recorder) -> None:
        self._names = names
        self._recorder = recorder

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        """Record that a request ended while its load was open; the load's later end is not counted.

        With kv_load_failure_policy "fail" a failed load itself ends the request: if its blocks are bad, vLLM ends it
        with an error before it passes on the workers' reports.
        """
        if load.failed or by_error:
            self._failed(load)
        else:
            self._recorder.count(load.connector_index, _LOADS[_mode(load), "aborted"])
            self._recorder.count(load.connector_index, _ABORTED, load.tokens)

    def load_ended(self, request_id: str, load: Load) -> None:
        if load.failed:
            if not load.aborted:
                self._failed(load)
            return
        moved = (_LOAD_TOKENS, load.tokens), (_LOAD_BYTES, load.size)
        if load.aborted:  # counted when its request ended
            self._recorder.count_all(load.connector_index, *moved)
            return
        mode, ns = _mode(load), max(0, load.duration_ns)
        durations = _DURATIONS[mode]
        observed = (durations + signals.LOAD_DURATION.bucket(ns), 1), (durations + _DURATION_SUM, ns)
        self._recorder.count_all(load.connector_index, *moved, (_LOADS[mode, "ok"], 1), *observed)
        self._compare_ranks(load.connector_index, load.slowest, "load")

    def _failed(self, load: Load) -> None:
        self._recorder.count(load.connector_index, _LOADS[_mode(load), "failed"])
        self._recorder.count(load.connector_index, _RECOMPUTED, load.recomputed_tokens)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        """Record the time that a request waited for its load, and the time saved."""
        if gain.resume_ns is not None:
            self._recorder.observe(load.connector_index, signals.LOAD_RESUME_DELAY, gain.resume_ns)
        if gain.saved_ns is not None:
            self._recorder.count(load.connector_index, _ESTIMATED)
            self._recorder.count(load.connector_index, _PREFILL_SAVED, gain.saved_ns)
            self._recorder.count(load.connector_index, _LOAD_WAITED, gain.waited_ns)
            self._recorder.count(load.connector_index, _SLOWER, int(gain.is_slower))

    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        for index, save in early.items():
            self._saved(index, save, save.promised_ns)

    def saved(self, request_id: str, index: int, save: Save, ended_ns: int) -> None:
        if save.is_abandoned:
            self._recorder.count(index, _ABANDONED)
        else:
            self._saved(index, save, ended_ns)

    def _saved(self, index: int, save: Save, ended_ns: int) -> None:
        """Record a save that is done on every rank: its blocks were held from the promise until then."""
        self._recorder.count(index, _SAVED)
        self._recorder.observe(index, signals.SAVE_HOLD, ended_ns - save.promised_ns)
        self._compare_ranks(index, save.slowest, "save")

    def _compare_ranks(self, index: int, slowest: Slowest | None, kind: str) -> None:
        if slowest is not None:
            self._recorder.observe(index, signals.RANK_SKEW, slowest.skew_ns, kind)
            self._recorder.count_dynamic(index, signals.SLOWEST_RANK, str(slowest.rank))

    def unexpected(self, report: UnexpectedReport) -> None:
        """Count and log an unexpected report: its connector does not own the transfer."""
        self._recorder.count(report.connector_index, signals.slot(signals.UNEXPECTED_REPORTS, report.kind))
        name, kind = self._names[report.connector_index], report.kind
        once(f"unexpected:{name}:{kind}", logging.WARNING, _UNEXPECTED[kind], name, line(report.request))

    def sync_loads_failed(self, index: int, loads: Sequence[Load]) -> None:
        """Count failed synchronous loads; log which connectors reported the failure, and which may have saved it."""
        self._recorder.count(index, _FAILED_SYNC, len(loads))
        blamed_by = sorted({connector for load in loads for connector in load.blamed_by})
        reporters = ", ".join(repr(self._names[connector]) for connector in blamed_by)
        why = f": connector {reporters} reported the failure, and may have written into its blocks" if reporters else ""
        siblings = ", ".join(name for sibling, name in enumerate(self._names) if sibling != index) or "none"
        text = (
            "a synchronous load of connector %r failed%s. Other connectors (%s) may have saved its unfilled blocks "
            "in the same step, and later hits on these blocks give wrong answers. Clear the caches of these "
            "connectors (kvobs_failed_sync_loads_total)"
        )
        log.error(text, self._names[index], why, siblings)

    def quarantined(self, index: int) -> None:
        self._recorder.set_gauge(index, _QUARANTINED, 1)
        self._recorder.count(index, _QUARANTINES)

    def readmitted(self, index: int) -> None:
        self._recorder.set_gauge(index, _QUARANTINED, 0)


def _mode(load: Load) -> str:
    return "async" if load.is_async else "sync"
