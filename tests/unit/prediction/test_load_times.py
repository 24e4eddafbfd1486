"""A connector's loads follow a line, with noise, outliers and changes: what the next one takes is predicted."""

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.prediction.load_times import _WINDOW, LoadTimes

SIZES = st.integers(16, 20_000)
SECONDS = st.floats(1e-6, 1e4)
LOADS = st.lists(st.tuples(SIZES, SECONDS), min_size=1, max_size=40)


class Cost(NamedTuple):
    """Seconds of any load, and of each token."""

    fixed: float
    token: float

    def of(self, tokens: int) -> float:
        return self.fixed + tokens * self.token


COSTS = st.builds(Cost, st.floats(1e-4, 1), st.floats(1e-7, 1e-3))


def times_of(*loads: tuple[int, float]) -> LoadTimes:
    times = LoadTimes()
    for load in loads:
        times.observe(*load)
    return times


def expected(times: LoadTimes, tokens: int) -> Any:
    return times.predict(tokens)


def learned(cost: Cost, seed: int, loads: int = 30, noise: float = 0.1, factor: float = 1.0) -> LoadTimes:
    times, dice = LoadTimes(), random.Random(seed)
    take(times, cost, dice, loads, noise=noise, factor=factor)
    return times


def take(times: LoadTimes, cost: Cost, dice: random.Random, loads: int, *, noise: float, factor: float = 1.0) -> None:
    for _ in range(loads):
        tokens = dice.randint(64, 4000)
        times.observe(tokens, factor * cost.of(tokens) * max(0.2, dice.gauss(1, noise)))


@given(COSTS, st.lists(SIZES, min_size=8, max_size=40), SIZES)
def test_a_line_is_found(cost: Cost, sizes: list[int], tokens: int) -> None:
    times = times_of(*((size, cost.of(size)) for size in (100, *sizes, 1000)))
    assert expected(times, tokens) == pytest.approx(cost.of(tokens), rel=0.1)


def test_short_loads_do_not_hide_what_long_ones_cost() -> None:
    """Where most of a load's time is fixed, as with a remote store: the first short ones leave the slope open."""
    cost = Cost(0.25, 6e-7)
    times = times_of(*((size, cost.of(size)) for size in (100, 93, 95, 89, 98, 12_313, 19_695, 1700, 100, 19_406)))
    assert [expected(times, tokens) for tokens in (50, 20_000)] == pytest.approx([0.25, 0.262], rel=0.02)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("cost", [Cost(0.002, 1e-5), Cost(0.3, 2e-6), Cost(0.001, 2e-4)], ids=str)
def test_noise_does_not_carry_it_far(cost: Cost, seed: int) -> None:
    times = learned(cost, seed)
    for tokens in (500, 2000, 4000):
        assert expected(times, tokens) == pytest.approx(cost.of(tokens), rel=0.35)


@given(LOADS, SIZES, st.integers(0, 5000))
def test_a_larger_load_never_takes_less(loads: list[tuple[int, float]], tokens: int, more: int) -> None:
    times = times_of(*loads)
    assert 0 < expected(times, tokens) <= expected(times, tokens + more)


@given(SIZES, SECONDS)
def test_the_first_load_is_what_the_next_of_its_size_takes(tokens: int, seconds: float) -> None:
    assert LoadTimes().predict(tokens) is LoadTimes().predict(tokens, [(tokens, seconds)]) is None, "before it"
    times = times_of((tokens, seconds))
    assert expected(times, tokens) == pytest.approx(seconds)
    assert seconds < expected(times, 3 * tokens) < 3 * seconds, "nothing is known of the shape"


@given(LOADS, SIZES)
def test_a_prediction_for_the_last_sizes_is_among_those_seen(loads: list[tuple[int, float]], tokens: int) -> None:
    """Whatever came before them."""
    times = times_of(*loads, *((tokens, seconds) for seconds in (0.1, 0.2, 0.3)))
    assert expected(times, tokens) == pytest.approx(0.2, rel=0.5 + 1e-9)


