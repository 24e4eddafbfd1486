"""What tracing adds to an engine's step of 5 ms, and what a span costs on its way from there to the collector.

A real scheduler and two workers in one process, 50 loads a second of simulated time: 200 spans. The same engine
without tracing, with the spans of requests, and with those of all calls, in turns, step by step. CPU time of the
thread, so that neighbours are not measured; of the two workers, which in truth run side by side, the slower one's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvobs.export.span_export import SpanConverter
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.probe.recorder import CallEvent
from kvobs.schema import signals, spans
from kvobs.state.transfers import Load, LookupResult, Offer
from kvobs.telemetry.tracing.call_spans import CallSpans
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.sampling import TracingSettings, Verdicts
from kvobs.testing import BLOCK, Rig
from tests.bench.calls import BusyConnector, bind_hooks, entries, scaled
from tests.bench.report import Budget, Line, Part
from tests.bench.steps import LASTS_NS, LAYERS, STEP_NS, look_by_its_time, percentile
from tests.support.contexts import no_otel_variables
from tests.support.numbers import numbers
from tests.support.numbers import spans as spans_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from vllm.v1.outputs import ModelRunnerOutput

ROUNDS = 15
STEPS = 400
RANKS = 2
LOAD_EVERY_NS = 20_000_000
SPANS_PER_LOAD = 2 + RANKS  # the lookup, the load, and each rank's part of it
LOADED = 2 * BLOCK
PROMPT_TOKENS, ANSWER_TOKENS = 4 * BLOCK + 1, 12  # about three requests run at a time
ADDED = 0.02  # of the step, at its 95th percentile

CUT_AT_A_TIME = 20  # spans of 100 ms
CUT_ROUNDS = 100

Level = Literal["off", "requests", "calls"]
LEVELS: tuple[Level, ...] = ("off", "requests", "calls")


@dataclass
class Orders(KVConnectorMetadata):
    """The requests that a worker is to load."""

    requests: list[str] = field(default_factory=list)


class Loader(BusyConnector):
    """Offers two blocks of every prompt; they are there in the step after the one in which a worker gets the order."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.orders: list[str] = []
        self.loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if num_computed_tokens else (LOADED, True)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.orders.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self.orders = self.orders, []
        return Orders(orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self.loading = self.loading, set(self._connector_metadata.requests)
        return None, loaded or None


CONNECTORS = (Loader, BusyConnector, BusyConnector)
NAMES = ("near", "far", "farther")


class Engine(Rig):
    """An engine with kvobs, its clients, and how much CPU time its steps take."""

    def __init__(self, level: Level) -> None:
        endpoint = {} if level == "off" else {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        with pytest.MonkeyPatch.context() as patch:
            no_otel_variables(patch, **endpoint)
            options = {"names": list(NAMES), "tracing": {"level": level}}
            super().__init__("kvobs", connectors=entries(CONNECTORS), kvobs=options, ranks=RANKS)
        bind_hooks(self)
        for worker in self.workers:
            worker.wait_for_layer_load = forward(worker)
        self.worked: list[int] = []
        self.steps = self.sent = self.dropped = 0
        self._pages = [router._telemetry._recorders.page for router in (self.connector, *self.workers)]
        for router in (self.connector, *self.workers):
            journal = router._telemetry._recorders.tracer.journal
            journal._clock, journal._since = self._seconds, 0.0

    def _seconds(self) -> float:
        """Return the engine's time."""
        return self.steps * LASTS_NS / 1e9

    def step_ns(self) -> int:
        """Run one step, with a new request where one is due; return its CPU time."""
        self.steps += 1
        look_by_its_time(self, self.steps)
        new = self.request() if self.steps * LASTS_NS % LOAD_EVERY_NS < LASTS_NS else None
        begin = time.thread_time_ns()
        if new is not None:
            self.scheduler.add_request(new)
        self.step()
        spent = time.thread_time_ns() - begin
        worked, self.worked = self.worked, []
        return spent - sum(worked) + max(worked)

    def request(self) -> Request:
        """Return a request of a client who traces it."""
        number = self.steps
        prompt = random.Random(number).choices(range(3, 250), k=PROMPT_TOKENS)
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        name = f"cmpl-{number:032x}-0-{number:08x}"
        return Request(name, prompt, sampling, None, block_hasher=self.hasher, trace_headers=headers)

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> ModelRunnerOutput:
        begin = time.thread_time_ns()
        output = super()._work(worker, scheduled, samples)
        self.worked.append(time.thread_time_ns() - begin)
        return output

    def groups(self) -> Iterator[Any]:
        """Yield the groups of records that were written since the last call."""
        self.dropped = sum(numbers(page).counts.get(_DROPPED, 0) for page in self._pages)
        for page in self._pages:
            for group in spans_of(page):
                self.sent += len(group)
                yield group

    def per_second(self, number: int) -> float:
        """Return how many of these there were in a second of the engine's time."""
        return number / self._seconds()


_DROPPED = signals.slot(signals.SPANS_DROPPED, "rate")


def forward(worker: Any) -> Callable[[str], None]:
    """Return what runs all layers when the rig waits for its only one, but for the last save, which the rig does."""
    wait, save = worker.wait_for_layer_load, worker.save_kv_layer

    def run(_layer: str) -> None:
        wait(LAYERS[0])
        for layer in LAYERS[1:]:
            save(layer, None, None)
            wait(layer)

    return run


def measure(rounds: int = ROUNDS) -> Part:
    return Part("Tracing: a step of 5 ms, 50 loads/s; a span's CPU time", [*_steps(rounds), *_spans()])


def _steps(rounds: int) -> list[Line]:
    engines = {level: Engine(level) for level in LEVELS}
    steps: dict[Level, list[list[int]]] = {level: [] for level in LEVELS}
    for number in range(1 + rounds):
        spent: dict[Level, list[int]] = {level: [] for level in LEVELS}
        for _ in range(STEPS):
            for level in random.sample(LEVELS, len(LEVELS)):
                spent[level].append(engines[level].step_ns())
        for level, engine in engines.items():
            deque(engine.groups(), maxlen=0)
            if number:  # the first is for warming up
                steps[level].append(spent[level])
    for level, engine in engines.items():
        check(level, engine.steps, engine.sent)
    titles = {level: title(level, engine, steps) for level, engine in engines.items()}
    budgets = {"requests": Budget(1 + scaled(ADDED).limit)}
    return [
        compared(f"step, p{percent}, {titles[level]}", percent, steps[level], steps["off"], budget)
        for percent in (95, 99)
        for level in LEVELS[1:]
        for budget in [budgets.get(level) if percent == 95 else None]
    ]


def check(level: Level, steps: int, sent: int) -> None:
    """Raise unless the engine has sent what it should: an idle tracer costs nothing."""
    due = steps * LASTS_NS // LOAD_EVERY_NS * SPANS_PER_LOAD
    if level == "off" and sent:
        raise RuntimeError(f"{sent} spans were sent, and nothing was to be traced")
    if level != "off" and sent < 0.9 * due:
        raise RuntimeError(f"level {level}: {sent} spans were sent, {due} were to be; tracing was hardly measured")


def title(level: Level, engine: Engine, steps: dict[Level, list[list[int]]]) -> str:
    """Return the level, and what it adds to a step on average."""
    means = {name: statistics.median(map(statistics.fmean, steps[name])) for name in ("off", level)}
    added = (means[level] - means["off"]) / 1e3
    return f"{level} ({engine.per_second(engine.sent):.0f} spans/s, mean {added:+.1f} us)"


def compared(
    name: str, percent: int, steps: Sequence[Sequence[int]], baseline: Sequence[Sequence[int]], budget: Budget | None
) -> Line:
    """Compare a percentile of the steps, round by round: the forward's 5 ms, and what was measured around it."""
    ours, theirs = ([(STEP_NS + percentile(spent, percent)) / 1e6 for spent in rounds] for rounds in (steps, baseline))
    return Line(name, "ms", ours, theirs, budget)


class Kept(SpanExporter):
    """Keeps the last batch of spans, and sends nothing."""

    batch: Sequence[ReadableSpan] = ()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batch = spans
        return SpanExportResult.SUCCESS


def _spans() -> list[Line]:
    write_request, write_call = _writing()
    cut, encoded = _cutting()
    both = [one + other for one, other in zip(cut, encoded, strict=True)]
    return [
        Line("writing a record of a request", "us a span", write_request),
        Line("writing a record of a call", "us a span", write_call),
        Line("cutting a span", "us a span", cut),
        Line("cutting and encoding a span", "us a span", both),
    ]


def _writing() -> tuple[list[float], list[float]]:
    """Return what it costs to write a record, in us: of a request's spans, and of a call's."""
    hours = count(step=3600.0)
    page = PageWriter(describe(plain(NAMES), None))
    journal = Journal(page, clock=lambda: next(hours))
    tracing = TracingSettings(True, True, False, 10**9, 10**8, None)
    verdicts = Verdicts()
    traces, calls = Traces(NAMES, journal, tracing, verdicts), CallSpans(NAMES, journal, tracing, verdicts, rank=0)
    numbers = count(1)

    def load() -> int:
        number = next(numbers)
        request: Any = SimpleNamespace(
            request_id=f"cmpl-{number:032x}-0-{number:08x}",
            num_prompt_tokens=LOADED,
            trace_headers={"traceparent": f"00-{number:032x}-{number:016x}-01"},
            kv_transfer_params=None,
        )
        traces.looked_up(request, 1, 2)
        traces.allocated(request, LookupResult([Offer(0, LOADED, True)]), 0, LOADED)
        load = Load(0, LOADED, is_async=True, expected=RANKS, opened_ns=1)
        traces.admitted(request.request_id, load)
        load.arrived, load.arrived_ns = dict.fromkeys(range(RANKS), (3, 2, 1)), 3
        traces.load_ended(request.request_id, load)
        traces.request_ended(request)
        return SPANS_PER_LOAD

    def call() -> int:
        calls.note(CallEvent(0, "start_load_kv", 1, 2, is_slow=False))
        return 1

    def costs(write: Callable[[], int]) -> list[float]:
        found = []
        for _ in range(CUT_ROUNDS):
            begin = time.thread_time_ns()
            records = sum(write() for _ in range(10))
            found.append((time.thread_time_ns() - begin) / records / 1e3)
            assert sum(map(len, spans_of(page))) == records
        return found

    calls.begin_step()
    return costs(load), costs(call)


def _cutting() -> tuple[list[float], list[float]]:
    """Return what it costs to make a span of a record, and to encode it as the exporter does, in us."""
    engine = Engine("requests")
    for _ in range(STEPS):
        engine.step_ns()
    groups = list(engine.groups())
    kept, lost, hours = Kept(), Counter[str](), count(step=3600.0)
    with pytest.MonkeyPatch.context() as patch:
        no_otel_variables(patch)
        attributes = {spans.GEN_AI_MODEL: "tiny"}
        converter = SpanConverter(kept, attributes, lambda where, n: lost.update({where: n}), clock=lambda: next(hours))
    cut, encoded = [], []
    for number in range(CUT_ROUNDS):
        taken: list[Any] = []
        size = 0
        while size < CUT_AT_A_TIME:
            taken.append(groups[(number * CUT_AT_A_TIME + len(taken)) % len(groups)])
            size += len(taken[-1])
        begin = time.thread_time_ns()
        assert len(converter.convert(taken, 0)) == size
        cut.append((time.thread_time_ns() - begin) / size / 1e3)
        converter._processor.force_flush()
        begin = time.thread_time_ns()
        assert encode_spans(kept.batch).SerializeToString()
        encoded.append((time.thread_time_ns() - begin) / size / 1e3)
    converter.close()
    assert not lost
    return cut, encoded
