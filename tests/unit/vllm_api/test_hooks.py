"""The table of hooks names what this vLLM has, and kvobs routes all of it itself."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connector import MultiConnector
from kvobs.connectors.fanout import RULES
from kvobs.routing.scheduler import SchedulerSide
from kvobs.routing.worker import WorkerSide
from kvobs.vllm_api.hooks import HOOKS, INHERITED, Combine, Hook, Side, is_empty
from tests.contract.members import public_members
from tests.engine.connectors_stats import IdleConnector

SIDES = {Side.SCHEDULER: SchedulerSide, Side.WORKER: WorkerSide}
VLLMS = {"prefer_cross_layer_blocks", "supports_sleep_mode"}
"""What kvobs's class must not have where this vLLM's own has it not: inherited."""


def implemented(hook: Hook) -> bool:
    """Whether kvobs has its own code for the hook, whatever vLLM has."""
    on_class = hook.name in vars(MultiConnector)
    if hook.is_property or hook.side is Side.CONFIG:
        return on_class
    if hook.combine is not Combine.ROUTED:
        return hook.combine in RULES
    sides = [side for role, side in SIDES.items() if hook.side in (role, Side.BOTH)]
    return all(hook.name in vars(side) for side in sides)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=lambda hook: hook.name)
def test_every_hook_in_the_table_is_kvobss_own_code(hook: Hook) -> None:
    assert implemented(hook) is (hook.name not in VLLMS)


def test_each_public_hook_here_is_in_the_table_or_inherited() -> None:
    assert set(public_members()) - set(HOOKS) == set(INHERITED)
    assert all(INHERITED.values())


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


@pytest.mark.parametrize("name", [n for cls in (Empty, Busy) for n in vars(cls) if not n.startswith("_")])
def test_a_hook_that_only_returns_a_constant_is_empty(name: str) -> None:
    assert is_empty(getattr(Empty() if name in vars(Empty) else Busy(), name)) is (name in vars(Empty))


@pytest.mark.parametrize("call", [len, SimpleNamespace(), functools.partial(print), lambda: None])
def test_callable_that_is_no_plain_method_is_not_empty(call: Any) -> None:
    assert not is_empty(call)


def test_vllms_own_defaults_are_empty() -> None:
    """Those that a connector inherits without defining them."""
    for name in ("finish_forward", "reset_capture_state", "handle_preemptions", "register_kv_caches"):
        assert is_empty(getattr(IdleConnector.__new__(IdleConnector), name)), name
