"""What the policy that predicts learns from the router's events, and that it harms nobody."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connectors.child import Child
from kvobs.prediction.compute_cost import ComputeCost
from kvobs.prediction.load_choice import COMPUTING, FASTEST, HANDED_OVER
from kvobs.probe.recorder import Recorder
from kvobs.routing import policies
from kvobs.routing.policies import Fastest, LoadPolicy, Longest
from kvobs.state.offers import Decision, Offer
from kvobs.state.transfers import Load
from kvobs.testing import BLOCK, Rig, Script
from tests.support.observed import KV, SYNC, Observed
from tests.support.reports import took
from tests.support.rig import assert_nothing_is_left

MS = 1_000_000
STEP_S, TOKEN_S = 5e-3, 1e-4
REQUEST: Any = SimpleNamespace(request_id="r", num_tokens=1100)


class NixlConnector:
    """Is called like one that hands KV over."""


class Policy:
    """The policy of an engine whose steps take 5 ms and 0.1 ms a token."""

    def __init__(self, patch: pytest.MonkeyPatch, *connectors: Any) -> None:
        self.now_ns = 10**18
        patch.setattr(policies, "wall_ns", lambda: self.now_ns)
        cost = ComputeCost(2048)
        for i in range(100):
            tokens = 1 + 37 * i % 1500
            cost.observe(STEP_S + tokens * TOKEN_S, tokens, tokens * (tokens + 1) // 2, 0, 0)
        recorder = Recorder(len(connectors))
        children = [Child(i, str(i), connector, recorder) for i, connector in enumerate(connectors)]
        self.cost = self.known = cost
        self.policy = Fastest(children, lambda: self.known)

    def crowd(self, prefills: int) -> None:
        """Have so many prefills in each of a hundred steps."""
        pairs = prefills * 100 * 101 // 2
        for _ in range(100):
            self.cost.observe(STEP_S + prefills * 100 * TOKEN_S, prefills * 100, pairs, 0, 0, prefills=prefills)

    def load(self, child: int, ms: float, name: str = "x", tokens: int = 1000, **more: Any) -> Load:
        load = self.begin(child, name, tokens, **more)
        self.now_ns += int(ms * MS)
        self.policy.load_ended(name, load)
        return load

    def begin(self, child: int, name: str, tokens: int = 1000, *, is_async: bool = True, **more: Any) -> Load:
        load = Load(child, tokens, is_async, 1, opened_ns=self.now_ns, **more)
        self.policy.admitted(name, load)
        return load

    def decide(self, *tokens: int, local: int = 0) -> Any:
        return self.policy.decide(REQUEST, local, [Offer(i, n, True) for i, n in enumerate(tokens) if n])


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    return Policy(monkeypatch, object(), object())


def test_the_load_and_the_rest_together_count(policy: Policy) -> None:
    policy.load(0, 20, tokens=500)
    policy.load(1, 60, tokens=1000)
    decision = policy.decide(500, 1000)
    assert (decision.child, decision.reason) == (1, FASTEST)
    assert decision.predicted == pytest.approx({0: 0.02 + 0.065, 1: 0.06 + 0.015}, rel=0.05)
    assert decision.computing_s == pytest.approx(0.115, rel=0.05)
    assert policy.decide(500, 600).child == 0


def test_beside_other_prefills_computing_takes_as_much_longer_as_they_do(policy: Policy) -> None:
    """What a load took beside them is observed, so both must count them."""
    policy.load(0, 160, tokens=1000)
    assert policy.decide(1000).reason == COMPUTING
    policy.crowd(3)
    decision = policy.decide(1000)
    assert (decision.child, decision.reason) == (0, FASTEST)
    assert decision.computing_s == pytest.approx(0.115 * 3, rel=0.1)
    assert decision.predicted[0] == pytest.approx(0.16 + 0.015 * 3, rel=0.1)
    policy.crowd(1)
    assert policy.decide(1000).reason == COMPUTING


def test_local_tokens_of_vllm_are_not_computed(policy: Policy) -> None:
    policy.load(0, 20, tokens=500)
    policy.load(1, 20, tokens=500)
    decision = policy.decide(500, local=550)
    assert decision.computing_s == pytest.approx(0.06, rel=0.1)
    assert decision.predicted[0] == pytest.approx(0.02 + 0.01, rel=0.1)


@pytest.mark.parametrize(
    ("ms", "how", "takes_s"),
    [(1, {}, 0.001), (1, {"failed_on": {0}}, 0.106), (500, {"is_async": False, "ranks": took(20 * MS, 30 * MS)}, 0.03)],
)
def test_load_time_is_predicted(policy: Policy, ms: int, how: dict[str, Any], takes_s: float) -> None:
    """One that fails at once would be the fastest: its tokens are computed. Of a synchronous one its step's wait."""
    policy.load(0, ms, **how)
    assert policy.decide(1000).predicted[0] == pytest.approx(takes_s + 0.015, rel=0.05)


