"""The soak in one process: lives of engines of several shapes, one after the other, checked while they run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvobs.schema import signals
from tests.soak import memory
from tests.soak.connectors import SILENT_AT_MOST, SoakScheduler, SoakWorker
from tests.soak.ledger import Ledger
from tests.soak.report import Result
from tests.support.observed import BYTES_PER_TOKEN
from tests.support.rig import assert_nothing_is_left
from tests.support.runners import Running
from tests.support.traced import NOT_SAMPLED, SAMPLED, Traced
from tests.transparency import engine
from tests.transparency.connectors import STAGES, Stage
from tests.transparency.life import Character, Life, Plan, draw_plan

EVERY = 2_000
"""Requests after which the engine goes idle, the metrics are compared, and memory is looked at."""

MOODS = ("down", "hanging", "up")
"""Of the collector, in turns of as many requests."""

DROPPED = ("queue", "export")
"""Where spans that were written are dropped, besides those that are missed."""

RANKS = 4
NAMES = ("one", "two", "three")
STEP_S = 0.02
STUCK_AFTER = 50  # steps
STALLED_AFTER = 1_000  # steps that bring nothing to an end
IDLE_STEPS = STUCK_AFTER + 12  # in which what is stuck is noticed

LOADING = Character(
    hits=0.5, asynchronous=0.75, pending=0.1, fails=0.1, offers_again=0.3, promises=0.3, promises_aborted=True,
    slow=0.6, chats=0.1, strays=0.02,
)  # fmt: skip
CONNECTORS = (
    LOADING,
    replace(LOADING, fails=0.0, bad_blocks=0.15, asynchronous=0.6),
    replace(LOADING, one_reports=True, fails=0.15),
)


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


class SoakEngine(engine.Engine):
    """An engine whose requests come in turns, with ids that are used again in each, and connectors that are silent."""

    def __init__(self, stage: Stage, tag: str, is_traced: bool, options: dict[str, Any]) -> None:
        self.ledger: Ledger = stage.run  # type: ignore[assignment]
        self._is_traced = is_traced
        super().__init__(stage, tag, "kvobs", options, at_once=lambda: False)

    def _request(self, plan: Plan, *, resumable: bool) -> Any:
        request = super()._request(plan, resumable=resumable)
        request.trace_headers = SAMPLED if self._is_traced and self._life.happens(0.02, plan.name) else NOT_SAMPLED
        self.ledger.arrived(plan.name)
        return request

    def _abort(self, name: str) -> None:
        request = self.scheduler.requests.get(name)
        if name not in self.ledger.silent:
            is_live = request is not None and not request.is_finished()
            super()._abort(name)
            if is_live:
                self.ledger.ended(name, "abort by the client")

    def step(self) -> Any:
        self.keep_no_room()
        output = super().step()
        for each in self.request_outputs:
            if each.finish_reason is not None:
                self.ledger.ended(each.request_id, str(each.finish_reason))
        if self.output is not None:  # not if a step is only scheduled
            self.ledger.told_vllm(self.output.finished_recving or (), self.output.finished_sending or ())
        loads = self._stage.books.loads  # only of those that are open are the blocks still theirs
        for name in [name for name in loads if name not in self.ledger.awaited]:
            del loads[name]
        return output


class Soak(Traced):
    """An engine with its clock, its API server and its ledger."""

    make_exporter = MoodyExporter

    def __init__(self, name: str, shape: Shape, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.seed, self.shape, self.random = seed, shape, Random(seed)
        self.ledger = ledger = Ledger(
            tuple(1 if connector.one_reports else RANKS for connector in CONNECTORS), BYTES_PER_TOKEN * RANKS
        )
        self.life = life = Life(
            CONNECTORS, (), running=shape.running, seed=seed, policy=shape.failure_policy, blocks=112, most_running=32
        )
        STAGES[name] = stage = Stage(life, ledger, (SoakScheduler, SoakWorker))
        self.make_rig = lambda _router, *, kvobs, **_: SoakEngine(stage, name, shape.traced, kvobs)
        super().__init__(
            patch, connectors=engine.entries_of(life, name), names=list(NAMES), load_policy=shape.load_policy,
            stuck_after_s=STUCK_AFTER * STEP_S, level="requests" if shape.traced else "off",
        )  # fmt: skip
        self.added = 0

    def serve(self, requests: int) -> None:
        """Serve this many random requests, and let the engine go idle."""
        now, names = self.ledger.step, (f"r{i}" for i in range(requests + SILENT_AT_MOST))
        free = [name for name in names if name not in self.ledger.silent][:requests]
        plans = []
        for i, name in enumerate(free):
            plan, arrives = draw_plan(self.random, i), now + i // 12
            aborted = arrives + self.random.randint(0, 120) if self.random.random() < 0.15 else None
            plans.append(replace(plan, name=name, arrives=arrives, aborted=aborted, inputs=(), reads=True))
        life = replace(self.life, seed=self.random.getrandbits(32))  # or an id would mean the same each time
        for router in (self.rig.connector, *self.rig.workers):
            for connector in router._connectors:
                connector.half.life = life
        self.rig.plan(plans)
        self.added += requests
        self.drain(now + STALLED_AFTER + 10 * requests)

    def drain(self, last_step: int) -> None:
        """Step until only what is silent is left, and all that is stuck has been noticed."""
        while left := (self.rig.to_come + sorted(self.ledger.asked.keys() - self.ledger.silent.keys())):
            assert self.ledger.step < last_step, f"seed {self.seed}: {len(left)} requests never end, such as {left[:3]}"
            self.step(seconds=STEP_S)
        self.step(IDLE_STEPS, STEP_S)

    def turn_collector(self, mood: str) -> None:
        if mood != "up":
            self.ledger.seen[f"collector {mood}"] += 1
        self.exporter.turn(mood)

    def export_spans(self) -> None:
        """Let the collector come up and take what waits for it; every span must be accounted for then."""
        self.turn_collector("up")
        if (converter := self.front.shown._converter) is not None:
            self.front.shown.export_spans(is_last=True)
            converter._processor.force_flush()
            totals = self.front.shown._totals.values()
            lost = sum(each._own[signals.slot(signals.SPANS_DROPPED, place)] for each in totals for place in DROPPED)
            missed = sum(each.engine.missed for each in totals)
            assert self.written == self.exporter.taken + lost + missed

    def step(self, steps: int = 1, seconds: float = STEP_S) -> None:
        for _ in range(steps):
            super().step(1, seconds)
            self._deliver()

    @property
    def written(self) -> int:
        """How many spans all processes have written."""
        routers = (self.rig.connector, *self.rig.workers)
        return sum(ring._spans for each in routers for ring in each._telemetry._recorders.page.spans)

    def differences(self) -> list[str]:
        """Compare the metrics with the ledger; the engine must be idle."""
        found: defaultdict[Any, float] = defaultdict(float)
        faults = []
        for sample in (sample for family in self.front.registry.collect() for sample in family.samples):
            labels = {k: v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine", "connector")}
            if "connector" in sample.labels:
                found[sample.name, NAMES.index(sample.labels["connector"]), tuple(labels.values())] = sample.value
            elif sample.name == "kvobs_internal_errors_total" and sample.value:
                faults.append(f"{sample.value:.0f} faults of kvobs's own: {labels['where']}")
        return faults + self.ledger.differences(lambda metric, index, *values: found[metric, index, values])

    def close(self) -> None:
        """Let all that was silent report; every block must be free then, and every span accounted for."""
        self.ledger.is_settled = True
        self.ledger.silent.clear()
        self.drain(self.ledger.step + STALLED_AFTER)
        self.ledger.seen += self.rig.seen
        assert_nothing_is_left(self.rig)
        self._deliver()
        self.export_spans()
        if (converter := self.front.shown._converter) is not None:
            assert self.written, "nothing was traced"
            converter.close()
        self.front.shown.close()
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
                soak = Soak(f"soak{i}", shape, seed + i, patch)
                _live(soak, requests // len(shapes), every, result, show)
            del STAGES[f"soak{i}"], soak
    return result


def _live(soak: Soak, requests: int, every: int, result: Result, show: Callable[[str], None]) -> None:
    shape = str(soak.shape)
    before, samples = result.requests, result.memory.setdefault(shape, [])
    for n, served in enumerate(range(0, requests, every)):
        if soak.shape.traced:
            soak.turn_collector(MOODS[n % len(MOODS)])
        soak.serve(min(every, requests - served))
        differ = soak.differences()
        assert not differ, f"{shape}, seed {soak.seed}, after {soak.added} requests:\n" + "\n".join(differ)
        soak.export_spans()  # or what is held depends on the collector's mood
        samples.append(memory.sample(before + soak.added))
        held = samples[-1].resident / memory.MIB
        show(f"{shape}: {min(served + every, requests):,} of {requests:,} requests, {held:,.0f} MiB")
    soak.close()
    differ = soak.differences()
    assert not differ, f"{shape}, seed {soak.seed}, at the end:\n" + "\n".join(differ)
    result.take(soak.ledger)
