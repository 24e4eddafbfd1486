"""How loads and saves ended, how long they took and on which rank; what an operator should know of goes to the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvobs import signals
from kvobs.children import Child
from kvobs.faults import contained
from kvobs.notices import line, log, once
from kvobs.recorder import Recorder
from kvobs.reports import Foreign
from kvobs.request_spans import RequestSpans
from kvobs.transfers import Load, Save, Slowest

_LOADS = {
    (mode, outcome): signals.slot(signals.LOADS, mode, outcome)
    for mode in signals.LOADS.labels["mode"]
    for outcome in signals.LOADS.labels["outcome"]
}
_LOAD_TOKENS = signals.slot(signals.LOAD_TOKENS)
_LOAD_BYTES = signals.slot(signals.LOAD_BYTES)
_RECOMPUTED = signals.slot(signals.RECOMPUTED_TOKENS)
_SAVED, _ABANDONED = (signals.slot(signals.SAVES, outcome) for outcome in ("ok", "abandoned"))
_FAILED_SYNC = signals.slot(signals.FAILED_SYNC_LOADS)


class Outcomes:
    """The ends of loads and saves, as numbers and log lines.

    Args:
        children: the children, by position.
        recorder: where the numbers go.
        bytes_per_token: what a token takes in the KV cache, over all ranks.
        spans: what writes the spans of requests, where they are traced.
    """

    def __init__(
        self,
        children: Sequence[Child],
        recorder: Recorder,
        bytes_per_token: float = 0,
        spans: RequestSpans | None = None,
    ) -> None:
        self._children = children
        self._recorder = recorder
        self._bytes_per_token = bytes_per_token
        self._spans = spans

    @contained("record")
    def aborted(self, load: Load, *, by_error: bool = False) -> None:
        """Note that a request ended while its load was open; the load's own end is no outcome any more.

        With kv_load_failure_policy "fail" a failed load is what ends the request. Where its blocks are bad, vLLM ends
        it with an error before it hands on what the workers report.
        """
        if load.failed or by_error:
            self._failed(load)
        else:
            self._recorder.count(load.child, _LOADS[_mode(load), "aborted"])

    @contained("record")
    def loaded(self, load: Load) -> None:
        """Note that a load is over on every rank."""
        size = round(load.tokens * self._bytes_per_token)
        if self._spans is not None:
            self._spans.loaded(load, "failed" if load.failed else "aborted" if load.aborted else "ok", size)
        if load.aborted:
            return
        if load.failed:
            self._failed(load)
            return
        count, mode = self._recorder.count, _mode(load)
        count(load.child, _LOADS[mode, "ok"])
        count(load.child, _LOAD_TOKENS, load.tokens)
        count(load.child, _LOAD_BYTES, size)
        self._recorder.observe(load.child, signals.LOAD_DURATION, load.duration_ns, mode)
        self._compare_ranks(load.child, load.slowest, "load")

    def _failed(self, load: Load) -> None:
        self._recorder.count(load.child, _LOADS[_mode(load), "failed"])
        # Where a rank has lost all of it, what another says of single blocks makes no difference.
        lost = None if load.needs_echo else load.lost_tokens
        self._recorder.count(load.child, _RECOMPUTED, load.tokens if lost is None else lost)

    @contained("record")
    def saved(self, child: int, save: Save, now_ns: int) -> None:
        """Note that a promised save is done on every rank: its blocks were held from the promise until now."""
        if save.is_abandoned:
            self._recorder.count(child, _ABANDONED)
            return
        self._recorder.count(child, _SAVED)
        self._recorder.observe(child, signals.SAVE_HOLD, now_ns - save.promised_ns)
        self._compare_ranks(child, save.slowest, "save")
        if self._spans is not None:
            self._spans.saved(child, save, now_ns)

    def _compare_ranks(self, child: int, slowest: Slowest | None, kind: str) -> None:
        if slowest is not None:
            self._recorder.observe(child, signals.RANK_SKEW, slowest.skew_ns, kind)
            self._recorder.count_open(child, signals.SLOWEST_RANK, str(slowest.rank))

    @contained("record")
    def foreign(self, report: Foreign) -> None:
        """Note a report about something that its child does not own."""
        self._recorder.count(report.child, signals.slot(signals.FOREIGN_REPORTS, report.kind))
        name = self._children[report.child].name
        once(
            f"foreign:{name}:{report.kind}",
            logging.WARNING,
            "connector %r reported a %s of request %s that it does not own. kvobs ignores such reports and counts them "
            "(kvobs_foreign_reports_total); with vLLM's own MultiConnector they can end the engine",
            name,
            report.kind,
            line(report.request),
        )

    def sync_loads_failed(self, child: int, loads: int) -> None:
        """Reset the siblings' caches: they may have saved blocks that failed synchronous loads left unfilled."""
        self._recorder.count(child, _FAILED_SYNC, loads)
        siblings = [sibling for sibling in self._children if sibling.index != child]
        kept = [sibling.name for sibling in siblings if sibling.reset_cache() is not True]
        log.error(
            "a synchronous load by connector %r failed; its siblings (%s) may have saved the blocks it left unfilled. "
            "Their caches were reset%s",
            self._children[child].name,
            ", ".join(sibling.name for sibling in siblings) or "none",
            f", except of {', '.join(kept)}, which can't be: clear by hand, or later hits are wrong" if kept else "",
        )


def _mode(load: Load) -> str:
    return "async" if load.is_async else "sync"
