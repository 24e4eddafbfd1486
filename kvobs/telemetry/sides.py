"""Observe both sides of the router: events for all that record, begin and end of steps, and the stats that are sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvobs import faults
from kvobs.faults import contain, contained
from kvobs.probe.black_box import SINCE, STEPS
from kvobs.probe.increments import Increments
from kvobs.probe.pure import Call
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.config import RESERVED_NAME
from kvobs.state.events import EVENTS, Annotator, ObservedRequest, Observer, Params, WorkerObserver
from kvobs.state.transfers import ReportKind, Stuck, WrongBlocks
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, has_content
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.trace_context import TraceContext
from kvobs.telemetry.transfers.gains import Gains
from kvobs.telemetry.transfers.open_transfers import OpenTransfers
from kvobs.telemetry.verify.sample import BlockSample, NotedBlock, VerifyOrders
from kvobs.telemetry.verify.verifier import Verifier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput

EVERY_NS = 2_000_000_000  # between flushes
SOON_NS = 100_000_000  # the same, where many spans wait


class Composed(Observer):
    """Passes each event to those of the observers that record it, in their order."""

    def __init__(self, observers: Iterable[Observer | None]) -> None:
        self.observers = tuple([each for each in observers if each is not None])
        for event in EVENTS:
            nothing, calls = vars(Observer)[event], list[tuple[Call, bool]]()
            for each in self.observers:
                method = getattr(each, event)
                if getattr(method, "__func__", None) is not nothing:
                    calls.append((method, isinstance(each, Traces)))
            if calls:
                setattr(self, event, partial(_announce, calls))
        self.wants_lookups = "looked_up" in vars(self)


def _announce(calls: Sequence[tuple[Call, bool]], *args: Any, **kwargs: Any) -> None:
    """Make the calls of an event; of each it is known whether it traces."""
    for call, traces in calls:
        try:
            call(*args, **kwargs)
        except Exception:
            if traces:
                contain("trace")
            else:
                contain("record")


class StepNote(NamedTuple):
    """The scheduler's message to the telemetry of all ranks, with a step's metadata."""

    flush: bool  # whether they send their numbers
    trace: TraceContext | None  # the step's own, if every call is traced
    verify: VerifyOrders | None = None


NO_NOTE = StepNote(flush=False, trace=None)


class SchedulerTelemetry(Annotator):
    """Annotates the router's messages, and decides when all ranks send their numbers: on the scheduler's side.

    ``feed`` takes kvobs's own numbers to the exporter, if there is one.
    """

    def __init__(
        self,
        recorders: Recorders,
        collector: Collector,
        gains: Gains,
        open_transfers: OpenTransfers,
        *,
        feed: Sink | None = None,
        sample: BlockSample | None = None,
    ) -> None:
        self._recorders = recorders
        self._collector = collector
        self._gains = gains
        self._open_transfers = open_transfers
        self._feed = feed
        self._sample = sample
        self._words = recorders.recorder.box.words
        self._flush_rule = FlushRule(recorders.journal)
        self._flush_is_due = False

    def of_step(self, output: SchedulerOutput, *, has_forward: bool, has_sync_loads: bool) -> StepNote | None:
        flush, trace, verify = False, None, None
        try:
            if self._recorders.tracer is not None:
                trace = self._recorders.tracer.begin_step()
            now_ns = perf_counter_ns()
            self._gains.step_begun(output, now_ns, loads=has_sync_loads)
            has_finished = bool(output.finished_req_ids)
            flush = self._flush_rule.decide(now_ns, has_forward=has_forward, has_finished=has_finished)
        except Exception:
            contain("flush")
        if self._sample is not None:
            verify = self._sample.orders_of(output)
        return StepNote(flush, trace, verify) if flush or trace is not None or verify is not None else None

    def of_load(self, request_id: str) -> TraceContext | None:
        traces = self._recorders.traces
        return traces.of_load(request_id) if traces is not None else None

    def of_client(self, request: ObservedRequest, params: Params | None) -> Params | None:
        traces, reports = self._recorders.traces, self._recorders.reports
        if traces is not None:
            params = traces.into_params(request.request_id, params) or params
        if reports is not None:
            params = reports.finished(request, params) or params
        if self._sample is not None:
            params = self._sample.into_params(request, params) or params
        return params

    def received(self, stats: KVConnectorStats | None) -> None:
        """Receive the workers' stats of a step; they may have decided to send numbers."""
        self._flush_is_due = stats is not None and self._has_numbers(stats) is True
        if self._feed is not None and self._flush_is_due:
            divert(stats, self._feed)

    @contained("flush")
    def _has_numbers(self, stats: KVConnectorStats) -> bool:
        if not has_content(stats):
            return False
        self._flush_rule.flushed()
        return True

    def collect(self) -> MultiKVConnectorStats | None:
        """Return the stats of this side, if there are any; kvobs's numbers are sent together with the workers'."""
        self._words[STEPS] += 1
        self._gains.step_ended()
        is_due, self._flush_is_due = self._flush_is_due, False
        if is_due:
            self._open_transfers.measure()
            self._gains.flush(goes_on=self._flush_rule.has_forward)
        return self._collector.collect(is_due=is_due)

    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Receive a failed load that is stuck in the aggregation of the workers' outputs."""
        self._open_transfers.note_in_aggregator(stuck)

    def close(self, *, is_well: bool) -> None:
        """Send what was counted since the last flush, and end; ``is_well``: as vLLM asked, and not by an error."""
        if self._recorders.log is not None:
            self._recorders.log.close()
        if self._feed is not None:
            self._gains.flush()
            self._collector.feed(self._feed)
            self._feed.close(is_well=is_well)
        if is_well:
            self._recorders.recorder.box.close()


