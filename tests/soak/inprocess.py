"""The soak in one process: lives of engines of several shapes, one after the other, checked while they run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from random import Random
from threading import Event
from typing import NamedTuple

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from vllm.v1.request import RequestStatus

from tests.soak import memory
from tests.soak.children import Part
from tests.soak.ledger import STUCK_AFTER, Ledger, Series
from tests.soak.plans import Orders, draw, never, silent
from tests.soak.report import Result
from tests.support.observed import BYTES_PER_TOKEN
from tests.support.rig import assert_nothing_is_left, child_config
from tests.support.runners import Overlapping, Running
from tests.support.traced import NOT_SAMPLED, SAMPLED, Traced

EVERY = 2_000
"""Requests after which the engine goes idle, the metrics are compared, and memory is looked at."""

MOODS = ("down", "hanging", "up")
"""Of the collector, in turns of as many requests."""

DROPPED = ("rate", "queue", "export", "malformed")
"""Where spans are dropped between an engine and the collector."""

RANKS = 4
NAMES = ("one", "two", "three")
REPORTERS = (RANKS, RANKS, 1)  # ranks on which each child reports
STEP_S = 0.02
AT_ONCE = 32  # requests
BLOCKS = 112  # so few that requests are preempted
STALLED_AFTER = 1_000  # steps that bring nothing to an end
IDLE_STEPS = 12  # in which the last numbers reach the metrics

BY_LEDGER = {
    *("kvobs_lookups_total", "kvobs_lookup_delay_seconds_count", "kvobs_offered_tokens_total"),
    *("kvobs_admitted_tokens_total", "kvobs_unused_hit_tokens_total", "kvobs_unused_offers_total"),
    *("kvobs_loads_total", "kvobs_load_duration_seconds_count", "kvobs_load_tokens_total", "kvobs_load_bytes_total"),
    *("kvobs_recomputed_tokens_total", "kvobs_failed_sync_loads_total", "kvobs_saves_total"),
    *("kvobs_save_hold_seconds_count", "kvobs_rank_skew_seconds_count", "kvobs_stuck_transfers_total"),
    *("kvobs_stray_reports_total", "kvobs_in_flight", "scripted_things_total", "kvobs_call_duration_seconds_count"),
}
PER_REQUEST = {
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups")
}


class Shape(NamedTuple):
    """How one life's engine is set up."""

    load_policy: str
    failure_policy: str
    running: Running
    traced: bool

    def __str__(self) -> str:
        tracing = "traced" if self.traced else "untraced"
        return f"{self.load_policy}, {self.failure_policy}, {self.running}, {tracing}"


SHAPES = (
    Shape("first", "recompute", Running(ranks=RANKS), traced=False),
    Shape("longest", "recompute", Running(is_v2=True, is_async=True, ranks=RANKS), traced=True),
    Shape("longest", "fail", Running(ranks=RANKS), traced=False),
    Shape("first", "recompute", Running(is_v2=True, is_pipeline=True, ranks=RANKS), traced=True),
)


class MoodyExporter(SpanExporter):
    """A collector's stand-in that is up, down, or hangs; it counts what it takes, and keeps nothing."""

    def __init__(self) -> None:
        self.mood, self.taken = "up", 0
        self._wakes = Event()

    def turn(self, mood: str) -> None:
        self.mood = mood
        if mood == "hanging":
            self._wakes.clear()
        else:
            self._wakes.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.mood == "hanging":
            self._wakes.wait()
        if self.mood == "down":
            return SpanExportResult.FAILURE
        self.taken += len(spans)
        return SpanExportResult.SUCCESS