def test_two_loads_of_different_sizes_have_a_slope_from_the_stated_ratio_on() -> None:
    for tokens, line in ((1249, None), (1250, (1.0, 0.004))):
        times = LoadTimes()
        times._loads.extend([(1000, 5.0), (tokens, 6.0)])
        assert times._through_pairs() == (line and pytest.approx(line))


def test_an_outlier_counts_for_little() -> None:
    """Sizes below those that were seen are guessed from the line, which it may bend there."""
    errors = []
    for seed in range(400):
        dice = random.Random(seed)
        cost = Cost(10 ** dice.uniform(-4, 0), 10 ** dice.uniform(-7, -3))
        times = learned(cost, seed, noise=0)
        times.observe(1000, 10 ** dice.uniform(-2, 2) * cost.of(1000))
        take(times, cost, dice, dice.randrange(3), noise=0)
        errors.append(max(abs(expected(times, tokens) / cost.of(tokens) - 1) for tokens in (500, 1000, 4000)))
    errors.sort()
    assert errors[len(errors) * 95 // 100] < 0.03
    assert errors[-1] < 0.3


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("factor", [0.05, 0.3, 4.0, 50.0])
def test_a_change_is_followed_from_its_second_load_on(factor: float, seed: int) -> None:
    cost, dice = Cost(0.005, 1e-5), random.Random(seed)
    times = learned(cost, seed, noise=0.05)
    for loads in (2, 1, 1, 4, 12):
        take(times, cost, dice, loads, noise=0.05, factor=factor)
        for tokens in (500, 2000, 4000):
            assert expected(times, tokens) == pytest.approx(factor * cost.of(tokens), rel=0.35), loads


@given(LOADS, SIZES, st.lists(st.tuples(SIZES, st.floats(0, 1e4)), max_size=5))
def test_loads_in_progress_only_ever_raise_a_prediction(
    loads: list[tuple[int, float]], tokens: int, open_loads: list[tuple[int, float]]
) -> None:
    times = times_of(*loads)
    seconds: Any = times.predict(tokens, open_loads)
    assert seconds >= expected(times, tokens)
    for of, age in open_loads:
        again: Any = times.predict(of, open_loads)
        assert again >= age * (1 - 1e-9), "a load takes at least what it has taken so far"
    if all(age <= expected(times, of) for of, age in open_loads):
        assert seconds == expected(times, tokens), "none of them is late"


@given(st.lists(st.tuples(st.integers(-5, 20_000), st.floats(-1, 1e4)), min_size=1, max_size=40))
def test_no_number_stops_it(loads: list[tuple[int, float]]) -> None:
    times = times_of(*loads)
    assert expected(times, 0) > 0
    assert len(times._loads) <= _WINDOW


def test_predictions_are_those_that_the_constants_were_chosen_by() -> None:
    """Who changes a constant or a formula sees by how much the predictions change."""
    times, dice, seen = LoadTimes(), random.Random(7), []
    for i in range(60):
        tokens = 500 if i < 6 else dice.randint(16, 4000)
        factor = (1, 3, 0.3)[i // 20] * (6 if i % 11 == 8 else 1)
        times.observe(tokens, factor * (0.01 + tokens * 1e-5) * dice.uniform(0.7, 1.4))
        if i % 12 in (2, 9):
            seen += [times.predict(100), times.predict(1000, [(2000, 0.05)])]
    assert seen == pytest.approx(
        [0.00834015, 0.03, 0.0152776, 0.05, 0.0178753, 0.0374231, 0.0371911, 0.0694404, 0.036829, 0.0627951,
         0.0366124, 0.0585773, 0.046756, 0.070576, 0.00598906, 0.0395818, 0.00395153, 0.0340616, 0.00358816, 0.0343111],
        rel=1e-5,
    )  # fmt: skip
