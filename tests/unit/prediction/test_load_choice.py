"""What is decided, rule by rule; and whether it is quick, in races against the policies that do not predict."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.prediction.load_choice import COMPUTING, EXPLORED, FASTEST, REASONS, UNKNOWN, Candidate, LoadChoice
from kvobs.schema import signals
from tests.support.load_races import FIRST, LONGEST, Connector, Fastest, Race, Workload, always, race


def choice_of(*seconds: Any, loads: int = 3) -> LoadChoice:
    """Return a choice that knows of each child what a load of 1000 tokens takes; None: nothing."""
    choice = LoadChoice(len(seconds))
    for child, took in enumerate(seconds):
        for _ in range(loads if took is not None else 0):
            choice.observe(child, 1000, took)
    return choice


def offers(*rests: float | None) -> list[Candidate]:
    return [Candidate(child, 1000, rest) for child, rest in enumerate(rests)]


def test_the_least_time_until_the_request_resumes_wins() -> None:
    decision = choice_of(0.2, 0.1, 0.3).decide(offers(0.05, 0.2, 0.01), 1.0)
    assert (decision.child, decision.reason, decision.about) == (0, FASTEST, 0)
    assert decision.predicted == pytest.approx({0: 0.25, 1: 0.3, 2: 0.31})
    assert (decision.computing_s, decision.offered) == (1.0, (0, 1, 2))
    late = Candidate(0, 1000, 0.0, [(1000, 0.2), (1000, 0.5)])
    assert choice_of(0.1, 0.3).decide([late, *offers(0.0, 0.0)[1:]], None).child == 1, "what is late counts at once"


@pytest.mark.parametrize(("first", "wins"), [(0.1, 0), (0.109, 0), (0.112, 1)])
def test_first_of_about_equals_wins(first: float, wins: int) -> None:
    assert choice_of(first, 0.1).decide(offers(0.1, 0.1), None).child == wins


@pytest.mark.parametrize(
    ("load", "computes", "is_loaded"), [(0.1, 0.09, True), (0.1, 0.07, False), (0.004, 0.0025, True), (0.1, None, True)]
)
def test_nothing_is_loaded_where_computing_is_quicker(load: float, computes: float | None, is_loaded: bool) -> None:
    decision = choice_of(load).decide(offers(0.0), computes)
    assert decision.child == (0 if is_loaded else None)
    assert decision.reason == (FASTEST if is_loaded else COMPUTING)
    assert decision.about == 0, "the one that would have loaded"


def test_a_connector_of_which_nothing_is_known_is_tried_by_one_request_at_a_time() -> None:
    choice = choice_of(0.01, None, None)
    first = choice.decide(offers(0.0, 0.0, 0.0), 0.5)
    assert (first.child, first.reason) == (1, UNKNOWN)
    busy = [Candidate(1, 1000, 0.0, [(1000, 0.1)]), Candidate(2, 1000, 0.0, [(1000, 0.1)])]
    both_tried = choice.decide([*offers(0.0), *busy], 0.5)
    assert (both_tried.child, both_tried.reason) == (0, FASTEST)
    nobody_known = LoadChoice(3).decide([Candidate(0, 1000, 0.0, [(1000, 9.0)]), *busy], 0.5)
    assert (nobody_known.child, nobody_known.reason) == (None, COMPUTING), "it has taken longer than that already"
    nobody_known = LoadChoice(3).decide([Candidate(0, 1000, 0.0, [(1000, 0.1)]), *busy], 0.5)
    assert (nobody_known.child, nobody_known.reason) == (0, UNKNOWN), "as the policy first"


def test_before_the_cost_of_computing_is_known_the_first_loads() -> None:
    decision = choice_of(0.2, 0.1).decide(offers(None, None), None)
    assert (decision.child, decision.reason, decision.predicted) == (0, UNKNOWN, {})
    only_of_one = choice_of(0.001, 0.1).decide(offers(None, 0.1), None)
    assert only_of_one.child == 1, "an offer of which only the rest is unknown loses"


def test_unchosen_connector_is_tried_again_the_dearer_the_later() -> None:
    def first_trial(other: float) -> int:
        choice = choice_of(0.1, other)
        for number in range(2000):
            decision = choice.decide(offers(0.0, 0.0), None)
            if decision.reason == EXPLORED:
                assert decision.child == 1
                return number
            choice.taken(decision)
        raise AssertionError("never")

    waits = [first_trial(seconds) for seconds in (0.11, 0.2, 0.6, 100.0)]
    assert waits == sorted(waits)
    assert waits[0] == 8
    assert waits[1] == pytest.approx(20, abs=1)
    assert waits[2] == pytest.approx(100, abs=1)
    assert waits[3] == 512


def test_connector_better_than_expected_is_tried_again_at_once() -> None:
    """Even where no further trial is allowed: one quick load may be chance, two are a change."""
    choice = choice_of(0.1, 2.0)
    while (decision := choice.decide(offers(0.0, 0.0), None)).reason != EXPLORED:
        choice.taken(decision)
    choice._allowance = 1.0
    choice.taken(decision)
    assert choice._allowance < 1
    choice.observe(1, 1000, 0.02)
    again = choice.decide(offers(0.0, 0.0), None)
    assert (again.child, again.reason) == (1, EXPLORED)
    choice.taken(again)
    choice.observe(1, 1000, 0.02)
    assert choice.decide(offers(0.0, 0.0), None).child == 1
    assert choice.decide(offers(0.0, 0.0), None).reason == FASTEST


def test_connector_that_may_save_most_is_tried() -> None:
    choice = choice_of(0.5, 0.05, 0.4, loads=30)
    for _ in range(10):
        choice.taken(choice.decide(offers(0.0, 0.0, 0.0), None))
    for _ in range(3):
        choice.observe(1, 1000, 1.0)
    choice._allowance = 0.0  # until both are due
    while (decision := choice.decide(offers(0.0, 0.0, 0.0), None)).reason != EXPLORED:
        assert decision.child == 2
        choice.taken(decision)
    assert decision.child == 1


def test_former_quickest_is_tried_again_soon_then_ever_later() -> None:
    choice = choice_of(0.05, 0.5, loads=30)
    choice.taken(choice.decide(offers(0.0, 0.0), None))
    for _ in range(3):
        choice.observe(0, 1000, 10.0)  # each request that it does not load would have been almost 0.45 s quicker
    trials = []
    for number in range(250):
        decision = choice.decide(offers(0.0, 0.0), None)
        choice.taken(decision)
        if decision.reason == EXPLORED:
            assert decision.child == 0
            trials.append(number)
            choice.observe(0, 1000, 10.0)
    assert trials[0] == pytest.approx(9.5 / 0.4, rel=0.2)
    assert [later / trials[0] for later in trials] == [pytest.approx(n, rel=0.2) for n in (1, 3, 7)]


@given(st.integers(1, 5), st.integers(0, 10**6), st.integers(0, 400))
def test_trials_are_few_whatever_happens(children: int, seed: int, requests: int) -> None:
    dice, choice = random.Random(seed), LoadChoice(children)
    trials = 0
    for _ in range(requests):
        found = [
            Candidate(child, dice.randint(1, 5000), dice.choice((None, dice.random())), ())
            for child in range(children)
            if dice.random() < 0.8
        ]
        if not found:
            continue
        decision = choice.decide(found, dice.choice((None, dice.random())))
        choice.taken(decision)
        trials += decision.reason == EXPLORED
        if decision.child is not None:
            choice.observe(decision.child, 1000, dice.choice((0.001, 0.1, 10.0)))
    assert trials <= 2 * (2 + requests / 60), "one in 60, and each followed by one at most"


@given(st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 60))
def test_to_decide_changes_nothing_and_chooses_among_the_offers(children: int, seed: int, loads: int) -> None:
    dice, choice = random.Random(seed), LoadChoice(children)
    for _ in range(loads):
        choice.observe(dice.randrange(children), dice.randint(1, 5000), dice.random())
    found = [Candidate(child, dice.randint(1, 5000), dice.choice((None, dice.random()))) for child in range(children)]
    computes = dice.choice((None, dice.random()))
    before = copy.deepcopy(choice)
    decision = choice.decide(found, computes)
    assert decision == choice.decide(found, computes) == before.decide(found, computes)
    assert decision.child in (None, *range(children))
    assert (decision.child is None) == (decision.reason == COMPUTING)
    assert decision.about == (decision.child if decision.child is not None else decision.about)


def test_the_reasons_are_those_of_the_metric() -> None:
    assert signals.LOAD_DECISIONS.labels["reason"] == REASONS


def steadily(fixed: float, token: float) -> Callable[[int, int], float]:
    return lambda number, tokens: fixed + tokens * token


def is_down(number: int) -> bool:
    return number // 60 % 2 == 1


def connectors(quick: float, large: float, flapping: float) -> list[Connector]:
    """Return the three, each with the share of a prompt that it holds; the quick one never has more than 256 tokens."""
    return [
        Connector(lambda number, prompt: min(256, int(prompt * quick)), steadily(2e-3, 5e-6)),
        Connector(lambda number, prompt: int(prompt * large), steadily(80e-3, 8e-6)),
        Connector(
            lambda number, prompt: int(prompt * flapping),
            lambda number, tokens: 0.6 if is_down(number) else 5e-3 + tokens * 10e-6,
        ),
    ]


WORKLOADS = {
    "short prompts": (connectors(0.9, 0.9, 0.9), Workload((300, 800), requests=1800)),
    "long prompts": (connectors(0.9, 0.95, 0.6), Workload((4000, 8000), requests=1800, every_s=0.2)),
    "all lengths": (connectors(0.9, 0.95, 0.6), Workload((300, 5000), requests=1800, every_s=0.2)),
    "the flapping one has most": (connectors(0.1, 0.5, 0.95), Workload((1500, 2500), requests=1800, every_s=0.1)),
}


def races(name: str) -> tuple[dict[str, Race], dict[str, Race]]:
    children, workload = WORKLOADS[name]
    policies = {"first": FIRST, "longest": LONGEST, "fastest": Fastest(len(children))}
    fixed = {"none": always(None), **{str(child): always(child) for child in range(len(children))}}
    return (
        {policy: race(of, children, workload) for policy, of in policies.items()},
        {policy: race(of, children, workload) for policy, of in fixed.items()},
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_fastest_is_no_worse_than_the_better_policy(name: str) -> None:
    """Most of the regret is paid where the flapping one is 25 times slower than what it wins when it is up."""
    found, of_fixed = races(name)
    for what in ("p50", "p95"):
        better = min(getattr(found["first"], what), getattr(found["longest"], what))
        assert getattr(found["fastest"], what) <= 1.03 * better, what
    assert found["fastest"].trials() <= 2 + len(found["fastest"].seconds) / 40
    best = min(each.mean for each in of_fixed.values())
    assert found["fastest"].mean / best - 1 < (0.1 if name == "short prompts" else 0.05)


def test_fastest_is_better_where_neither_policy_is_always_right() -> None:
    gains = {}
    for name, what in (("short prompts", "p50"), ("all lengths", "mean"), ("the flapping one has most", "p50")):
        found, _ = races(name)
        others = [getattr(found[other], what) for other in ("first", "longest")]
        gains[name] = getattr(found["fastest"], what) / min(others)
    assert max(gains.values()) < 0.99, gains
    assert gains["all lengths"] < 0.9, gains


CHANGES_AT, BACK_AT = 200, 400


def changing(factor: float) -> list[Connector]:
    """Return two connectors, the better of which is slow between two requests."""

    def seconds(number: int, tokens: int) -> float:
        return (factor if CHANGES_AT <= number < BACK_AT else 1) * (5e-3 + tokens * 10e-6)

    return [
        Connector(lambda number, prompt: int(prompt * 0.9), seconds),
        Connector(lambda number, prompt: int(prompt * 0.9), steadily(20e-3, 20e-6)),
    ]


@pytest.mark.parametrize("every_s", [0.002, 0.05, 1.0], ids=["many at once", "some at once", "one by one"])
@pytest.mark.parametrize("factor", [5.0, 20.0, 1000.0])
def test_connector_that_turns_slow_is_left_and_found_again(factor: float, every_s: float) -> None:
    """The time until a load is late is what it takes to see it: with very many at once more than 20 have begun."""
    begun = 20 if every_s >= 0.05 else 40
    workload = Workload((1000, 2000), requests=1600, every_s=every_s)
    found = race(Fastest(2), changing(factor), workload)
    other = race(always(1), changing(factor), workload)
    changed = range(CHANGES_AT + begun, BACK_AT)
    slow = [number for number in changed if found.seconds[number] > 1.2 * other.seconds[number] + 1e-3]
    assert len(slow) <= 2 + (BACK_AT - CHANGES_AT) / 50
    assert all((decision := found.decisions[number]) is not None and decision.reason == EXPLORED for number in slow)
    assert [decision.child for decision in found.decisions[-100:] if decision is not None].count(0) >= 90
    assert sum(found.seconds[-100:]) < 1.1 * sum(race(always(0), changing(factor), workload).seconds[-100:])
