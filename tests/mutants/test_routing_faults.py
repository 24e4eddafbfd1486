"""Each of the routing faults is still put where kvobs passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.mutants.routing_faults import ROUTING_FAULTS
from tests.transparency.engine import live
from tests.transparency.life import Character, Life, Plan
from tests.transparency.mutation import mutated

LIFE = Life(
    children=(Character(hits=1.0, chats=1.0), Character(chats=1.0)),
    plans=(Plan("r", arrives=0, family=0, shared=0, prompt=70, answer=3),),
)


@pytest.mark.parametrize("name", ROUTING_FAULTS)
def test_a_fault_is_where_kvobs_passes(name: str) -> None:
    fault, passed = ROUTING_FAULTS[name], []

    def passing(*arguments: Any, **more: Any) -> Any:
        passed.append(name)
        return fault.new(*arguments, **more)

    with mutated(replace(fault, new=passing)):
        live(LIFE, "kvobs")
    assert passed
