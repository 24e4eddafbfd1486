"""Which recorders a process gets: by its role, by the tracing, by the options; and what its page says about it."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvobs import faults
from kvobs.page.writer import plain
from kvobs.probe.pauses import OF_PROCESS
from kvobs.probe.recorder import CallEvent
from kvobs.schema import signals
from kvobs.schema.options import Options
from kvobs.schema.spans import Reason
from kvobs.telemetry import recorders
from kvobs.telemetry.recorders import Recorders, build
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import engine_config, entry_of, transfer_config
from kvobs.testing.scripted import Script
from tests.support.contexts import TRACING
from tests.support.numbers import numbers, spans

ENGINE = plain(["one", "two"])
OFF = replace(TRACING, is_on=False)


def built(rank: int | None, tracing: TracingSettings = OFF, **options: Any) -> Recorders:
    transfer = transfer_config("kvobs", [entry_of(Script("a")), entry_of(Script("b"))])
    return build(ENGINE, Options(**options), engine_config(transfer, 2, rank or 0), tracing, rank)


@pytest.mark.parametrize(("rank", "is_on", "has_report"), list(product([None, 1], [False, True], [False, True])))
def test_recorders_by_role_tracing_and_options(rank: int | None, is_on: bool, has_report: bool) -> None:
    """Slow and failed calls are written in every case, and loads by one of two."""
    made = built(rank, TRACING if is_on else OFF, request_report=has_report)
    assert made.tracer is not None
    assert made.recorder.listener is made.tracer
    has = {name: getattr(made, name) is not None for name in ("traces", "loads", "reports", "log")}
    is_scheduler = rank is None
    assert has == {
        "traces": is_scheduler and is_on,
        "loads": is_scheduler and not is_on,
        "reports": is_scheduler and has_report,
        "log": False,
    }
    assert not made.recorder.traces_all
    assert made.page.process.rank == rank
    assert made.tracer.journal._page is made.page


@pytest.mark.parametrize("rank", [None, 0])
def test_with_level_calls_every_call_is_noticed(rank: int | None) -> None:
    tracing = TracingSettings(True, True, False, 1, 1, "http://127.0.0.1:1")
    assert built(rank, tracing).recorder.traces_all


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("rank", [None, 0])
def test_without_any_sampler_slow_and_failed_spans_are_written(
    rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "Verdicts", lambda: 1 / 0)
    made = built(rank, replace(TRACING, has_calls=True), request_report=True)
    assert faults.take() == {"trace": 1}
    assert made.traces is None
    assert not made.recorder.traces_all
    for error in ("", "OSError"):
        made.recorder.listener.note(CallEvent(0, "wait_for_save", 1, 1, is_slow=False, error=error))  # type: ignore[union-attr]
    assert [[one.reason for one in group] for group in spans(made.page)] == [[Reason.ERROR]]
    assert (made.loads is not None) == (made.reports is not None) == (rank is None)


@pytest.mark.parametrize(("rank", "process"), [(None, "scheduler"), (0, "worker")])
def test_pythons_collections_are_counted_in_the_waiting_process(
    rank: int | None, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvobs.page.writer.look_from_thread", lambda *_: None)
    made = built(rank)
    collected = iter([5, 7, 0])
    ((slot, _),) = made.page.grown
    made.page.grown[:] = [(slot, lambda: next(collected))]
    assert made.recorder.pauses is OF_PROCESS
    for total in (5, 12, 12):
        made.page.catch_up()
        assert numbers(made.page).counts[signals.slot(signals.GC_PAUSES, process)] == total


def test_isolated_connectors_exceptions_do_not_end_the_engine() -> None:
    made = built(None, best_effort=["two"])
    assert list(made.page._contained) == [1]