class Engine(Traced):
    """An engine with its ledger."""

    make_exporter, make_rig = MoodyExporter, Overlapping

    def __init__(self, name: str, shape: Shape, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.ledger = Ledger(RANKS, REPORTERS, BYTES_PER_TOKEN * RANKS)
        parts = [
            Part(f"{name} {i}", finished_count=reporters, ledger=self.ledger, index=i)
            for i, reporters in enumerate(REPORTERS)
        ]
        place = {"kv_connector_module_path": "tests.soak.children"}
        super().__init__(
            patch,
            *parts,
            connectors=[child_config(part, "SoakChild", **place) for part in parts],
            rig={"blocks": BLOCKS, "running": shape.running},
            ranks=RANKS,
            policy=shape.failure_policy,
            names=list(NAMES),
            load_policy=shape.load_policy,
            stuck_after_s=STUCK_AFTER * STEP_S,
            level="requests" if shape.traced else "off",
        )
        scheduler = self.rig.scheduler
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = AT_ONCE
        self.seed, self.shape, self._name = seed, shape, name
        self.added = self.shipped_spans = 0
        self.silent: set[str] = set()  # requests that a child never reports
        self._aborts: defaultdict[int, list[str]] = defaultdict(list)  # by step
        self._steps = 0

    # Requests

    def pin(self) -> None:
        """Send the requests that a child never reports."""
        for child in range(len(NAMES) - 1):
            for plan in silent(RANKS):
                self.ledger.faults["never reported"] += 1
                self.silent.add(self._add(never(child, len(NAMES), plan)))

    def serve(self, requests: int) -> None:
        """Serve this many random requests, and let the engine go idle."""
        last, last_step = self.added + requests, self._steps + STALLED_AFTER + 10 * requests
        while self.added < last:
            self._assert_before(last_step)
            for _ in range(min(self.random.randint(0, 24), AT_ONCE - len(self.ledger.running), last - self.added)):
                self._add(draw(self.random, RANKS, REPORTERS))
            self.step()
        self.drain()

    def drain(self) -> None:
        """Step until only what is silent is left, and all numbers are sent."""
        last_step = self._steps + STALLED_AFTER
        while self.ledger.lives.keys() - self.silent:
            self._assert_before(last_step)
            self.step()
        self.step(IDLE_STEPS)

    def _assert_before(self, last_step: int) -> None:
        left = self.ledger.lives.keys() - self.silent
        assert self._steps < last_step, f"seed {self.seed}: {len(left)} requests never end, such as {sorted(left)[:3]}"

    def _add(self, orders: Orders) -> str:
        request_id = f"{self._name}-{self.added}"
        self.added += 1
        first = self.added if orders.is_alone else self.added % 7
        prompt = [first % 251, first // 251 % 251, *range(3, orders.prompt + 1)]
        headers = SAMPLED if self.shape.traced and self.random.random() < 0.02 else NOT_SAMPLED
        self.ledger.added(request_id, orders)
        self.rig.add(request_id, prompt, orders.max_tokens, headers, soak=orders.plans)
        if orders.abort_after is not None:
            self._aborts[self._steps + orders.abort_after].append(request_id)
        return request_id

    def turn_collector(self, mood: str) -> None:
        if mood != "up":
            self.ledger.faults[f"collector {mood}"] += 1
        self.exporter.turn(mood)

    def export_spans(self) -> None:
        """Let the collector come up and take what waits for it; every span must be accounted for then."""
        self.turn_collector("up")
        if (cutter := self.front.metrics._cutter) is not None:
            cutter._processor.force_flush()
            lost = (self.front.value("kvobs_spans_dropped_total", None, where=place) for place in DROPPED)
            assert self.shipped_spans == self.exporter.taken + sum(map(int, filter(None, lost)))

    def _abort(self, request_id: str) -> None:
        states = {"WAITING_FOR_REMOTE_KVS": "loading", "RUNNING": "running", "gone": ""}
        status = self.rig.status(request_id)
        state = "saving" if status.startswith("FINISHED") else states.get(status, "waiting")
        if state:
            self.ledger.faults[f"abort while {state}"] += 1
        for request in self.rig.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            self.ledger.ended(request.request_id, "abort by the client")

    def step(self, steps: int = 1, seconds: float = STEP_S) -> None:
        for _ in range(steps):
            for request_id in self._aborts.pop(self._steps, ()):
                self._abort(request_id)
            self._steps += 1
            super().step(1, seconds)
            if self.rig.scheduled is not None:
                self.ledger.faults["preemption"] += len(self.rig.scheduled.preempted_req_ids or ())
            for each in self.rig.request_outputs:
                if each.finish_reason is not None:
                    self.ledger.ended(each.request_id, str(each.finish_reason))
            if self.rig.output is not None:  # not if a step is only scheduled
                self.ledger.told_vllm(self.rig.output.finished_recving or (), self.rig.output.finished_sending or ())
            self._deliver()

    def _deliver(self) -> None:
        self.shipped_spans += sum(len(spans) for payload in self.rig.stats for spans in payload["kvobs"]["spans"])
        super()._deliver()

    # What is counted

    def counted(self) -> Counter[Series]:
        """Return what kvobs's metrics say of all that the ledger knows."""
        found: Counter[Series] = Counter()
        for family in self.front.registry.collect():
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "connector")}
                if sample.name in BY_LEDGER and labels.get("hook", "on_new_request") in PER_REQUEST and sample.value:
                    child = NAMES.index(sample.labels["connector"])
                    found[sample.name, child, tuple(labels.values())] = int(sample.value)
        return found

    def differences(self) -> list[str]:
        """Compare the metrics with the ledger, and the books with each other; the engine must be idle."""
        counted, expected = self.counted(), self.ledger.expected + self.ledger.in_flight()
        wrong = [
            f"{series[0]} of {NAMES[series[1]]} {series[2]}: {counted[series]} instead of {expected[series]}"
            for series in sorted(counted.keys() | expected.keys())
            if counted[series] != expected[series]
        ]
        samples = [sample for family in self.front.registry.collect() for sample in family.samples]
        faults = [s for s in samples if s.name == "kvobs_internal_errors_total"]
        return wrong + [f"{s.value:.0f} faults of kvobs's own: {s.labels['where']}" for s in faults if s.value]

    def close(self) -> None:
        """Let all that was silent talk; every block must be free then, and every span accounted for."""
        self.ledger.is_over = True
        self.silent.clear()
        self.drain()
        self.ledger.faults += self.rig.seen
        assert_nothing_is_left(self.rig)
        self._deliver()
        self.export_spans()
        if (cutter := self.front.metrics._cutter) is not None:
            cutter.close()
        for connector in (self.rig.connector, *self.rig.workers):
            connector.shutdown()


