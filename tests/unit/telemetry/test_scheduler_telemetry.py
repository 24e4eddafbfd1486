"""The scheduler's side counts its steps, sets gauges in each, and looks at what takes time every two seconds of work.

What it would send is nothing: the workers get a message only if every call is traced, or blocks are verified.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs import faults
from kvobs.page.layout import ENDED, STEPS
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.telemetry import scheduler_telemetry
from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.scheduler_telemetry import EVERY_NS, SchedulerTelemetry, StepNote
from kvobs.testing import Script
from tests.support.contexts import SAMPLED
from tests.support.observed import Observed

CONNECTORS = ["one"]


class Noting:
    """Stands for what the telemetry looks after, and notes its calls in their order."""

    def __init__(self, noted: list[Any]) -> None:
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self._noted.append((name, *args, *more.items()))


class Scheduler:
    """The telemetry of a scheduler's side whose time is the test's."""

    def __init__(self, patch: pytest.MonkeyPatch, tracer: Any = None, **more: Any) -> None:
        self.now_ns = 10**18
        patch.setattr(scheduler_telemetry, "perf_counter_ns", lambda: self.now_ns)
        self.noted = list[Any]()
        self.page = PageWriter(describe(plain(CONNECTORS), None))
        recorder: Any = SimpleNamespace(page=self.page)
        self.parts: dict[str, Any] = {"gains": Noting(self.noted), "open_transfers": Noting(self.noted)}
        recorders = Recorders(recorder, tracer, **{name: more.pop(name) for name in ("log",) if name in more})
        self.telemetry = SchedulerTelemetry(recorders, Collector({}), **self.parts, **more)

    def build(self, *, has_forward: bool = True, finished: Any = ()) -> StepNote | None:
        output: Any = SimpleNamespace(finished_req_ids=set(finished))
        return self.telemetry.of_step(output, has_forward=has_forward, has_sync_loads=False)

    def step(self, after_ns: int = 0, **more: Any) -> list[Any]:
        """Build a step and take its output; return what was looked at after it."""
        self.now_ns += after_ns
        self.build(**more)
        self.noted.clear()
        self.telemetry.collect()
        return [each for each in self.noted if each[0] in ("log_late", "look")]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def looked(*, goes_on: bool) -> list[Any]:
    return [("log_late",), ("look", ("goes_on", goes_on))]


def test_gauges_are_set_at_a_steps_build_and_at_its_output(scheduler: Scheduler) -> None:
    """A step may hang between the two, for as long as it wants."""
    scheduler.build()
    assert [name for name, *_ in scheduler.noted] == ["step_begun", "measure"]
    scheduler.noted.clear()
    scheduler.telemetry.collect()
    assert [name for name, *_ in scheduler.noted][:2] == ["step_ended", "measure"]
    assert scheduler.page.words[STEPS] == 1


def test_a_step_in_which_no_transfer_has_changed_sets_no_gauge(scheduler: Scheduler) -> None:
    scheduler.parts["open_transfers"].changes = set()
    scheduler.build()
    scheduler.telemetry.collect()
    scheduler.telemetry.collect()
    assert "measure" not in [name for name, *_ in scheduler.noted]


def test_what_takes_time_is_looked_at_every_two_seconds_of_work(scheduler: Scheduler) -> None:
    found = [scheduler.step(EVERY_NS // 5) for _ in range(50)]
    assert found == [looked(goes_on=True), *[[]] * 4] * 10


@pytest.mark.parametrize(("has_forward", "finished"), [(True, ()), (True, "r"), (False, ())])
def test_soon_after_a_look_only_the_end_of_a_burst_has_one(
    has_forward: bool, finished: Any, scheduler: Scheduler
) -> None:
    scheduler.step()
    assert scheduler.step(EVERY_NS - 1, has_forward=has_forward, finished=finished) == []
    assert scheduler.step(has_forward=False, finished="r") == looked(goes_on=False)
    assert scheduler.step(EVERY_NS, has_forward=has_forward, finished=finished) == looked(goes_on=has_forward)


def test_with_steps_in_flight_a_burst_ends_with_the_last_output(scheduler: Scheduler) -> None:
    """As with async scheduling: the next step is built before an output comes."""
    scheduler.step()
    scheduler.build()
    scheduler.build(has_forward=False, finished="r")
    for _ in range(2):
        scheduler.noted.clear()
        scheduler.telemetry.collect()
    assert scheduler.noted[-2:] == looked(goes_on=False)


@given(st.lists(st.tuples(st.integers(0, 2 * EVERY_NS), st.booleans(), st.booleans()), max_size=60))
def test_what_takes_time_waits_at_most_two_seconds_and_a_step(
    steps: list[tuple[int, bool, bool]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        scheduler = Scheduler(patch)
        last_ns = -EVERY_NS
        for waited_ns, has_forward, has_finished in steps:
            found = scheduler.step(waited_ns, has_forward=has_forward, finished="r" if has_finished else "")
            is_due = scheduler.now_ns - last_ns >= EVERY_NS or (has_finished and not has_forward)
            assert found == (looked(goes_on=has_forward) if is_due else [])
            last_ns = scheduler.now_ns if is_due else last_ns


def test_a_step_without_trace_or_verified_blocks_has_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Scheduler(monkeypatch).build() is None
    only_urgent: Any = SimpleNamespace(traces_all=False)  # and no ``begin_step``
    assert Scheduler(monkeypatch, only_urgent).build() is None
    all_calls: Any = SimpleNamespace(traces_all=True, begin_step=lambda: SAMPLED)
    assert Scheduler(monkeypatch, all_calls).build() == StepNote(SAMPLED, None)
    orders: Any = object()
    sample: Any = SimpleNamespace(orders_of=lambda output: orders)
    assert Scheduler(monkeypatch, sample=sample).build() == StepNote(None, orders)


@pytest.mark.usefixtures("in_production")
def test_an_error_in_a_part_costs_the_step_nothing(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.parts["gains"], "step_begun", lambda *_, **__: 1 / 0, raising=False)
    assert scheduler.build() is None
    assert scheduler.telemetry.collect() is None
    assert scheduler.page.words[STEPS] == 1
    assert faults.take() == {"record": 1}


class Closed:
    def __init__(self) -> None:
        self.times = 0

    def close(self) -> None:
        self.times += 1


@pytest.mark.parametrize("is_well", [True, False])
def test_the_end_records_what_was_learned_and_why_it_came(is_well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the page stays as the engine left it: readers find out what ended it."""
    starter, log = Closed(), Closed()
    scheduler = Scheduler(monkeypatch, starter=starter, log=log)
    scheduler.telemetry.close(is_well=is_well)
    assert (starter.times, log.times) == (1, 1)
    assert scheduler.noted == ([("look",)] if is_well else [])
    assert scheduler.page.words[ENDED] == is_well


