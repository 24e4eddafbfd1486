"""Random lives of many requests on vLLM's real scheduler: nothing raises, and nothing is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left
from tests.support.scheduler_life import Life, actions

if TYPE_CHECKING:
    import pytest


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(actions, max_size=40),
    st.sampled_from(["first", "longest", "fastest"]),
    st.sampled_from([14, 64]),
    st.sampled_from([0, 1]),
    st.sampled_from(["off", "requests", "calls"]),
)
def test_whatever_children_report_and_clients_abort(
    plan: list[Any], policy: str, blocks: int, lag: int, level: str
) -> None:
    """Stray, early, late and double reports, failures, aborts in any state, a pool so small that it preempts.

    With lag 1 it is vLLM's async scheduler, one step ahead of the workers.
    """
    life = Life(policy, blocks, lag, level)
    for action in plan:
        life.act(action)
    life.end()
    assert_nothing_is_left(life.rig)


def test_where_a_hit_comes_from_says_the_child_that_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the lookup, and without a hit, it is what vLLM says of any connector."""
    a, b = Script("a"), Script("b")
    b.offers["r"] = (2 * BLOCK, True)
    rig = Rig("kvobs", a, b)
    for child in rig.connector._side.children:
        monkeypatch.setattr(
            child, "get_external_cache_hit_sources", lambda request, tokens, name=child.name: {name: tokens}
        )
    request = rig.add("r")
    names = [child.name for child in rig.connector._side.children]
    unchosen = rig.connector.get_external_cache_hit_sources(request, 32)
    assert sum(unchosen.values()) == 32
    assert not set(unchosen) & set(names)
    rig.step()
    assert rig.connector.get_external_cache_hit_sources(request, 32) == {names[1]: 32}


def test_the_end_of_a_request_that_nobody_saves_makes_no_orders(a: Script) -> None:
    """They would be pickled for every worker."""
    rig = Rig("kvobs", a)
    rig.add("r", max_tokens=1)
    rig.run(1)
    assert not rig.scheduler.requests
    assert rig.connector._side.next_orders.made is None