def run(
    requests: int, seed: int, show: Callable[[str], None], shapes: Sequence[Shape] = SHAPES, every: int = EVERY
) -> Result:
    """Serve ``requests`` in equal parts by an engine of each shape.

    Raises:
        AssertionError: metrics and ledger differ, or something is left; nothing after that can be trusted.
    """
    result = Result("In process", budget_mib=5)
    with result.measured():
        for i, shape in enumerate(shapes):
            with pytest.MonkeyPatch.context() as patch:
                engine = Engine(f"life{i}", shape, seed + i, patch)
                _live(engine, requests // len(shapes), every, result, show)
            del engine
    return result


def _live(engine: Engine, requests: int, every: int, result: Result, show: Callable[[str], None]) -> None:
    shape = str(engine.shape)
    before, samples = result.requests, result.memory.setdefault(shape, [])
    types: Counter[str] | None = None
    engine.pin()
    for n, served in enumerate(range(0, requests, every)):
        if engine.shape.traced:
            engine.turn_collector(MOODS[n % len(MOODS)])
        engine.serve(min(every, requests - served))
        differ = engine.differences()
        assert not differ, f"{shape}, seed {engine.seed}, after {engine.added} requests:\n" + "\n".join(differ)
        engine.export_spans()  # or what is held depends on the collector's mood
        samples.append(memory.sample(before + engine.added))
        if types is None and samples[-1].requests >= before + memory.WARM * requests:
            types = memory.types()
        held = samples[-1].resident / memory.MIB
        show(f"{shape}: {min(served + every, requests):,} of {requests:,} requests, {held:,.0f} MiB")
    result.grown_types[shape] = memory.grown(types or Counter(), memory.types())
    engine.close()
    differ = engine.differences()
    assert not differ, f"{shape}, seed {engine.seed}, at the end:\n" + "\n".join(differ)
    result.take(engine.ledger)
