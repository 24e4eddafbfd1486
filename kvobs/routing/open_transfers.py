"""Watch lookups, loads and saves in progress: their number and age, and those stuck because a rank does not report."""

from __future__ import annotations

from collections.abc import Sequence

from kvobs.faults import contained
from kvobs.log import line, log
from kvobs.schema import signals
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import InProgress, Stuck
from kvobs.telemetry.recording.recorder import Recorder, wall_ns

_GAUGES = {
    kind: (signals.slot(signals.IN_FLIGHT, kind), signals.slot(signals.OLDEST_IN_FLIGHT, kind))
    for kind in signals.IN_FLIGHT.labels["kind"]
}
_HELD = {kind: signals.slot(signals.HELD_TOKENS, kind) for kind in signals.HELD_TOKENS.labels["kind"]}
_UNKNOWN_RANK = "unknown"
_NAMED_AT_MOST = 4  # requests in a log line


class OpenTransfers:
    """Watches the ledger's open transfers.

    Args:
        names: the children's names.
        ledger: holds the loads and saves.
        recorder: receives the numbers.
        ranks: number of workers.
        stuck_after_s: time after the first rank's report after which a missing report makes a transfer stuck.
    """

    def __init__(
        self, names: Sequence[str], ledger: Ledger, recorder: Recorder, ranks: int, stuck_after_s: float
    ) -> None:
        self._names = names
        self._ledger = ledger
        self._recorder = recorder
        self._ranks = ranks
        self._stuck_after_s = stuck_after_s

    @contained("record")
    def measure(self, lookups: Sequence[InProgress]) -> None:
        """Set the gauges; ``lookups`` are those that requests wait for, by child."""
        for child in range(len(self._names)):
            loads, saves = self._ledger.in_flight(child)
            for kind, found in (("lookup", lookups[child]), ("load", loads), ("save", saves)):
                in_flight, oldest = _GAUGES[kind]
                self._recorder.set_gauge(child, in_flight, len(found))
                self._recorder.set_gauge(child, oldest, found.oldest_ns)
            self._recorder.set_gauge(child, _HELD["load"], loads.tokens)
            self._recorder.set_gauge(child, _HELD["save"], saves.tokens)

    @contained("record")
    def look_for_stuck(self) -> None:
        """Count and log transfers that have become stuck, each once."""
        before_ns = wall_ns() - int(self._stuck_after_s * 1e9)
        if found := self._ledger.incomplete.take_stuck(before_ns, self._ranks):
            self._note(found)

    @contained("record")
    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Count and log failed loads that are stuck in the aggregation of the workers' outputs.

        For all other transfers the ledger itself knows which ranks have reported.
        """
        load = self._ledger.load(stuck.request)
        if load is not None and load.is_in:
            self._note([(load.child, stuck._replace(kind="load"))])

    def _note(self, found: Sequence[tuple[int, Stuck]]) -> None:
        alike: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
        for child, (kind, request, missing) in found:
            alike.setdefault((child, kind, missing), []).append(request)
            for rank in missing or (_UNKNOWN_RANK,):
                self._recorder.count_open(child, signals.STUCK_TRANSFERS, str(rank))
        for (child, kind, missing), requests in alike.items():
            log.warning(
                "connector %r: %s of %d request%s (%s) stuck: %g s after another rank, not reported by %s. The blocks "
                "stay held until then; counted in kvobs_stuck_transfers_total",
                self._names[child],
                kind,
                len(requests),
                "" if len(requests) == 1 else "s",
                ", ".join(map(line, requests[:_NAMED_AT_MOST])) + (", ..." if len(requests) > _NAMED_AT_MOST else ""),
                self._stuck_after_s,
                f"rank {', '.join(map(str, missing))}" if missing else "all expected ranks",
            )
