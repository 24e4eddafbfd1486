"""Watch the transfers in progress: as gauges with their ages, and log lines of those that are late or stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvobs.clock import WALL_OFFSET, wall_ns
from kvobs.faults import contained
from kvobs.log import line, log
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import InProgress, Stuck, named_ranks

_IN_FLIGHT, _OLDEST, _HELD = map(signals.slots, (signals.IN_FLIGHT, signals.OLDEST_IN_FLIGHT, signals.HELD_TOKENS))
_AWAITED = {"lookup": "the connector's answer", "awaiting_schedule": "vLLM's scheduler"}
_SHOWN = {"awaiting_schedule": "scheduling"}  # in the log
_UNKNOWN_RANK = "unknown"
_NAMED_AT_MOST = 4  # requests in a log line


@dataclass(eq=False)
class OpenTransfers(Observer):
    """Watches the ledger's open transfers.

    ``stuck_after_s`` after the first rank's report a missing one makes a transfer stuck; and from this age on something
    in progress is logged that no rank has reported.
    """

    names: Sequence[str]
    ledger: Ledger
    lookups: Sequence[InProgress[str]]  # that requests wait for, by connector
    recorder: Recorder
    ranks: int  # the number of workers that report
    stuck_after_s: float
    changes: set[InProgress[str]] = field(default_factory=set, init=False)
    """Those that have changed since their gauges were set."""
    _kinds: dict[InProgress[str], tuple[int, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for index, waiting in enumerate(self.lookups):
            for kind, found in {"lookup": waiting, **self.ledger.in_flight[index]}.items():
                self._kinds[found] = index, kind
                self.changes |= found.changes
                found.changes = self.changes

    @contained("record")
    def measure(self) -> None:
        """Set the gauges of what has changed."""
        while self.changes:
            found = self.changes.pop()
            (index, kind), n = self._kinds[found], len(found)
            self.recorder.set_gauge(index, _IN_FLIGHT[kind], n)
            self.recorder.set_gauge(index, _OLDEST[kind], found.oldest_ns - WALL_OFFSET if n else 0)
            if kind in _HELD:
                self.recorder.set_gauge(index, _HELD[kind], found.tokens)

    @contained("record")
    def log_late(self) -> None:
        """Log once what waits for long."""
        now_ns = wall_ns()
        before_ns = now_ns - int(self.stuck_after_s * 1e9)
        for found, (index, kind) in self._kinds.items():
            late = found.take_late(before_ns) if found else ()
            # Those that some ranks have reported are stuck.
            if late := [each for each in late if (kind, index, each[0]) not in self.ledger.incomplete]:
                requests, since, tokens = zip(*late, strict=True)
                age_s, awaited = (now_ns - since[0]) / 1e9, _AWAITED.get(kind) or named_ranks(range(self.ranks))
                text = "connector %r: %s of %s in progress for %.0f s (%d tokens), waiting for %s"
                log.warning(
                    text, self.names[index], _SHOWN.get(kind, kind), _listed(requests), age_s, sum(tokens), awaited
                )

    def request_ended(self, request: ObservedRequest) -> None:
        """Set the gauges: a client may leave while the engine makes no step."""
        if self.changes:
            self.measure()

    def awaiting_ranks(self) -> None:
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
            self._note([(load.connector_index, stuck._replace(kind="load"))])

    def _note(self, found: Sequence[tuple[int, Stuck]]) -> None:
        alike: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
        for index, (kind, request, missing) in found:
            alike.setdefault((index, kind, missing), []).append(request)
            for rank in missing or (_UNKNOWN_RANK,):
                self.recorder.count_dynamic(index, signals.STUCK_TRANSFERS, str(rank))
        for (index, kind, missing), requests in alike.items():
            text = (
                "connector %r: %s of %s is stuck: %g s after another rank reported it, there is no report from %s. "
                "The blocks stay held until it arrives (kvobs_stuck_transfers_total)"
            )
            name, ranks = self.names[index], named_ranks(missing)
            log.warning(text, name, kind, _listed(requests), self.stuck_after_s, ranks)


def _listed(requests: Sequence[str]) -> str:
    names = ", ".join(map(line, requests[:_NAMED_AT_MOST])) + (", ..." if len(requests) > _NAMED_AT_MOST else "")
    return f"{len(requests)} request{'' if len(requests) == 1 else 's'} ({names})"
