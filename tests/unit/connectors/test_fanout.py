"""Each general rule combines the connectors' answers as the table says."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connectors.fanout import call_all, hooks_of
from kvobs.connectors.sub_connector import SubConnector
from kvobs.probe.layer_calls import ARGUMENTS
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import is_timed
from kvobs.vllm_api.hooks import HOOKS, Cadence, Combine
from tests.support.numbers import locate
from tests.support.probes import counts


def bound(*built: dict[str, Any], known: Any = HOOKS) -> Any:
    """Bind to connectors that are given as {hook: answer or exception}; each keeps the calls it gets in ``calls``."""
    wrapped = []
    for answers in built:
        connector = SimpleNamespace(calls=[])
        for name in HOOKS:
            setattr(connector, name, _hook(connector, name, answers.get(name)))
        wrapped.append(connector)
    wrapper = SimpleNamespace(wrapped=wrapped)
    wrapper.recorder = Recorder(len(wrapped))
    wrapper.connectors = [SubConnector(i, f"c{i}", c, wrapper.recorder) for i, c in enumerate(wrapped)]
    vars(wrapper).update(hooks_of(None, wrapper.connectors, dict.fromkeys(ARGUMENTS, print), known))
    return wrapper


def _hook(connector: Any, name: str, answer: Any) -> Any:
    def hook(*args: Any, **kwargs: Any) -> Any:
        connector.calls.append((name, args, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return hook


GENERAL = [h for h in HOOKS.values() if is_timed(h) and h.cadence is not Cadence.LAYER]
EACH = [h.name for h in GENERAL if h.combine is Combine.EACH]
GUARDED = [h.name for h in GENERAL if h.combine is Combine.GUARDED]
ANY = [h.name for h in GENERAL if h.combine is Combine.ANY]


@pytest.mark.parametrize("name", EACH + GUARDED + ANY)
def test_every_connector_is_called_with_the_hosts_arguments(name: str) -> None:
    for args, kwargs in (((1,), {"two": 2}), ((), {})):
        wrapper = bound({}, {}, {})
        assert not getattr(wrapper, name)(*args, **kwargs)
        assert [c.calls for c in wrapper.wrapped] == [[(name, args, kwargs)]] * 3


@pytest.mark.parametrize("name", EACH)
def test_each_lets_a_connectors_error_through_untouched(name: str) -> None:
    error = KeyError("a connector's own")
    with pytest.raises(KeyError) as raised:
        getattr(bound({}, {name: error}), name)()
    assert raised.value is error


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("answers", list(product([False, True], repeat=3)))
def test_any_is_true_if_it_is_for_one_connector(name: str, answers: tuple[bool, ...]) -> None:
    assert getattr(bound(*({name: answer} for answer in answers)), name)() is any(answers)


def test_chain_puts_the_connectors_items_one_after_the_other() -> None:
    wrapper = bound({"take_events": ["a"]}, {"take_events": None}, {"take_events": (x for x in "bc")})
    assert wrapper.take_events() == ["a", "b", "c"]


def test_guarded_reaches_every_connector_and_raises_one_error() -> None:
    first = OSError("first")
    wrapper = bound({}, {"shutdown": first}, {"shutdown": ValueError("second")}, {})
    with pytest.raises(OSError, match="first"):
        wrapper.shutdown()
    assert all(c.calls for c in wrapper.wrapped)


def test_call_all_returns_every_answer() -> None:
    assert call_all("reset_cache", bound({"reset_cache": True}, {"reset_cache": None}).connectors) == [True, None]


def test_unknown_hooks_are_left_alone_and_layer_hooks_given() -> None:
    wrapper = bound({}, known=HOOKS.keys() - {"finish_forward"})
    assert not hasattr(wrapper, "finish_forward")
    assert hasattr(wrapper, "wait_for_save")
    assert [getattr(wrapper, h.name) for h in HOOKS.values() if h.cadence is Cadence.LAYER] == [print, print]


class Quiet:
    """A hook that does nothing."""

    def wait_for_save(self) -> None:
        pass


def test_a_connector_with_an_empty_hook_is_not_called_or_counted() -> None:
    real = bound({}).wrapped[0]
    recorder = Recorder(2)
    wrapper: Any = SimpleNamespace()
    connectors = [SubConnector(0, "quiet", Quiet(), recorder), SubConnector(1, "real", real, recorder)]
    vars(wrapper).update(hooks_of(None, connectors, {}, {"wait_for_save"}))
    wrapper.wait_for_save()
    assert real.calls == [("wait_for_save", (), {})]
    assert {locate(slot)[2] for slot in counts(recorder)} == {1}


class PanicException(BaseException):
    """As pyo3's, of a library in Rust."""


def test_a_panic_of_one_connector_keeps_no_other_from_its_end() -> None:
    """vLLM's EngineCore contains an Exception only, and ends every connector."""
    ended: list[str] = []

    def panics() -> None:
        raise PanicException

    connectors: Any = [
        SimpleNamespace(name="a", shutdown=panics),
        SimpleNamespace(name="b", shutdown=lambda: ended.append("b")),
    ]
    with pytest.raises(PanicException):
        call_all("shutdown", connectors)
    assert ended == ["b"]
