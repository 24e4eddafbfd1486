"""The steps' waits add up to the calls' times, child by child; what was not called is not observed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import faults
from kvobs.children.child import Child
from kvobs.children.stalls import Stalls
from kvobs.schema import signals
from kvobs.schema.signals import locate
from kvobs.telemetry.recorders import Telemetry
from kvobs.telemetry.recording.journal import Journal
from kvobs.telemetry.recording.recorder import SUM, Recorder


class Step:
    """Stalls of two children whose calls take the time that a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hooks: tuple[str, ...]) -> None:
        self.now = 0
        monkeypatch.setattr("kvobs.children.layer_calls.perf_counter", lambda: self.now / 1e9)
        self.recorder = Recorder(len(hooks))
        children = [
            Child(i, f"c{i}", SimpleNamespace(**{hook: self._take if hook in has else NOTHING for hook in LAYER_HOOKS}),
                  self.recorder)
            for i, has in enumerate(hooks)
        ]  # fmt: skip
        self.takes: list[int] = []
        self.stalls = Stalls(children, Telemetry(self.recorder, Journal()))

    def _take(self, *args: Any) -> None:
        self.now += self.takes.pop(0)

    def layer(self, hook: str, *takes: int) -> None:
        self.takes = list(takes)
        calls = next(c for c in self.stalls.layer_calls if c.hook == hook)
        calls.fan_out(*(["layer"] if hook == "wait_for_layer_load" else ["layer", None, None]))

    def once(self, child: int, hook: str, ns: int) -> None:
        self.recorder.tally(child, hook)[SUM] += ns

    def observed(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Return (child, metric) -> how many observations, their sum in ns."""
        self.stalls.flush()
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for place, n in self.recorder.take().counts.items():
            series, offset, child = locate(place)
            if series.signal in (signals.LOAD_STALL, signals.SAVE_STALL):
                count, total = found.get((child, series.signal.name), (0, 0))
                is_sum = offset == series.width - 1
                found[child, series.signal.name] = (count, total + n) if is_sum else (count + n, total)
        return found


LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")


class Nothing:
    def hook(self, *args: Any) -> None:
        pass


NOTHING = Nothing().hook
BOTH = (LAYER_HOOKS, LAYER_HOOKS)


def test_each_step_has_what_its_own_calls_took(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, *BOTH)
    for layer_ns in (3, 40):
        for _ in range(2):
            step.layer("wait_for_layer_load", layer_ns, 1)
            step.layer("save_kv_layer", 5, 0)
        step.once(0, "wait_for_save", 6)
        assert step.stalls.close_step(has_forward=True, has_sync_loads=False) == {}
    assert step.observed() == {
        (0, "kvobs_load_stall_seconds"): (2, 2 * 3 + 2 * 40),
        (1, "kvobs_load_stall_seconds"): (2, 4),
        (0, "kvobs_save_stall_seconds"): (2, 2 * (2 * 5 + 6)),
    }
    assert step.observed() == {}


def test_start_load_kv_is_waited_for_only_where_a_sync_load_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, *BOTH)
    step.once(0, "start_load_kv", 7)
    assert step.stalls.close_step(has_forward=True, has_sync_loads=False) == {}
    step.once(0, "start_load_kv", 9)
    step.layer("wait_for_layer_load", 1, 2)
    assert step.stalls.close_step(has_forward=True, has_sync_loads=True) == {0: 10, 1: 2}
    assert step.observed() == {(0, "kvobs_load_stall_seconds"): (1, 10), (1, "kvobs_load_stall_seconds"): (1, 2)}


def test_a_step_without_calls_is_not_observed_and_shifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, *BOTH)
    for layer_ns in (0, 5, 0, 0, 7):
        if layer_ns:
            step.layer("wait_for_layer_load", layer_ns, 0)
        step.stalls.close_step(has_forward=True, has_sync_loads=False)
    assert step.observed() == {(0, "kvobs_load_stall_seconds"): (2, 12)}


def test_a_step_without_a_forward_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, *BOTH)
    step.once(0, "start_load_kv", 7)
    step.once(0, "wait_for_save", 7)
    step.stalls.close_step(has_forward=False, has_sync_loads=False)
    assert step.observed() == {}


@pytest.mark.parametrize("hooks", [((), LAYER_HOOKS), ((), ())], ids=["one", "all"])
def test_children_with_empty_hooks_are_not_observed(
    hooks: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(monkeypatch, *hooks)
    step.layer("wait_for_layer_load", 9)
    step.stalls.close_step(has_forward=True, has_sync_loads=True)
    expected = {(1, "kvobs_load_stall_seconds"): (1, 9)} if any(hooks) else {}
    assert step.observed() == expected


@pytest.mark.usefixtures("in_production")
def test_faults_are_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, *BOTH)
    step.layer("wait_for_layer_load", 1, 1)
    step.recorder.tally(0, "start_load_kv").clear()
    assert step.stalls.close_step(has_forward=True, has_sync_loads=True) == {}
    step.stalls._loads.ended = [None, None]  # type: ignore[list-item]
    step.stalls.flush()
    assert faults.take()["record"] == 2
