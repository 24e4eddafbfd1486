"""Loads and saves that are not over: how many, since when, and which of them wait for a rank that does not report."""

from __future__ import annotations

from collections.abc import Sequence

from kvobs import signals
from kvobs.faults import contained
from kvobs.ledger import Ledger
from kvobs.notices import line, log
from kvobs.recorder import Recorder, wall_ns
from kvobs.transfers import Stuck

_GAUGES = tuple(
    (signals.slot(signals.IN_FLIGHT, kind), signals.slot(signals.OLDEST_IN_FLIGHT, kind))
    for kind in signals.IN_FLIGHT.labels["kind"]
)
_UNKNOWN_RANK = "unknown"
_NAMED_AT_MOST = 4  # requests in a log line


class OpenTransfers:
    """Watch what is open in the ledger.

    Args:
        names: the children's names.
        ledger: whose loads and saves.
        recorder: where the numbers go.
        ranks: how many workers there are.
        stuck_after_s: how long a transfer may be reported by one rank and not by another.
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
    def measure(self) -> None:
        """Set the gauges."""
        for child in range(len(self._names)):
            for transfers, (in_flight, oldest) in zip(self._ledger.in_flight(child), _GAUGES, strict=True):
                self._recorder.set_gauge(child, in_flight, len(transfers))
                self._recorder.set_gauge(child, oldest, next(iter(transfers.values()), 0))

    @contained("record")
    def look_for_stuck(self) -> None:
        """Count and log what has become stuck; each once."""
        before_ns = wall_ns() - int(self._stuck_after_s * 1e9)
        if found := self._ledger.halves.take_stuck(before_ns, self._ranks):
            self._note(found)

    @contained("record")
    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Count and log what is stuck in vLLM's aggregation of the workers' outputs, where only failed loads pass."""
        self._note([(self._ledger.owner(stuck.request), stuck._replace(kind="load"))])

    def _note(self, found: Sequence[tuple[int | None, Stuck]]) -> None:
        alike: dict[tuple[int | None, str, tuple[int, ...]], list[str]] = {}
        for child, (kind, request, missing) in found:
            alike.setdefault((child, kind, missing), []).append(request)
            if child is not None:
                for rank in missing or (_UNKNOWN_RANK,):
                    self._recorder.count_open(child, signals.STUCK_TRANSFERS, str(rank))
        for (child, kind, missing), requests in alike.items():
            log.warning(
                "%s: stuck for %g s: the %s of %d request%s (%s), reported by other ranks and not by %s. Their blocks "
                "stay held until it is; counted in kvobs_stuck_transfers_total",
                "aggregation" if child is None else f"connector {self._names[child]!r}",
                self._stuck_after_s,
                kind,
                len(requests),
                "" if len(requests) == 1 else "s",
                ", ".join(map(line, requests[:_NAMED_AT_MOST])) + (", ..." if len(requests) > _NAMED_AT_MOST else ""),
                f"rank {', '.join(map(str, missing))}" if missing else "all that were expected to",
            )
