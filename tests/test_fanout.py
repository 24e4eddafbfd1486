"""Each general rule combines the children's answers as the table says."""

from __future__ import annotations

import functools
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.children import Child
from kvobs.fanout import bind, call_all, is_empty
from kvobs.hooks import HOOKS, Combine, Side
from tests.engine.children_stats import IdleChild


def bound(*children: dict[str, Any], known: Any = lambda name: True) -> Any:
    """Bind to children that are given as {hook: answer or exception}; each keeps the calls it gets in ``calls``."""
    connectors = []
    for answers in children:
        connector = SimpleNamespace(calls=[])
        for name in HOOKS:
            setattr(connector, name, _hook(connector, name, answers.get(name)))
        connectors.append(connector)
    wrapper = SimpleNamespace(connectors=connectors)
    bind(wrapper, [Child(i, f"c{i}", c, True) for i, c in enumerate(connectors)], known)
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
    children = [Child(i, str(i), c, True) for i, c in enumerate(wrapper.connectors)]
    assert call_all("reset_cache", children) == [True, None]


def test_hooks_that_this_vllm_does_not_know_are_left_alone() -> None:
    wrapper = bound({}, known=lambda name: name != "finish_forward")
    assert not hasattr(wrapper, "finish_forward")
    assert hasattr(wrapper, "wait_for_save")


class Empty:
    """Hooks that do nothing, each in its own way."""

    def passes(self, layer_name: str) -> None:
        pass

    def returns(self) -> None:
        """Say so, and return."""
        return

    def answers(self, *args: Any, **kwargs: Any) -> int:
        return 7


class Busy:
    """Hooks that do something, however little."""

    def calls(self) -> None:
        print()

    def stores(self) -> None:
        self.x = 1

    def raises(self) -> None:
        raise NotImplementedError

    def checks(self) -> None:
        assert self.x

    def returns_its_argument(self, x: int) -> int:
        return x

    def yields(self) -> Any:
        yield 1

    async def awaits(self) -> None:
        pass

    @functools.lru_cache  # noqa: B019 - only its kind matters
    def is_wrapped(self) -> None:
        pass


@pytest.mark.parametrize("name", [n for n in vars(Empty) if not n.startswith("_")])
def test_a_hook_that_only_returns_a_constant_is_empty(name: str) -> None:
    assert is_empty(getattr(Empty(), name))


@pytest.mark.parametrize("name", [n for n in vars(Busy) if not n.startswith("_")])
def test_a_hook_that_does_anything_is_not_empty(name: str) -> None:
    assert not is_empty(getattr(Busy(), name))


@pytest.mark.parametrize("call", [len, SimpleNamespace(), functools.partial(print), lambda: None], ids=str)
def test_what_is_no_plain_method_is_not_empty(call: Any) -> None:
    assert not is_empty(call)


def test_a_hook_that_was_put_on_the_child_itself_is_called() -> None:
    class Bare:
        def wait_for_save(self) -> None:
            pass

    heard: list[int] = []
    child: Any = Bare()
    child.wait_for_save = lambda: heard.append(1)
    assert not is_empty(child.wait_for_save)


def test_vllms_own_defaults_are_empty() -> None:
    """Those that a connector inherits without a word of its own."""
    for name in ("finish_forward", "reset_capture_state", "handle_preemptions", "register_kv_caches"):
        assert is_empty(getattr(IdleChild.__new__(IdleChild), name)), name


def test_a_child_whose_hook_is_empty_is_left_out() -> None:
    wrapper = bound({}, {})
    quiet = SimpleNamespace(**{name: Empty().answers for name in HOOKS})
    real = wrapper.connectors[0]
    bind(wrapper, [Child(0, "quiet", quiet, True), Child(1, "real", real, True)], lambda name: True)
    wrapper.wait_for_layer_load("layer")
    assert real.calls == [("wait_for_layer_load", ("layer",), {})]
    assert wrapper.wait_for_layer_load.__closure__[0].cell_contents == (real.wait_for_layer_load,)
