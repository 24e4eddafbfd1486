"""The table of hooks names what this vLLM has, and kvobs routes all of it itself."""

import pytest

from kvobs.connector import MultiConnector
from kvobs.fanout import RULES
from kvobs.hooks import HOOKS, INHERITED, Combine, Hook, Side
from kvobs.scheduler import SchedulerSide
from kvobs.worker import WorkerSide
from tests.contract.members import public_members

SIDES = {Side.SCHEDULER: SchedulerSide, Side.WORKER: WorkerSide}


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
    assert implemented(hook)


def test_every_public_hook_of_this_vllm_is_in_the_table_or_inherited_for_a_reason() -> None:
    assert set(public_members()) - set(HOOKS) == set(INHERITED)
    assert all(INHERITED.values())


def test_no_name_is_in_both_tables() -> None:
    assert not set(HOOKS) & set(INHERITED)