class WorkerTelemetry(WorkerObserver):
    """Observes the steps of one worker; ``host`` shows its calls where EngineCore is on another host."""

    def __init__(
        self, recorders: Recorders, collector: Collector, verifier: Verifier | None = None, host: Closing | None = None
    ) -> None:
        self._recorders = recorders
        self._host = host
        self._verifier = verifier
        self.wants_reports = verifier is not None
        self.may_refuse = verifier is not None and verifier.refuses
        self._collector = collector
        self._words = recorders.recorder.box.words
        self._note = NO_NOTE

    def step_begun(self, note: StepNote | None, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        self._words[SINCE] = perf_counter_ns()
        self._note = note if note is not None else NO_NOTE
        if self._recorders.tracer is not None:
            self._join_trace(loads)
        if self._verifier is not None:
            self._verifier.step_begun(self._note.verify)

    def reported(self, child: int | None, kind: ReportKind, requests: Collection[str]) -> None:
        if self._verifier is not None:
            self._verifier.reported(child, kind, requests)

    def refused(self, child: int, requests: Collection[str]) -> set[str]:
        return (self._verifier.refused(child, requests) if self._verifier is not None else None) or set()

    def take_notes(self) -> list[WrongBlocks | NotedBlock]:
        return self._verifier.take_notes() if self._verifier is not None else []

    @contained("trace")
    def _join_trace(self, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        """Continue the step's trace, and those of the loads that begin."""
        traces: dict[int, list[TraceContext]] = {}
        for child, trace in loads:
            if trace is not None:
                traces.setdefault(child, []).append(trace)
        if self._recorders.tracer is not None:
            self._recorders.tracer.join_step(self._note.trace, traces)

    def step_ended(self) -> None:
        self._note = NO_NOTE
        if self._verifier is not None:
            self._verifier.step_ended()
        self._words[SINCE] = 0
        self._words[STEPS] += 1

    def collect(self, *, is_idle: bool, has_news: bool) -> MultiKVConnectorStats | None:
        """Return the stats of a step, with kvobs's numbers if the scheduler orders it, or nothing else runs."""
        has_urgent = is_idle and self._recorders.journal.has_urgent
        return self._collector.collect(is_due=self._note.flush or has_news or has_urgent)

    def close(self, *, is_well: bool) -> None:
        """End; ``is_well``: as vLLM asked, and not by an error."""
        if self._host is not None:
            self._host.close(is_well=is_well)
        if is_well:
            self._recorders.recorder.box.close()


class Closing(Protocol):
    """Ends an exporter with the process that runs it."""

    def close(self, *, is_well: bool) -> None:
        """End the exporter, after the last payload; ``is_well``: as vLLM asked, and not by an error."""


class Sink(Closing, Protocol):
    """Receives kvobs's numbers instead of the payload, for the exporter."""

    def put(self, stats: KvobsStats) -> None:
        """Hand over a payload; this never waits."""


@contained("flush")
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

    ``classes`` are the paths of the children's classes as "module:Class", by name. With ``sink`` kvobs's numbers go to
    the exporter instead.
    """

    hooks: Sequence[tuple[str, Callable[[], KVConnectorStats | None]]] = ()
    """The calls for the stats of those children that have any, by name."""

    def __init__(
        self, classes: Mapping[str, str], recorder: Recorder, journal: Journal, sink: Sink | None = None
    ) -> None:
        self._sink = sink
        self.classes = classes
        self._recorder = recorder
        self._journal = journal

    def collect(self, *, is_due: bool) -> MultiKVConnectorStats | None:
        """Return the payload, or None if it would be empty."""
        data: dict[str, KVConnectorStats] = {}
        for name, hook in self.hooks:
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

    @contained("flush")
    def _numbers(self) -> KvobsStats:
        """Take the counters. If that fails, the internal error is still reported."""
        increments = self._taken() or Increments.none()
        for where, n in faults.take().items():
            increments.counts[signals.slot(signals.INTERNAL_ERRORS, where)] = n
        return KvobsStats.of(self.classes, increments)

    @contained("flush")
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
