"""An engine with a known cost function: its steps are mixed, its prefills chunked, and what they cost is found."""

import random
from statistics import mean
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.telemetry.estimates.compute_cost import ComputeCost

BUDGET = 2048


class Cost(NamedTuple):
    """Seconds: of a step, a prefill's token and pair, a decode's token, a token of its context."""

    fixed: float
    token: float
    pair: float
    decode: float
    context: float

    def of(self, tokens: int, pairs: float, decodes: float, context: float) -> float:
        return self.fixed + tokens * self.token + pairs * self.pair + decodes * self.decode + context * self.context


class Roofline(NamedTuple):
    """A step reads the weights, and computes meanwhile: it takes as long as the longer of both, and its pairs."""

    weights: float
    token: float
    pair: float

    def of(self, tokens: int, pairs: float, decodes: float, context: float) -> float:
        return max(self.weights, (tokens + decodes) * self.token) + pairs * self.pair + context * 0


KNEE = Roofline(12e-3, 40e-6, 1.3e-9)  # at 300 tokens
GPU = Cost(8e-3, 40e-6, 1.3e-9, 30e-6, 39e-9)
CPU = Cost(3e-3, 25e-6, 4e-9, 200e-6, 20e-9)
ALIKE = Cost(5e-3, 20e-6, 5e-9, 20e-6, 5e-9)  # one price for all tokens, and for all that they attend to


class Rig:
    """An engine whose steps take what its cost function says, with noise; some take much longer."""

    def __init__(self, cost: Cost | Roofline, seed: int, decodes: int = 16, noise: float = 0.04) -> None:
        self.cost, self.noise, self.decodes, self.factor = cost, noise, decodes, 1.0
        self.estimate = ComputeCost(BUDGET)
        self.dice = random.Random(seed)
        self.running = self.rest = self.at = self.steps = 0

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        dice = self.dice
        if dice.random() < 0.1:
            self.running = dice.randint(0, 2 * self.decodes)
        decodes = self.running = max(0, min(4 * self.decodes, self.running + dice.choice((-1, 0, 0, 1))))
        context = sum(dice.randint(50, 3000) for _ in range(decodes))
        if not self.rest and dice.random() < 0.35:
            self.rest = dice.randint(*dice.choice(((1, 64), (1, 64), (1, 64), (64, 600), (600, 4000))))
            self.at = dice.choice((0, 0, dice.randint(0, 2000)))
        tokens = min(self.rest, BUDGET - decodes)
        pairs = tokens * self.at + tokens * (tokens + 1) // 2
        self.rest, self.at = self.rest - tokens, self.at + tokens
        took = self.factor * self.cost.of(tokens, pairs, decodes, context) * max(0.3, dice.gauss(1, self.noise))
        self.steps += 1
        if self.steps <= 20 or dice.random() < 0.01:
            took *= dice.uniform(1, 20)  # at first kernels are compiled; later something else runs
        if tokens or decodes:
            self.estimate.observe(took, tokens, pairs, decodes, context)

    def truth(self, tokens: int, context: int) -> float:
        decodes, held = self.estimate._decodes, self.estimate._context
        seconds, chunk = 0.0, BUDGET - round(decodes)
        while tokens:
            part = min(tokens, chunk)
            pairs = part * context + part * (part + 1) / 2
            seconds += self.factor * self.cost.of(part, pairs, decodes, held)
            tokens, context = tokens - part, context + part
        return seconds

    @property
    def error(self) -> float:
        """Return the mean error of predictions, as a share."""
        asked = [(tokens, context) for tokens in (200, 500, 1000, 1900, 5000) for context in (0, 1000)]
        predicted = [self.estimate.predict(*prefill) for prefill in asked]
        return mean(abs((p or 0) / self.truth(*prefill) - 1) for p, prefill in zip(predicted, asked, strict=True))