# --- in the product

BURST, SKIPPED = 50, 8  # steps, each with a prefill, and the first, of which an estimate learns nothing


def test_the_estimate_is_recorded_in_work_and_at_a_bursts_end(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """Not in each step: learning from one by one costs four times as much."""
    engine = Observed(monkeypatch, a, b, ranks=1)
    engine.token_s = 0.005
    monkeypatch.setattr(scheduler_telemetry, "EVERY_NS", EVERY_NS)
    begin_ns, changes = engine.now_ns, dict[float, int]()
    for i in range(BURST):
        engine.rig.add(f"r{i}", [i, *range(20 + 7 * i % 60)], max_tokens=1)
        engine.step()
        prefills = int(engine.value("kvobs_estimate_prefills_total", None))
        if prefills > max(changes.values(), default=0):
            changes[(engine.now_ns - begin_ns) / 1e9] = prefills
    while_working = engine.value("kvobs_step_seconds_total", None)
    assert len(changes) >= 3
    assert all(later - earlier >= 2 for earlier, later in pairwise(changes))
    engine.step()  # as vLLM does after the last request, to pass on its end
    assert not engine.rig.scheduler.has_requests()
    assert engine.value("kvobs_estimate_prefills_total", None) == BURST - SKIPPED
    at_end = engine.value("kvobs_step_seconds_total", None)
    assert 0 < while_working < at_end < (engine.now_ns - begin_ns) / 1e9
    engine.rig.connector.shutdown()
    assert engine.value("kvobs_step_seconds_total", None) == at_end, "nothing was left to learn"
