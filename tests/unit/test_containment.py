"""Faults in every seam of the telemetry: vLLM and the connectors see what they see without them."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, get_ident
from types import FrameType
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

from kvobs import faults
from kvobs.schema.signals import INTERNAL_ERRORS
from kvobs.state.transfers import Stuck
from kvobs.testing import BLOCK, Script
from kvobs.testing.scripted import SCRIPTS
from tests.support import seams
from tests.support.contained import contain
from tests.support.rig import entry_for
from tests.support.scripted import Stats
from tests.support.seams import Breaker, Writes, jumping, replace_clock
from tests.support.traced import SAMPLED, Traced

pytestmark = pytest.mark.usefixtures("in_production")

KV, SYNC = (2 * BLOCK, True), (2 * BLOCK, False)
AT_START = {
    "page.files:reported", "page.previous:noted", "telemetry.recorders:_trace", "telemetry.recorders:_report",
}  # fmt: skip
"""Seams that are passed once, while the objects are made."""
OF_STARTER = sorted(seam for seam in seams.find() if seam.startswith("export.starter:"))
"""Seams of a thread of EngineCore that starts the exporter; those of its own process can't reach an engine."""
OPTIONS: dict[str, Any] = {
    "request_report": True, "load_policy": "longest", "level": "calls",
    "tracing": {"propagate": True}, "slow_call_ms": 1e-6,
    "stuck_after_s": 0.5, "verify": {"sample_ratio": 1.0, "on_mismatch": "recompute"},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _request_log(tmp_path_factory: pytest.TempPathFactory) -> None:
    OPTIONS["request_log"] = str(tmp_path_factory.mktemp("of") / "requests")


class Late(dict[int, Callable[[], list[int]]]):
    """Bad blocks, by rank, of a load that has not begun when a test names them."""

    def pop(self, rank: int, default: set[int]) -> set[int]:  # type: ignore[override]
        return set(super().pop(rank)()) if rank in self else default


class Story:
    """An engine with two ranks to which all happens that telemetry reports, and what vLLM and the connectors saw."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        SCRIPTS.clear()
        self.one, self.two = Script("a"), Script("b")
        self.one.offers |= dict.fromkeys(("load", "aborted", "failed", "holed", "late"), KV)
        self.two.offers |= {"sync": SYNC, "pending": [(None, False), SYNC]}
        self.one.promises = {"saved", "sync"}
        self.one.params = {"saved": {"key": 1}}
        self.one.answers["take_events"] = (BlockRemoved([1], "cpu"),)
        self.seen: list[Any] = []
        connectors = [entry_for(self.one, "SummedConnector"), entry_for(self.two)]
        self.engine = Traced(patch, self.one, self.two, connectors=connectors, **OPTIONS)
        self.rig = self.engine.rig

    def happen(self) -> list[Any]:
        for request in ("load", "sync", "saved", "failed", "holed", "aborted", "pending", "late"):
            self.rig.add(request, trace_headers=SAMPLED)
        self._step(3)
        self.one.say(0, received="load late", failed="failed", saved="stranger")
        self._step()
        self.rig.abort("aborted")
        self.one.say(1, received="load aborted holed", failed="failed")
        self.one.bad_blocks = {1: set(self._blocks("holed"))}
        self.one.stats = [Stats(data={"n": n}) for n in (1, 2)]
        self._step(2)
        self.one.say(0, received="aborted holed", saved="saved sync")
        self._step(4)
        self.one.say(1, received="late", saved="saved sync")
        self._step(4)
        self.two.offers["torn"] = SYNC
        self.two.bad_blocks = Late({1: lambda: self._blocks("torn")[:2]})  # type: ignore[assignment]
        self.rig.add("torn", trace_headers=SAMPLED)
        self._step(4)
        assert self.rig.scheduler.requests == {}
        assert self.rig.free_blocks == self.rig.scheduler.kv_cache_config.num_blocks - 1
        self._copy_blocks()
        self._fail()
        self.rig.connector.shutdown()  # of the request log and the exporter, too
        calls = [[(hook, _plain(detail)) for hook, detail in script.calls] for script in (self.one, self.two)]
        return [*self.seen, *calls]

    def _step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.engine.step()
            live = {
                name: (request.status.name, list(request.output_token_ids), request.num_computed_tokens)
                for name, request in self.rig.scheduler.requests.items()
            }
            output: Any = self.rig.output
            self.seen.append((live, self.rig.free_blocks, output.finished_recving, output.finished_sending))
            self._tell()

    def _tell(self) -> None:
        """Do what vLLM's log and API server do with the connectors' stats."""
        for payload in self.rig.stats:
            built = type(self.rig.connector).build_kv_connector_stats(payload)
            built.aggregate(type(self.rig.connector).build_kv_connector_stats(payload))
            if not built.is_empty():
                built.reduce()
        self.engine._deliver()
        self._serve()

    def _serve(self) -> None:
        """Do what kvobs's threads do with the pages."""
        self.engine.front.export_spans()
        self.engine.front.shown.look()

    def _blocks(self, request: str) -> list[int]:
        (blocks,) = self.rig.scheduler.kv_cache_manager.get_block_ids(request)
        return list(blocks)

    def _copy_blocks(self) -> None:
        caches, buffers = {"layer.0": torch.arange(8).reshape(4, 2)}, {"layer.0": torch.zeros(4, 2, dtype=torch.int64)}
        worker = self.rig.workers[0]
        worker.set_host_xfer_buffer_ops(copy_kv_blocks)
        worker._connectors[0].copy_blocks(caches, buffers, [1], [2], "d2h")
        self.seen.append(buffers["layer.0"].tolist())

    def _fail(self) -> None:
        """Let connectors raise where it reaches vLLM, and be stuck in vLLM's own aggregation."""
        self.two.raises = {"reset_cache": TimeoutError("cache")}
        with pytest.raises(TimeoutError, match="cache"):
            self.rig.connector.reset_cache()
        self.rig.aggregator._report_stuck(Stuck("failure", "load", (1,)))
        self.two.raises = {"wait_for_layer_load": TimeoutError("layer")}
        with pytest.raises(TimeoutError, match="layer"):
            self.rig.workers[0].wait_for_layer_load("layer.0")
        self.two.raises = {}

    def faults(self) -> set[str]:
        """Return the places whose faults are on /metrics."""
        return {where for (where,) in self.engine.series("kvobs_internal_errors_total")}


def _plain(detail: Any) -> str:
    """Return it in a form that compares; the addresses of objects are none of it."""
    return "" if " object at " in str(detail) else str(detail)


@contextmanager
def instrumented(point: seams.Point) -> Iterator[None]:
    undo = seams.instrument(point)
    try:
        yield
    finally:
        undo()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        contain(patch)
        return Story(patch).happen()


def test_the_story_is_the_same_and_passes_each_seam(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    passed: set[str] = set()
    with instrumented(lambda seam, _: passed.add(seam)):
        assert Story(monkeypatch).happen() == expected
    assert {seam for seam in passed if not seam.startswith(OF_THREADS)} == _of_story()
    assert len(_of_story()) == 90, "a module that moves keeps its seams"
    assert faults.take() == {}


OF_THREADS = ("export.", "probe.pauses:")
"""What serves metrics and spans, in the exporter's process or in threads of the API server, and what starts it."""


OF_OTHER_STORIES = (
    "telemetry.tracing.urgent_loads:",  # where nothing is traced
    "telemetry.requests.request_reports:Reports.noted",
    "telemetry.tracing.request_traces:Traces.noted",
    "telemetry.verify.sample:BlockSample.noted",
    "telemetry.transfers.first_requests:",
    "telemetry.transfers.peers:",
    "telemetry.transfers.outcomes:Outcomes.quarantined",
    "telemetry.transfers.outcomes:Outcomes.readmitted",
    "telemetry.transfers.offers:OfferCounts.lapsed",
    "telemetry.transfers.load_warnings:SyncLoadWarnings.",
    "telemetry.payload.stats:_by_class",  # of vLLM's Rust front end
)
"""Seams that this story does not pass. ``Composed`` contains observers of events that it lacks as all others."""


def _of_story() -> set[str]:
    return {seam for seam in seams.find() if not seam.startswith((*OF_THREADS, *OF_OTHER_STORIES))}


@pytest.mark.parametrize("seam", OF_STARTER)
def test_a_fault_of_what_starts_the_exporter_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, expected: list[Any], seam: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(OPTIONS, "exporter", {})
    monkeypatch.setattr("kvobs.export.starter.start", lambda *_: None)
    breaker, is_reached = Breaker(lambda one, _number: one == seam, sys.maxsize), Event()

    def point(one: str, number: int) -> None:
        if one == seam and number == seams.LEFT:
            is_reached.set()
        breaker(one, number)

    with instrumented(point):
        assert Story(monkeypatch).happen() == expected
        assert is_reached.wait(60)
    assert breaker.hit == {seam}
    assert "internal error in kvobs's telemetry (export)" in caplog.text
    faults.take()


@pytest.mark.parametrize("every", [1, 2, 7])
def test_faults_in_all_seams_change_nothing(monkeypatch: pytest.MonkeyPatch, expected: list[Any], every: int) -> None:
    breaker = Breaker(lambda _seam, _number: True, every)
    with instrumented(breaker):
        assert Story(monkeypatch).happen() == expected
    assert breaker.hit >= AT_START
    assert len(breaker.hit) > 20


def test_a_fault_in_each_seam_is_contained_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Once when each is left: at its begin it would keep the seams within it from being reached."""
    of_story = _of_story()
    places = {seam: where for seam, where in seams.find().items() if seam in of_story}
    breaker = Breaker(lambda seam, number: number == seams.LEFT and seam in set(places) - AT_START, sys.maxsize)
    with instrumented(breaker):
        story = Story(monkeypatch)
        assert story.happen() == expected
    found = story.faults() - {"read", "export"}  # which threads of earlier tests may still count
    assert breaker.hit == set(places) - AT_START
    assert found == set(places.values()) == set(INTERNAL_ERRORS.labels["where"]) - {"version", "read", "export"}
    lines = [r.getMessage() for r in caplog.records if "internal error in kvobs's telemetry" in r.getMessage()]
    assert len({line.partition(")")[0] for line in lines}) == len(lines) >= len(found)


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    """By an hour, forward and back, from one reading to the next."""
    readings = 0

    def is_on() -> bool:
        nonlocal readings
        readings += 1
        return True

    # Each call seems to take an hour, and would wait 0.1 s for the thread that notes pauses.
    monkeypatch.setattr("kvobs.probe.pauses.sleep", lambda _seconds: None)
    replace_clock(jumping(is_on), monkeypatch.setattr)
    assert Story(monkeypatch).happen() == expected
    assert readings > 1000


def test_only_the_pages_and_the_request_log_are_written(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    written: list[str] = []
    is_on = True
    sys.addaudithook(Writes(lambda line: written.append(line) if is_on else None))  # can't be taken away
    assert Story(monkeypatch).happen() == expected
    is_on = False
    writers = {"kvobs.telemetry.requests.request_log", "kvobs.page.files"}
    assert {line.partition(" ")[0] for line in written} == writers


# Modules that are there for the telemetry alone: all that they do belongs into a seam.
PACKAGES = ("telemetry", "page", "probe", "export")
MODULES = {"log", "schema.signals", "schema.spans"}
"""The telemetry: all of these packages, and these modules."""

FRONT = "calls what is contained, and connectors"
STORES = "plain stores, and calls what is contained"
EXPOSED = {
    "telemetry.tracing.trace_context:activated.<locals>.active": "sets what a seam has made",
    "export.prometheus:MultiKVConnectorPromMetrics.observe": FRONT,
    "telemetry.payload.collector:Collector.collect": FRONT,
    "telemetry.payload.stats:MultiKVConnectorStats.aggregate": FRONT,
    "telemetry.payload.stats:MultiKVConnectorStats.is_empty": FRONT,
    "telemetry.payload.stats:MultiKVConnectorStats.reduce": FRONT,
    "telemetry.payload.stats:Classes.of": "makes a dict of its own of texts",
    "telemetry.payload.stats:StatsParts.of": "only looks for an entry: rebuilding it is a seam",
    "telemetry.payload.stats:_attempt": FRONT,
    "telemetry.payload.stats:_summary": "within _attempt, which contains what connectors' stats raise",
    **dict.fromkeys(
        [
            *(
                f"telemetry.scheduler_telemetry:SchedulerTelemetry.{name}"
                for name in ("close", "collect", "of_client", "of_load")
            ),
            "telemetry.recorders:Recorders.page",
            "telemetry.verify.verifier:Verifier.take_notes",
            "export.starter:Starter.close",
            *(
                f"telemetry.worker_telemetry:WorkerTelemetry.{name}"
                for name in ("collect", "refused", "reported", "step_begun", "step_ended", "take_notes")
            ),
        ],
        STORES,
    ),
}
"""What may run outside of a seam, and why."""


class Exposed:
    """A profiler that notes which functions of the telemetry run outside of every seam."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._depth = 0
        self._thread = get_ident()
        self._seams = {seam.partition(".<locals>")[0] for seam in seams.find()}

    def point(self, seam: str, number: int) -> None:
        if get_ident() == self._thread and number in (0, seams.LEFT):
            self._depth += 1 if number == 0 else -1

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__", "")).removeprefix("kvobs.")
        if event == "call" and self._depth == 0 and (module in MODULES or module.partition(".")[0] in PACKAGES):
            name = f"{module}:{frame.f_code.co_qualname}"
            if name.partition(".<locals>")[0] not in self._seams:
                self.found.add(name)


def test_code_outside_of_every_seam_is_known(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    exposed = Exposed()
    monkeypatch.setattr(Story, "_serve", lambda _: None)
    with instrumented(exposed.point):
        story = Story(monkeypatch)
        gc.collect()
        gc.disable()  # engines of other tests would end within the story
        sys.setprofile(exposed.profile)
        try:
            assert story.happen() == expected
        finally:
            sys.setprofile(None)
            gc.enable()
    found = {name for name in exposed.found if not name.endswith(">")}  # comprehensions are their function's
    assert found - {"log:once"} == set(EXPOSED), "the router logs, too"
