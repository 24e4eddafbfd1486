"""Count how loads and saves ended, and log what an operator should know of."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvobs import signals
from kvobs.children import Child
from kvobs.ledger import Foreign, Load
from kvobs.notices import log, once
from kvobs.recorder import Recorder

_LOADS = {
    (mode, outcome): signals.slot(signals.LOADS, mode, outcome)
    for mode in signals.LOADS.labels["mode"]
    for outcome in signals.LOADS.labels["outcome"]
}
_LOAD_TOKENS = signals.slot(signals.LOAD_TOKENS)
_SAVED = signals.slot(signals.SAVES, "ok")
_FAILED_SYNC = signals.slot(signals.FAILED_SYNC_LOADS)


class Outcomes:
    """The ends of loads and saves, as counters and log lines."""

    def __init__(self, children: Sequence[Child], recorder: Recorder) -> None:
        self._children = children
        self._recorder = recorder

    def aborted(self, load: Load) -> None:
        """Note that a request ended while its load was open; the load's own end is no outcome any more."""
        self._recorder.count(load.child, _LOADS[_mode(load), "aborted"])

    def loaded(self, load: Load) -> None:
        """Note that a load is over on every rank."""
        if load.aborted:
            return
        self._recorder.count(load.child, _LOADS[_mode(load), "failed" if load.failed else "ok"])
        if not load.failed:
            self._recorder.count(load.child, _LOAD_TOKENS, load.tokens)

    def saved(self, child: int) -> None:
        """Note that a promised save is done on every rank."""
        self._recorder.count(child, _SAVED)

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
            report.request,
        )

    def sync_load_failed(self, child: int) -> None:
        """Reset the siblings' caches: they may have saved blocks that a failed synchronous load left unfilled."""
        self._recorder.count(child, _FAILED_SYNC)
        siblings = [sibling for sibling in self._children if sibling.index != child]
        kept = [sibling.name for sibling in siblings if sibling.connector.reset_cache() is not True]
        log.error(
            "a synchronous load by connector %r failed; its siblings (%s) may have saved the blocks it left unfilled. "
            "Their caches were reset%s",
            self._children[child].name,
            ", ".join(sibling.name for sibling in siblings) or "none",
            f", except of {', '.join(kept)}, which can't be: clear by hand, or later hits are wrong" if kept else "",
        )


def _mode(load: Load) -> str:
    return "async" if load.is_async else "sync"
