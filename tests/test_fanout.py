"""Each general rule combines the children's answers as the table says."""

from __future__ import annotations

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import faults
from kvobs.children import Child
from kvobs.fanout import bind, call_all
from kvobs.hooks import HOOKS, Combine, Side
from kvobs.recorder import SUM, Recorder
from kvobs.signals import PROCESS_WIDTH, SLOW_CALLS, slot


def bound(*children: dict[str, Any], known: Any = lambda name: True) -> Any:
    """Bind to children that are given as {hook: answer or exception}; each keeps the calls it gets in ``calls``."""
    connectors = []
    for answers in children:
        connector = SimpleNamespace(calls=[])
        for name in HOOKS:
            setattr(connector, name, _hook(connector, name, answers.get(name)))
        connectors.append(connector)
    wrapper = SimpleNamespace(connectors=connectors)
    wrapper.recorder = Recorder(len(connectors))
    wrapper.children = [Child(i, f"c{i}", c, True, wrapper.recorder) for i, c in enumerate(connectors)]
    bind(wrapper, wrapper.children, known, wrapper.recorder)
    return wrapper


def _hook(connector: Any, name: str, answer: Any) -> Any:
    def hook(*args: Any, **kwargs: Any) -> Any:
        connector.calls.append((name, args, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return hook


GENERAL = [h for h in HOOKS.values() if h.side is not Side.CONFIG and not h.is_property]
EACH = [h.name for h in GENERAL if h.combine is Combine.EACH]
ANY = [h.name for h in GENERAL if h.combine is Combine.ANY]


ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "wait_for_layer_load": [(("layer",), {})],
    "save_kv_layer": [(("layer", 1, 2), {}), (("layer", 1, 2), {"more": 3})],
}


@pytest.mark.parametrize("name", EACH)
def test_each_calls_every_child_with_the_hosts_arguments(name: str) -> None:
    for args, kwargs in ARGUMENTS.get(name, [((1,), {"two": 2}), ((), {})]):
        wrapper = bound({}, {}, {})
        assert getattr(wrapper, name)(*args, **kwargs) is None
        assert [c.calls for c in wrapper.connectors] == [[(name, args, kwargs)]] * 3


@pytest.mark.parametrize("name", EACH)
def test_each_lets_a_childs_error_through_untouched(name: str) -> None:
    error = KeyError("a child's own")
    args, kwargs = ARGUMENTS.get(name, [((), {})])[0]
    with pytest.raises(KeyError) as raised:
        getattr(bound({}, {name: error}), name)(*args, **kwargs)
    assert raised.value is error


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("answers", list(product([False, True], repeat=3)))
def test_any_is_true_if_one_child_says_so(name: str, answers: tuple[bool, ...]) -> None:
    assert getattr(bound(*({name: answer} for answer in answers)), name)() is any(answers)


def test_chain_puts_the_childrens_items_one_after_the_other() -> None:
    wrapper = bound({"take_events": ["a"]}, {"take_events": None}, {"take_events": (x for x in "bc")})
    assert wrapper.take_events() == ["a", "b", "c"]


def test_guarded_reaches_every_child_and_raises_the_first_error() -> None:
    first = OSError("first")
    wrapper = bound({}, {"shutdown": first}, {"shutdown": ValueError("second")}, {})
    with pytest.raises(OSError, match="first"):
        wrapper.shutdown()
    assert all(c.calls for c in wrapper.connectors)


def test_call_all_returns_every_answer() -> None:
    wrapper = bound({"reset_cache": True}, {"reset_cache": None})
    assert call_all("reset_cache", wrapper.children) == [True, None]


def test_hooks_that_this_vllm_does_not_know_are_left_alone() -> None:
    wrapper = bound({}, known=lambda name: name != "finish_forward")
    assert not hasattr(wrapper, "finish_forward")
    assert hasattr(wrapper, "wait_for_save")


class Quiet:
    """Hooks that do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


QUIET = ("wait_for_layer_load", "save_kv_layer", "wait_for_save")


@pytest.mark.parametrize("name", QUIET)
def test_a_child_whose_hook_is_empty_is_left_out_and_not_counted(name: str) -> None:
    real = bound({}).connectors[0]
    recorder = Recorder(2)
    wrapper: Any = SimpleNamespace()
    children = [Child(0, "quiet", Quiet(), True, recorder), Child(1, "real", real, True, recorder)]
    bind(wrapper, children, QUIET.__contains__, recorder)
    args, _ = ARGUMENTS.get(name, [((), {})])[0]
    getattr(wrapper, name)(*args)
    assert real.calls == [(name, args, {})]
    assert [child for (child, _), (_, now, _) in recorder._durations.items() if now[SUM]] == [1]


@pytest.mark.parametrize("name", QUIET)
def test_a_hook_that_is_empty_in_all_costs_nothing_and_takes_its_arguments(name: str) -> None:
    recorder = Recorder(1)
    wrapper: Any = SimpleNamespace()
    bind(wrapper, [Child(0, "quiet", Quiet(), True, recorder)], QUIET.__contains__, recorder)
    for args, kwargs in ARGUMENTS.get(name, [((), {})]):
        assert getattr(wrapper, name)(*args, **kwargs) is None
    assert not any(now[SUM] for _, now, _ in recorder._durations.values())


@pytest.mark.parametrize("name", EACH)
def test_every_call_is_timed_per_child(name: str) -> None:
    wrapper = bound({}, {})
    for args, kwargs in ARGUMENTS.get(name, [((), {})]):
        getattr(wrapper, name)(*args, **kwargs)
    calls = len(ARGUMENTS.get(name, [((), {})]))
    for child in (0, 1):
        durations = wrapper.recorder.durations(child, name)
        assert sum(durations[:SUM]) == calls
        assert durations[SUM] > 0


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_layer_hooks_time_is_cut_between_the_children(name: str) -> None:
    wrapper = bound({}, {}, {})
    slow = wrapper.connectors[1]
    real = getattr(slow, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return real(*args, **kwargs)

    setattr(slow, name, late)
    bind(wrapper, wrapper.children, lambda name: True, wrapper.recorder)
    args, kwargs = ARGUMENTS[name][0]
    begin = time.perf_counter_ns()
    getattr(wrapper, name)(*args, **kwargs)
    whole = time.perf_counter_ns() - begin
    spent = [wrapper.recorder.durations(child, name)[SUM] for child in range(3)]
    assert spent[1] >= 20_000_000
    assert sum(spent) <= whole


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_layer_hooks_error_is_counted_for_its_child_and_ends_the_fan_out_as_in_vllm(name: str) -> None:
    wrapper = bound({}, {name: KeyError("x")}, {})
    args, kwargs = ARGUMENTS[name][0]
    with pytest.raises(KeyError):
        getattr(wrapper, name)(*args, **kwargs)
    assert [len(c.calls) for c in wrapper.connectors] == [1, 1, 0]
    taken = wrapper.recorder.take()
    assert taken.opened == [["kvobs_call_errors_total", 1, name, "KeyError", 1]]


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_slow_layer_hook_is_counted(name: str) -> None:
    wrapper = bound({})
    wrapper.recorder = Recorder(1, slow_ns=1)
    bind(wrapper, wrapper.children, lambda name: True, wrapper.recorder)
    args, kwargs = ARGUMENTS[name][0]
    getattr(wrapper, name)(*args, **kwargs)
    assert wrapper.recorder._counts[PROCESS_WIDTH + slot(SLOW_CALLS, name)] == 1


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_fault_while_timing_a_layer_hook_reaches_no_child(name: str) -> None:
    wrapper = bound({}, {}, {})
    wrapper.recorder.durations(0, name).clear()
    args, kwargs = ARGUMENTS[name][0]
    getattr(wrapper, name)(*args, **kwargs)
    assert [len(c.calls) for c in wrapper.connectors] == [1, 1, 1]
    assert faults.take() == {"record": 1}