@pytest.mark.parametrize("cost", [GPU, CPU, ALIKE])
@pytest.mark.parametrize("decodes", [0, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_prefills_are_predicted_within_5_percent_after_500_steps(cost: Cost, decodes: int, seed: int) -> None:
    rig = Rig(cost, seed, decodes)
    rig.step(500)
    assert rig.error < 0.05
    rig.factor = 1.8  # throttled, or with a neighbour
    rig.step(500)
    assert rig.error < 0.05
    rig.decodes = 48
    rig.step(500)
    assert rig.error < 0.05


def test_an_engine_that_only_decodes_knows_no_prefill() -> None:
    estimate = ComputeCost(BUDGET)
    for _ in range(100):
        estimate.observe(0.01, 0, 0, 16, 16_000)
    assert estimate.predict(1000) is None
    assert estimate.saved(1000, 0, 1) is None


def test_nothing_far_larger_than_what_was_seen_is_predicted() -> None:
    estimate = ComputeCost(BUDGET)
    for n in range(100):
        tokens = 10 + n % 50
        estimate.observe(0.01 + tokens * 1e-5, tokens, tokens * tokens // 2, 0, 0)
    assert estimate.predict(200) is not None
    assert estimate.predict(1900) is None


def test_saved_time_is_the_difference_of_two_prefills() -> None:
    rig = Rig(CPU, 3)
    rig.step(600)
    saved = rig.estimate.saved(1000, 4000, 900)
    assert saved == pytest.approx(rig.truth(1900, 4000) - rig.truth(900, 5000), rel=0.05)
    # Within one step the decodes and the step itself cost the same with and without the load.
    assert saved == pytest.approx(1000 * CPU.token + (1000 * 4000 + 1000 * 1000 / 2) * CPU.pair, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize("decodes", [0, 1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_load_saves_nothing_if_its_step_takes_as_long_without(noise: float, decodes: int, seed: int) -> None:
    """Below the roofline's knee. Larger loads save what computing their part above it would take."""
    rig = Rig(KNEE, seed, decodes, noise)
    rig.step(600)
    for tokens, rest in [(64, 16), (64, 64), (128, 64), (200, 16)]:
        assert rig.estimate.saved(tokens, 0, rest) == pytest.approx(0, abs=1e-3 if noise else 2e-4), tokens
    for tokens, rest in [(512, 64), (900, 16), (1900, 64), (4000, 300)]:
        real = rig.truth(tokens + rest, 0) - rig.truth(rest, tokens)
        assert rig.estimate.saved(tokens, 0, rest) == pytest.approx(real, rel=0.15 if noise else 0.05), tokens


def test_without_decodes_no_step_smaller_than_any_is_predicted() -> None:
    """It may take as long as those, or nearly nothing; one step says it, and so do decodes."""
    estimate, decoding = ComputeCost(BUDGET), ComputeCost(BUDGET)
    for n in range(100):
        step = 100 + n, (100 + n) * (101 + n) // 2
        for each in (estimate, decoding):
            each.observe(0.012, *step, 0, 0)
        decoding.observe(0.012, 0, 0, 1, 100)
    assert estimate.predict(150) == pytest.approx(0.012, rel=0.01)
    assert decoding.predict(20) == pytest.approx(0.012, rel=0.01)
    assert estimate.predict(20) is None
    assert estimate.saved(100, 0, 20) is None
    estimate.observe(0.012, 20, 210, 0, 0)
    assert estimate.predict(20) == pytest.approx(0.012, rel=0.01)
    assert estimate.saved(100, 0, 20) == pytest.approx(0, abs=1e-4)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.integers(0, 4096), st.integers(0, 10**8), st.integers(0, 500), st.integers(0, 10**6)
        ),
        max_size=60,
    ),
    st.integers(1, 10_000),
    st.integers(0, 100_000),
    st.integers(0, 1000),
)
@settings(max_examples=50)
def test_predictions_are_never_negative(
    steps: list[tuple[float, int, int, int, int]], tokens: int, context: int, rest: int
) -> None:
    estimate = ComputeCost(BUDGET)
    for step in steps * 3:
        estimate.observe(*step)
    for predicted in (estimate.predict(tokens, context), estimate.saved(tokens, context, rest)):
        assert predicted is None or 0 <= predicted < float("inf")


@pytest.mark.parametrize("tokens", [0, 64])
def test_only_steps_with_an_estimate_check_it(tokens: int) -> None:
    estimate, checked = ComputeCost(BUDGET), list[float]()
    for _ in range(40):
        estimate.observe(0.01, tokens, 100 * tokens, 1, 100)
        checked.append(estimate.checked_s)
    begin = checked.count(0.0)
    assert 8 < begin < 20, "none of the first"
    assert checked[begin:] == pytest.approx([0.01 * (n + 1) for n in range(40 - begin)])


def test_predictions_are_those_that_the_constants_were_chosen_by() -> None:
    estimate, dice, seen = ComputeCost(512), random.Random(7), []
    for i in range(240):
        prefills, decodes = dice.choice((0, 1, 1, 3)), dice.choice((0, 12))
        tokens, context = prefills * dice.randint(1, 140), decodes * dice.randint(50, 900)
        pairs = tokens * dice.randint(1, 800)
        took = 0.004 + tokens * 4e-5 + pairs * 2e-9 + decodes * 3e-5 + context * 4e-8
        estimate.observe(took * dice.uniform(0.8, 1.2), tokens, pairs, decodes, context)
        if i % 40 == 39:
            seen += [estimate.predict(300, 100), estimate.predict(1300, 200)]
    seen.append(estimate.checked_s)
    assert seen == pytest.approx(
        [0.0144079, 0.0554139, 0.0166474, 0.0665133, 0.0142177, 0.0605101, 0.0164653,
         0.0661692, 0.0154261, 0.0653987, 0.0157092, 0.0629363,
         1.48556],
        rel=1e-5,
    )  # fmt: skip
