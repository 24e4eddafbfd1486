"""A worker's side marks its steps in its page, continues the scheduler's traces, and hands on what is verified."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.page.layout import ENDED, SINCE, STEPS
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.state.transfers import ReportKind, WrongBlocks
from kvobs.telemetry import worker_telemetry
from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.scheduler_telemetry import StepNote
from kvobs.telemetry.worker_telemetry import WorkerTelemetry
from kvobs.testing import Script
from tests.support.contexts import SAMPLED, UNSAMPLED
from tests.support.observed import Observed

WRONG = WrongBlocks(0, "r", 1, 0)


class Worker:
    def __init__(self, *, is_traced: bool | None = None, verifier: Any = None, starter: Any = None) -> None:
        self.joined = list[Any]()
        self.page = PageWriter(describe(plain(["one", "two"]), 1))
        tracer: Any = None
        if is_traced is not None:
            tracing = SimpleNamespace(is_on=is_traced)
            tracer = SimpleNamespace(tracing=tracing, join_step=lambda *args: self.joined.append(args))
        recorder: Any = SimpleNamespace(page=self.page)
        self.collector = Collector({"one": "m:C"})
        self.telemetry = WorkerTelemetry(Recorders(recorder, tracer), self.collector, verifier, starter)


def test_a_step_is_marked_from_its_begin_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches the process from outside sees since when it is in one."""
    monkeypatch.setattr(worker_telemetry, "perf_counter_ns", lambda: 77)
    worker = Worker()
    words = worker.page.words
    for steps in range(3):
        assert (words[SINCE], words[STEPS]) == (0, steps)
        worker.telemetry.step_begun(None, [])
        assert (words[SINCE], words[STEPS]) == (77, steps)
        worker.telemetry.step_ended()


@pytest.mark.parametrize("is_traced", [None, False, True])
def test_only_with_exported_spans_a_step_continues_traces(
    is_traced: bool | None,
) -> None:
    """Where no spans are exported a slow call gets a separate trace, and a step costs nothing more."""
    worker = Worker(is_traced=is_traced)
    worker.telemetry.step_begun(StepNote(SAMPLED), [(0, UNSAMPLED), (1, None), (0, SAMPLED)])
    worker.telemetry.step_begun(None, [])
    assert worker.joined == ([(SAMPLED, {0: [UNSAMPLED, SAMPLED]}), (None, {})] if is_traced else [])


@pytest.mark.usefixtures("in_production")
def test_a_trace_that_cannot_be_continued_costs_a_step_nothing() -> None:
    worker = Worker(is_traced=True)
    worker.joined = None  # type: ignore[assignment]
    worker.telemetry.step_begun(StepNote(SAMPLED), [])
    assert worker.page.words[SINCE] > 0
    assert faults.take() == {"trace": 1}


def test_the_verifier_gets_each_step_and_its_answers_arrive() -> None:
    got, orders = list[Any](), object()
    verifier = SimpleNamespace(
        refuses=True,
        step_begun=got.append,
        step_ended=lambda: got.append("ended"),
        reported=lambda *args: got.append(args),
        refused=lambda index, requests: {"r"} if index else None,
        take_notes=lambda: [WRONG],
    )
    telemetry = Worker(verifier=verifier).telemetry
    telemetry.step_begun(StepNote(None, orders), [])  # type: ignore[arg-type]
    telemetry.reported(1, ReportKind.RECEIVED, ["r"])
    telemetry.step_ended()
    telemetry.step_begun(None, [])
    assert got == [orders, (1, ReportKind.RECEIVED, ["r"]), "ended", None]
    assert (telemetry.refused(1, ["r"]), telemetry.refused(0, ["r"])) == ({"r"}, set())
    assert telemetry.take_notes() == [WRONG]
    assert (telemetry.wants_reports, telemetry.may_refuse) == (True, True)


def test_without_a_verifier_nothing_is_asked_and_nothing_refused() -> None:
    telemetry = Worker().telemetry
    telemetry.reported(1, ReportKind.RECEIVED, ["r"])
    assert (telemetry.refused(1, ["r"]), telemetry.take_notes()) == (set(), [])
    assert (telemetry.wants_reports, telemetry.may_refuse) == (False, False)


def test_only_the_connectors_own_stats_are_sent() -> None:
    worker = Worker()
    assert worker.telemetry.collect() is None
    mine = KVConnectorStats(data={"n": 1})
    worker.collector.hooks = [("one", lambda: mine)]
    stats: Any = worker.telemetry.collect()
    assert {**stats.data} == {"one": mine, "kvobs": stats["kvobs"]}


@pytest.mark.parametrize("is_well", [True, False])
def test_at_the_end_no_exporter_starts_and_the_page_has_why(is_well: bool) -> None:
    closed = list[bool]()
    worker = Worker(starter=SimpleNamespace(close=lambda: closed.append(True)))
    worker.telemetry.close(is_well=is_well)
    assert closed == [True]
    assert worker.page.words[ENDED] == is_well


# --- in the product


def test_each_rank_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine, seen = Observed(monkeypatch, a, b), set[bool]()
    pages = [worker._telemetry._recorders.page for worker in engine.rig.workers]

    def look(hook: str, detail: Any) -> None:
        if hook == "start_load_kv":
            seen.add(any(page.words[SINCE] for page in pages))

    a.on_call = look
    engine.rig.add("r", max_tokens=3)
    engine.step(4)
    assert [(page.rank, page.words[STEPS], page.words[SINCE]) for page in pages] == [(0, 4, 0), (1, 4, 0)]
    assert seen == {True}
