"""A linear cost is found again from steps that follow it, whatever else is in them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.telemetry.estimates.linear_cost import LinearCost

PENALTIES = (1e-4, 1e-7, 1e-5)
Step = tuple[int, int]


def steps(number: int, seed: int = 0, most: int = 2000) -> list[Step]:
    """Return prefills of mixed sizes and contexts: tokens, and the pairs of them that attend to each other."""
    dice = random.Random(seed)
    made = []
    for _ in range(number):
        tokens = dice.randint(1, dice.choice((16, 200, most)))
        made.append((tokens, tokens * dice.choice((0, dice.randint(0, most))) + tokens * (tokens + 1) // 2))
    return made


def seconds(step: Step, fixed: float, per_token: float, per_attended: float) -> float:
    return fixed + step[0] * per_token + step[1] * per_attended


costs = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7))


@given(costs, st.integers(0, 1000))
def test_an_exact_cost_is_found(cost: tuple[float, float, float], seed: int) -> None:
    linear = LinearCost(PENALTIES)
    for step in steps(300, seed):
        linear.learn(*step, seconds(step, *cost))
    for step in steps(20, seed + 1):
        assert linear.expect(*step) == pytest.approx(seconds(step, *cost), rel=0.02)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**12), st.floats(1e-9, 1e6), st.floats(0, 10)), max_size=80
    ),
    st.booleans(),
)
def test_the_estimate_is_finite_and_positive(observed: list[tuple[int, int, float, float]], has_floor: bool) -> None:
    linear = LinearCost(PENALTIES, has_floor=has_floor)
    for tokens, attended, took, base in observed:
        linear.learn(tokens, attended, took, base)
        coefficients = (linear.fixed, linear.per_token, linear.per_attended)
        assert all(map(math.isfinite, coefficients))
        assert min(coefficients[0 if not has_floor else 1 :]) >= 0
        assert linear.expect(tokens, attended) >= 0


def test_there_is_no_estimate_before_some_steps() -> None:
    linear = LinearCost(PENALTIES)
    for n in range(9):
        assert not linear.is_ready, n
        linear.learn(20 + n, 100, 0.01)
    assert linear.is_ready


def test_the_first_step_of_a_size_is_not_learned() -> None:
    """It compiles."""
    linear = LinearCost(PENALTIES)
    for n in range(32):
        linear.learn(20 + n % 8, 1000, 1e-3)
    linear.learn(2000, 2_000_000, 90.0)
    for n in range(3):
        linear.learn(1900 + n, 2_000_000, 0.1)
    assert linear.largest == 1902
    for _ in range(16):
        linear.learn(1900, 2_000_000, 0.1)
    assert linear.expect(1900, 2_000_000) == pytest.approx(0.1, rel=0.05)


def test_many_small_steps_do_not_displace_a_few_large_ones() -> None:
    cost = (5e-3, 40e-6, 1e-9)
    linear = LinearCost(PENALTIES)
    dice = random.Random(1)
    for step in steps(100, 2):
        linear.learn(*step, seconds(step, *cost) * dice.gauss(1, 0.03))
    for _ in range(20_000):
        tokens = dice.randint(1, 16)
        linear.learn(tokens, tokens, seconds((tokens, tokens), *cost) * dice.gauss(1, 0.03))
    for step in ((2000, 2_001_000), (500, 125_250)):
        assert linear.expect(*step) == pytest.approx(seconds(step, *cost), rel=0.05)


def test_outliers_pull_by_a_few_usual_residuals_at_most() -> None:
    cost = (5e-3, 40e-6, 1e-9)
    linear = LinearCost(PENALTIES)
    dice = random.Random(3)
    for i, step in enumerate(steps(600, 4)):
        linear.learn(*step, seconds(step, *cost) * dice.gauss(1, 0.02) * (50 if i % 40 == 39 else 1))
    errors = [linear.expect(*step) / seconds(step, *cost) - 1 for step in steps(50, 5)]
    assert max(map(abs, errors)) < 0.1


def test_a_first_few_tokens_may_cost_nothing() -> None:
    """As on a GPU that waits for its memory until a step has some hundred tokens."""
    linear = LinearCost(PENALTIES, has_floor=True)
    for step in steps(500, 6):
        linear.learn(*step, 0.01 + max(0.0, (step[0] - 100) * 40e-6), 0.01)
    assert linear.fixed < 0
    assert linear.expect(1, 1) < 0.001
    assert linear.expect(1500, 1_125_000) == pytest.approx(1400 * 40e-6, rel=0.1)


def test_the_cost_is_at_least_the_lowest_for_as_many_tokens() -> None:
    linear = LinearCost(PENALTIES, has_floor=True)
    assert not linear.knows(1000)
    for step in steps(300, 8, most=1000):
        if step[0] >= 64:
            linear.learn(*step, max(0.012, step[0] * 40e-6))
    assert [linear.knows(tokens) for tokens in (1, 63, 64, 5000)] == [False, False, True, True]
    assert [linear.floor(63), linear.floor(200)] == pytest.approx([0, 0.012])
    assert linear.expect(100, 0) == linear.expect(250, 0) == linear.floor(250)
    assert linear.expect(900, 0) == pytest.approx(0.036, rel=0.02)
    linear.learn(100, 0, 1e-6)
    assert linear.floor(250) > 0.006, "one step that seems to take no time"
    for _ in range(300):
        linear.learn(100, 0, 0.024)
        linear.learn(300, 0, 0.024)
    assert linear.floor(300) == pytest.approx(0.024, rel=0.05), "throttled"


def test_a_cost_without_a_floor_has_none() -> None:
    linear = LinearCost(PENALTIES)
    for n in range(50):
        linear.learn(100 + n, 0, 0.012)
    assert (linear.floor(100), linear.knows(100)) == (0, False)


def test_unseen_coefficients_follow_the_smallest_penalty() -> None:
    of_tokens, fixed = LinearCost((1e-4, 1e-7, 1e-5)), LinearCost((1e-7, 1e-4, 1e-5))
    for linear in (of_tokens, fixed):
        for _ in range(50):
            linear.learn(100, 5050, 0.01)
    assert of_tokens.expect(50, 1275) == pytest.approx(0.005, rel=0.1)
    assert fixed.expect(50, 1275) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("has_floor", "expected"),
    [
        (False, [0.00761096, 0.00761096, 0.00791173, 0.0648298, 0.00792417, 0.067379, 0.00815465, 0.0643808,
                 0.0074973, 0.0610555, 0.0085693, 0.0802891, 0.0150348, 0.111407, 0.0140508, 0.116162]),
        (True, [0.00778025, 0.00778025, 0.00721814, 0.0693505, 0.00732116, 0.0671792, 0.00710223, 0.0650126,
                0.00698493, 0.0644175, 0.00728994, 0.0882529, 0.0144887, 0.12515, 0.0143455, 0.116294]),
    ],
)  # fmt: skip
def test_estimates_are_those_that_the_constants_were_chosen_by(has_floor: bool, expected: list[float]) -> None:
    linear, dice, seen = LinearCost(PENALTIES, has_floor=has_floor), random.Random(7), []
    for i in range(400):
        tokens = dice.randint(1, dice.choice((16, 200, 2000)))
        attended = tokens * dice.randint(0, 3000)
        took = ((1, 2)[i // 250] * max(0.008, tokens * 4e-5) + attended * 1e-8) * dice.uniform(0.8, 1.2)
        linear.learn(tokens, attended, 0.002 + took * (9 if i % 40 == 39 else 1), 0.002)
        if i % 100 in (12, 62):
            seen += [linear.expect(40, 10_000), linear.expect(1500, 10**6)]
    assert seen == pytest.approx(expected, rel=1e-5)
