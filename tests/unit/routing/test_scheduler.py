"""Random lives of many requests on vLLM's real scheduler: nothing raises, and nothing is left."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config

RANKS = 2
HEADERS = (None, *({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-{flags}"} for flags in ("00", "01", "no")))
KV_OFFERS = st.sampled_from([(0, False), (BLOCK, True), (3 * BLOCK, True), (2 * BLOCK, False), (None, False)])
request_ids = st.sampled_from([f"r{i}" for i in range(5)])
actions = st.one_of(
    st.tuples(st.just("add"), request_ids, st.tuples(KV_OFFERS, KV_OFFERS), st.sets(st.sampled_from([0, 1]))),
    st.tuples(st.just("abort"), request_ids),
    st.tuples(
        st.just("say"),
        st.sampled_from([0, 1]),
        st.integers(0, RANKS - 1),
        st.sampled_from(["received", "failed", "saved"]),
        request_ids,
    ),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


class Life:
    """Runs actions; whatever a child does beyond them is what a correct child must do in the end."""

    def __init__(self, policy: str, blocks: int, lag: int, level: str, cls: str = "ScriptedConnector") -> None:
        self.scripts = (Script("a"), Script("b"))
        kvobs = {"load_policy": policy, "tracing": {"level": level}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            connectors = [child_config(script, cls) for script in self.scripts]
            self.rig = Rig("kvobs", connectors=connectors, ranks=RANKS, kvobs=kvobs, blocks=blocks, lag=lag)
        self.ids: dict[str, str] = {}  # by a request's name in the plan; vLLM never uses an id twice

    def act(self, action: Any) -> None:
        match action:
            case ("add", name, offers, promises):
                if self.ids.get(name) in self.rig.scheduler.requests:
                    return
                request_id = self.ids[name] = f"{name}#{len(self.scripts[0].offers)}"
                for i, script in enumerate(self.scripts):
                    script.offers[request_id] = [offers[i], (0, False)] if offers[i][0] is None else offers[i]
                    script.promises -= {request_id}
                    script.promises |= {request_id} if i in promises else set()
                self.rig.add(request_id, max_tokens=3, trace_headers=HEADERS[len(self.ids) % len(HEADERS)])
            case ("abort", name):
                self.rig.abort(self.ids.get(name, name))
            case ("say", child, rank, word, name):
                self.scripts[child].say(rank, **{word: self.ids.get(name, name)})
            case ("step", n):
                self.rig.run(n)

    def end(self) -> None:
        """Let every child report all it owes, on every rank, until the engine is idle."""
        for _ in range(12):
            for request_id in list(self.rig.scheduler.requests):
                owner = self.rig.connector._side.ledger.owner(request_id)
                for i, script in enumerate(self.scripts):
                    script.offers[request_id] = (0, False)
                    for rank in range(RANKS):
                        script.say(rank, received=request_id if i == owner else "", saved=request_id)
            self.rig.run(3)


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
    assert rig.connector._side._next.made is None
