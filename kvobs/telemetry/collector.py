"""Gather the stats that one process sends: the connectors' own, and kvobs's in the steps in which they are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvobs import faults
from kvobs.probe.increments import Increments
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.config import RESERVED_NAME
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats
from kvobs.telemetry.tracing.journal import Journal

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

EVERY_NS = 2_000_000_000  # between flushes
SOON_NS = 100_000_000  # the same, where many spans wait


class Closing(Protocol):
    """Ends an exporter with the process that runs it."""

    def close(self, *, is_well: bool) -> None:
        """End the exporter, after the last payload; ``is_well``: as vLLM asked, and not by an error."""


class Sink(Closing, Protocol):
    """Receives kvobs's numbers instead of the payload, for the exporter."""

    def put(self, stats: KvobsStats) -> None:
        """Hand over a payload; this never waits."""


@faults.contained("flush")
def divert(stats: KVConnectorStats | None, sink: Sink) -> None:
    """Take the workers' numbers out of their payload, for the exporter; the connectors' own stats stay."""
    numbers = stats.data.get(RESERVED_NAME) if stats is not None else None
    if stats is not None and isinstance(numbers, KvobsStats):
        stats.data[RESERVED_NAME] = KvobsStats.bare(numbers.children)
        if len(stats.data) == 1:
            del stats.data[RESERVED_NAME]
        sink.put(numbers)


class Collector:
    """Collects the payload of one process: the children's own stats, and kvobs's numbers when they are due.

    ``classes`` are the paths of the children's classes as "module:Class", by name; ``hooks`` the calls for the stats of
    those that have any. With ``sink`` kvobs's numbers go to the exporter instead.
    """

    def __init__(
        self,
        classes: Mapping[str, str],
        hooks: Sequence[tuple[str, Callable[[], KVConnectorStats | None]]],
        recorder: Recorder,
        journal: Journal,
        sink: Sink | None = None,
    ) -> None:
        self._sink = sink
        self._hooks = hooks
        self.classes = classes
        self._recorder = recorder
        self._journal = journal

    def collect(self, *, is_due: bool) -> MultiKVConnectorStats | None:
        """Return the payload, or None if it would be empty."""
        data: dict[str, KVConnectorStats] = {}
        for name, hook in self._hooks:
            if (stats := hook()) is not None:
                data[name] = stats
        if self._sink is not None and is_due:
            self.feed(self._sink)
            is_due = False
        if not data and not is_due:
            return None
        if (numbers := self._numbers() if is_due else KvobsStats.bare(self.classes)) is not None:
            data[RESERVED_NAME] = numbers
        return MultiKVConnectorStats(data=data) if data else None

    def feed(self, sink: Sink) -> None:
        """Pass kvobs's numbers on to the exporter."""
        if (numbers := self._numbers()) is not None:
            sink.put(numbers)

    @faults.contained("flush")
    def _numbers(self) -> KvobsStats:
        """Take the counters. If that fails, the internal error is still reported."""
        increments = self._taken() or Increments.none()
        for where, n in faults.take().items():
            increments.counts[signals.slot(signals.INTERNAL_ERRORS, where)] = n
        return KvobsStats.of(self.classes, increments)

    @faults.contained("flush")
    def _taken(self) -> Increments:
        spans, counted = self._journal.take()
        for slot, n in counted.items():
            self._recorder.count(None, slot, n)
        return self._recorder.take()._replace(spans=spans)


@dataclass(slots=True)
class FlushRule:
    """The scheduler's decision for each step, for all ranks: whether they send their numbers.

    An idle engine has no steps, so the last steps of a burst must send everything. Numbers are sent:

        every two seconds of work: more often, it would be in the 99th percentile of steps of 5 ms, since what it leaves
            to EngineCore makes another step longer, too
        after 100 ms, if half of the places for spans are taken
        in a step without a forward that passes on finished requests: vLLM runs one after the last request of a burst
        in a step without a forward in which a worker has something to report (the worker decides): a transfer that
        ended while nothing else runs; not a load whose request continues with a forward

    After the end of a burst this time begins with the next work, so that the next request's first token does not wait
    for a flush.
    """

    journal: Journal
    last_ns: int = -EVERY_NS
    is_flushed: bool = False
    """Whether everything before the next step has been sent."""
    has_forward: bool = False
    """Whether the last built step has a forward."""

    def decide(self, now_ns: int, *, has_forward: bool, has_finished: bool) -> bool:
        """Return whether all ranks flush in the step that is being built; ``now_ns`` is a monotonic time."""
        if self.is_flushed:
            self.last_ns = now_ns
        elapsed_ns = now_ns - self.last_ns
        is_due = elapsed_ns >= EVERY_NS or (elapsed_ns >= SOON_NS and self.journal.is_half_full)
        is_due = is_due or (has_finished and not has_forward)
        if is_due:
            self.last_ns = now_ns
        # A forward may itself take longer than that: its numbers are sent by the step after it.
        self.is_flushed = is_due and not has_forward
        self.has_forward = has_forward
        return is_due

    def flushed(self) -> None:
        """Note that the workers sent numbers, possibly by their own decision."""
        self.is_flushed = not self.has_forward