def test_without_an_estimate_computing_is_taken_to_last_as_long_as_the_failed_load(policy: Policy) -> None:
    policy.known = ComputeCost(2048)  # it has seen no step
    policy.load(0, 40, failed_on={0})
    policy.known = policy.cost
    assert policy.decide(1000).predicted[0] == pytest.approx(0.08 + 0.015, rel=0.05)


def test_hanging_connector_is_left_before_its_load_ends(policy: Policy) -> None:
    for _ in range(3):
        policy.load(0, 20)
    policy.load(1, 60)
    hanging = policy.begin(0, "h")
    assert policy.decide(1000, 1000).child == 0
    policy.now_ns += 100 * MS
    assert policy.decide(1000, 1000).child == 1
    policy.policy.load_ended("h", hanging)
    assert policy.decide(1000, 1000).child == 0, "one is an outlier"


def test_a_load_that_later_ones_have_overtaken_says_nothing(policy: Policy) -> None:
    """A rank may never report it."""
    for _ in range(3):
        policy.load(0, 20)
    policy.load(1, 60)
    policy.begin(0, "lost")
    policy.now_ns += 5000 * MS
    assert policy.decide(1000, 1000).child == 1
    policy.load(0, 20, "later")
    assert policy.decide(1000, 1000).child == 0
    assert not any(policy.policy._open)


def test_kv_that_another_engine_has_computed_for_this_request_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(monkeypatch, object(), NixlConnector())
    policy.load(0, 1)
    policy.load(1, 5000)
    assert policy.decide(1000, 1000) == Decision(1, HANDED_OVER, 1, (1,), {}, None, {})
    assert policy.decide(1000, 0).reason == FASTEST


def test_an_engine_computes_what_it_loads_slower(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Asked always, discarded where it does not pay: every connector gets the blocks, with 0 tokens."""
    engine = Observed(monkeypatch, a, b, ranks=1, load_policy="fastest")
    engine.token_s = 0.005
    for i in range(40):
        engine.rig.add(f"cold{i}", tokens=20 + 7 * i % 90, max_tokens=1)
        engine.step()
    for request in ("tried", "computed"):
        a.offers[request] = KV
        engine.rig.add(request)
        engine.step(4)
        a.say(0, received="tried")
        engine.step(4)
        a.reports.clear()
    given = {request: tokens for request, tokens, _ in a.called("update_state_after_alloc") if tokens}
    assert given == {"tried": 2 * BLOCK}
    for script in (a, b):
        assert script.called("get_num_new_matched_tokens").count("computed") == 1
        assert [n for request, n, _ in script.called("update_state_after_alloc") if request == "computed"] == [0]
    assert engine.rig.status("computed") == "gone"
    assert_nothing_is_left(engine.rig)


@pytest.mark.usefixtures("in_production")
def test_without_a_decision_the_first_loads(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """An error of kvobs's own is no reason to end an engine."""
    a.offers["r"], b.offers["r"] = SYNC, (3 * BLOCK, False)
    rig = Rig("kvobs", a, b, kvobs={"load_policy": "fastest"})
    monkeypatch.setattr(rig.connector._side.offers._policy._choice, "decide", lambda *_: 1 // 0)
    rig.add("r")
    rig.run(3)
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc") if tokens] == [2 * BLOCK]
    assert_nothing_is_left(rig)


@pytest.mark.parametrize(("name", "cls"), [("first", LoadPolicy), ("longest", Longest), ("fastest", Fastest)])
def test_only_the_policy_that_predicts_learns(name: str, cls: type, a: Script, b: Script) -> None:
    side = Rig("kvobs", a, b, kvobs={"load_policy": name}).connector._side
    policy = side.offers._policy
    assert type(policy) is cls
    assert (policy in side.observer.observers) is (name == "fastest")
