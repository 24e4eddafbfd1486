"""The layer hooks reach every connector with the host's arguments; their time is cut between the connectors exactly."""

import inspect
import threading
import time
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvobs import faults
from kvobs.clock import WALL_OFFSET
from kvobs.connectors.sub_connector import SubConnector
from kvobs.page import calls
from kvobs.probe.layer_calls import ARGUMENTS, LayerCall, LayerCalls, Stalls
from kvobs.probe.recorder import NEVER, SUM, CallEvent
from kvobs.schema import signals
from kvobs.schema.signals import CALL_DURATION
from kvobs.vllm_api.hooks import HOOKS, Cadence
from tests.support.contexts import Noting
from tests.support.numbers import locate, numbers, taken
from tests.support.probes import Kind, each_probe, recorder_of

CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "wait_for_layer_load": [(("layer",), {})],
    "save_kv_layer": [(("layer", 1, 2), {}), (("layer", 1, 2), {"more": 3})],
}
each_hook = pytest.mark.parametrize("hook", sorted(CALLS))


class Fan:
    """A fan-out over connectors whose calls take the time that a test says, by a clock of its own."""

    def __init__(self, kind: Kind, hook: str, built: int, slow_ns: int = NEVER, tracer: Any = None) -> None:
        self.now = 10**15
        self.takes: list[int] = []
        self.calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self.raises: dict[int, BaseException] = {}
        self.recorder = recorder_of(kind, built, slow_ns, listener=tracer, clock=lambda: self.now)
        connectors = [SimpleNamespace(**{hook: self._hook(i)}) for i in range(built)]
        made = [SubConnector(i, f"c{i}", c, self.recorder) for i, c in enumerate(connectors)]
        self.layers = LayerCalls(hook, [connector.layer_target(hook) for connector in made], self.recorder)
        self.args = CALLS[hook][0][0]

    def _hook(self, index: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((index, args, kwargs))
            self.now += self.takes.pop(0) if self.takes else 1
            if index in self.raises:
                raise self.raises[index]

        return call

    def __call__(self, *takes: int) -> None:
        self.takes = list(takes)
        self.layers.fan_out(*self.args)

    def histogram(self, index: int) -> list[int]:
        first = self.recorder.calls(index, self.layers.hook)
        return self.recorder.words[first : first + SUM + 1].tolist()


def test_the_table_has_the_layer_hooks_as_vllm_declares_them() -> None:
    assert set(ARGUMENTS) == set(CALLS) == {hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER}
    for hook, names in ARGUMENTS.items():
        declared = inspect.signature(getattr(KVConnectorBase_V1, hook)).parameters
        assert [*names] == [n for n, p in declared.items() if n != "self" and p.kind is not p.VAR_KEYWORD]


@each_probe
@each_hook
@pytest.mark.parametrize("connectors", [0, 1, 2, 5])
def test_every_connector_is_called_with_the_hosts_arguments(kind: Kind, hook: str, connectors: int) -> None:
    fan = Fan(kind, hook, connectors)
    for args, kwargs in CALLS[hook]:
        fan.calls.clear()
        assert fan.layers.fan_out(*args, **kwargs) is None
        assert fan.calls == [(i, args, kwargs) for i in range(connectors)]
    fan.layers.close_step()
    assert [sum(fan.histogram(i)[:SUM]) for i in range(connectors)] == [len(CALLS[hook])] * connectors


steps = st.lists(
    st.lists(st.lists(st.integers(0, 2**16) | st.integers(0, 2**40), min_size=3, max_size=3), max_size=4), max_size=5
)


@each_probe
@given(st.sampled_from(sorted(CALLS)), steps)
def test_time_is_cut_by_connector_and_step_exactly(kind: Kind, hook: str, plan: list[list[list[int]]]) -> None:
    """The plan: by step, by layer, what each connector takes."""
    fan = Fan(kind, hook, 3)
    for layers in plan:
        for takes in layers:
            fan(*takes)
        assert fan.layers.close_step() == ([*map(sum, zip(*layers, strict=True))] or [0, 0, 0])
        assert fan.layers.last_ns == (fan.now + WALL_OFFSET if layers else 0)
    every = [takes for layers in plan for takes in layers]
    for index in range(3):
        took = [takes[index] for takes in every]
        buckets = [sum(CALL_DURATION.bucket(ns) == i for ns in took) for i in range(SUM)]
        assert fan.histogram(index) == [*buckets, sum(took)]


@each_probe
@each_hook
def test_a_step_leaves_one_record_of_each_connector_in_the_ring(kind: Kind, hook: str) -> None:
    fan = Fan(kind, hook, 2)
    fan(3, 4)
    fan(10**9, 5)  # a long one
    fan.layers.close_step()
    fan.layers.close_step()
    page = fan.recorder.page
    expected = [(fan.now - ns, ns, calls.pack(page.marks(i, hook), 2)) for i, ns in enumerate((10**9 + 3, 9))]
    assert calls.read(page.words[page.layout.ring :]) == expected


@each_probe
def test_two_threads_lose_nothing_and_mix_nothing_up(kind: Kind) -> None:
    """vLLM's two micro-batches call the same connector."""
    recorder = recorder_of(kind, 2)
    hook = "wait_for_layer_load"
    layers = LayerCalls(hook, [LayerCall(i, lambda layer: None) for i in range(2)], recorder)
    begin = time.perf_counter_ns()
    threads = [threading.Thread(target=lambda: [layers.fan_out("layer") for _ in range(20_000)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = time.perf_counter_ns() - begin
    took = layers.close_step()
    for index in range(2):
        first = recorder.calls(index, hook)
        assert sum(recorder.words[first : first + SUM]) == 40_000
        assert 0 < recorder.words[first + SUM] == took[index] < 2 * whole


@each_probe
@each_hook
@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_an_error_ends_fan_out_and_is_counted(kind: Kind, hook: str, error: BaseException) -> None:
    fan = Fan(kind, hook, 3)
    fan.raises[1] = error
    with pytest.raises(type(error)) as raised:
        fan(5, 7, 9)
    assert raised.value is error
    assert [index for index, *_ in fan.calls] == [0, 1]
    fan.raises.clear()
    fan(1, 1, 1)
    fan.layers.close_step()
    assert [fan.histogram(i)[SUM] for i in range(3)] == [6, 8, 1]
    assert numbers(fan.recorder).opened == [["kvobs_call_errors_total", 1, hook, type(error).__name__, 1]]


@each_probe
@each_hook
def test_slow_calls_are_counted(kind: Kind, hook: str, caplog: pytest.LogCaptureFixture) -> None:
    unit_ns = 1_000_000 if hook == "save_kv_layer" else 1_000  # also below the first bucket's bound
    fan = Fan(kind, hook, 2, slow_ns=10 * unit_ns)
    for units in (9, 11, 30, 20):
        fan(units * unit_ns, 1)
    fan.layers.close_step()
    assert "connector '0': " + hook + f" took {11 * unit_ns / 1e6:.0f} ms" in caplog.text
    assert len(caplog.records) == 1
    slow = [n for place, n in numbers(fan.recorder).counts.items() if "slow" in locate(place)[0].signal.name]
    assert slow == [3]


@each_probe
@pytest.mark.usefixtures("in_production")
def test_a_fault_while_counting_an_error_hides_nothing(kind: Kind) -> None:
    fan = Fan(kind, "wait_for_layer_load", 2)
    fan.raises[1] = OSError("x")
    fan.recorder.page.rows = None  # type: ignore[assignment]
    with pytest.raises(OSError, match="x"):
        fan(1, 2)
    assert faults.take() == {"record": 1}


# --- what the tracer gets

SLOW_NS = 1_000
traced_steps = st.lists(
    st.lists(st.lists(st.integers(0, 2 * SLOW_NS), min_size=2, max_size=2), min_size=1, max_size=4), max_size=4
)


@each_probe
@given(st.sampled_from(sorted(CALLS)), traced_steps, st.booleans())
def test_tracer_gets_slow_layers_and_sums(kind: Kind, hook: str, plan: list[list[list[int]]], traces_all: bool) -> None:
    """The plan: by step, by layer, what each connector takes."""
    tracer = Noting(traces_all)
    expected: list[CallEvent] = []
    fan = Fan(kind, hook, 2, SLOW_NS, tracer)
    for layers in plan:
        step_began = fan.now
        for layer, takes in enumerate(layers):
            for index, took in enumerate(takes):
                if took > SLOW_NS:
                    start = fan.now + sum(takes[:index]) + WALL_OFFSET
                    expected.append(CallEvent(index, hook, start, took, True, more={"kv_transfer.layer": layer}))
            fan(*takes)
        for index in range(2 if traces_all else 0):
            each = [takes[index] for takes in layers]
            first = step_began + (layers[0][0] if index else 0)
            last = fan.now - (0 if index else layers[-1][1])
            summary = {
                "kv_transfer.layers": len(layers),
                "kv_transfer.layers_duration": sum(each) / 1e9,
                "kv_transfer.slowest_layer": each.index(max(each)),
                "kv_transfer.slowest_layer_duration": max(each) / 1e9,
            }
            expected.append(
                CallEvent(index, hook, first + WALL_OFFSET, last - first, False, more=summary, is_many=True)
            )
        fan.layers.close_step()
    assert sorted(tracer.noticed, key=repr) == sorted(expected, key=repr)
    for noticed in tracer.noticed:
        noted = (*noticed[2:4], *noticed.more.values())
        assert all(type(number) in (int, float) for number in noted), (
            "builtins only, as the encoder of spans takes them"
        )


@each_probe
@each_hook
def test_the_tracer_gets_a_call_that_failed_at_once(kind: Kind, hook: str) -> None:
    tracer = Noting()
    fan = Fan(kind, hook, 3, tracer=tracer)
    fan.raises[1] = OSError("x")
    began = fan.now
    with pytest.raises(OSError, match="x"):
        fan(5, 7)
    assert tracer.noticed == [CallEvent(1, hook, began + 5 + WALL_OFFSET, 7, False, "OSError", "layer")]


# --- the steps' waits


class Waits:
    """Stalls of connectors whose calls take the time that a test says; some have no layer hooks."""

    def __init__(self, kind: Kind, *has_layers: bool) -> None:
        self.now = 0
        self.takes: list[int] = []
        self.recorder = recorder_of(kind, len(has_layers), clock=lambda: self.now)
        hooks = [dict.fromkeys(CALLS, self._take if has else Quiet().hook) for has in has_layers]
        connectors = [SubConnector(i, f"c{i}", SimpleNamespace(**of), self.recorder) for i, of in enumerate(hooks)]
        targets = {hook: [c.layer_target(hook) for c in connectors if hook in c.implemented] for hook in CALLS}
        self.stalls = Stalls(targets, self.recorder)
        self.calls = self.stalls.fan_outs

    def _take(self, *_: Any) -> None:
        self.now += self.takes.pop(0)

    def layer(self, hook: str, *takes: int) -> None:
        self.takes = list(takes)
        self.calls[hook](*CALLS[hook][0][0])

    def observed(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Return (connector, metric) -> how many observations, their sum in ns."""
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for place, n in taken(self.recorder).counts.items():
            series, offset, index = locate(place)
            if series.signal in (signals.LOAD_STALL, signals.SAVE_STALL):
                count, total = found.get((index, series.signal.name), (0, 0))
                is_sum = offset == series.width - 1
                found[index, series.signal.name] = (count, total + n) if is_sum else (count + n, total)
        return found


class Quiet:
    """A hook that does nothing."""

    def hook(self, *args: Any) -> None:
        pass


LOAD, SAVE = ("wait_for_layer_load", "start_load_kv"), ("save_kv_layer", "wait_for_save")
METRICS = {LOAD: "kvobs_load_stall_seconds", SAVE: "kvobs_save_stall_seconds"}
times = st.integers(0, 2**30)
stalled_steps = st.lists(
    st.fixed_dictionaries(
        {
            "has_forward": st.booleans(),
            "has_sync_loads": st.booleans(),
            LOAD: st.tuples(st.lists(st.tuples(times, times), max_size=3), times),
            SAVE: st.tuples(st.lists(st.tuples(times, times), max_size=3), times),
            "flush": st.booleans(),
        }
    ),
    max_size=6,
)


@each_probe
@given(st.tuples(st.booleans(), st.booleans()), stalled_steps)
def test_a_steps_wait_sums_its_layers_and_hooks(kind: Kind, has_layers: tuple[bool, bool], plan: list[Any]) -> None:
    """A wait for loads before the forward is one only where a synchronous load is due; no wait is not observed."""
    expected: dict[tuple[int, str], list[int]] = {}
    waits = Waits(kind, *has_layers)
    found: dict[tuple[int, str], list[int]] = {}
    for step in plan:
        loads = {}
        for hooks in (LOAD, SAVE):
            layers, once = step[hooks]
            is_waited_for = step["has_forward"] and (hooks is SAVE or step["has_sync_loads"])
            for takes in layers:
                waits.layer(hooks[0], *(took for took, has in zip(takes, has_layers, strict=True) if has))
            for index, has in enumerate(has_layers):
                waits.recorder.words[waits.recorder.calls(index, hooks[1]) + SUM] += once + index
                spent = sum(takes[index] for takes in layers) if has else 0
                if hooks is LOAD and step["has_sync_loads"]:
                    loads[index] = spent + once + index
                if total := spent + (once + index if is_waited_for else 0):
                    expected.setdefault((index, METRICS[hooks]), []).append(total)
        assert waits.stalls.close_step(**{key: step[key] for key in ("has_forward", "has_sync_loads")}) == loads
        for _ in range(step["flush"]):
            add(found, waits.observed())
    add(found, waits.observed())
    assert waits.observed() == {}
    assert found == {key: [len(totals), sum(totals)] for key, totals in expected.items()}


def add(found: dict[tuple[int, str], list[int]], more: dict[tuple[int, str], tuple[int, int]]) -> None:
    for key, (count, total) in more.items():
        before = found.get(key, [0, 0])
        found[key] = [before[0] + count, before[1] + total]
