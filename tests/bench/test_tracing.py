"""What the part about tracing adds up to, and that it notices when nothing was traced."""

from __future__ import annotations

import pytest

from kvobs.telemetry.tracing.journal import PER_SECOND, RESERVED
from tests.bench import tracing
from tests.bench.report import Budget, Verdict
from tests.bench.steps import LASTS_NS

SECOND = 10**9


def test_a_step_is_its_forward_and_what_is_around_it() -> None:
    around = [[i * 10_000 for i in range(101)], [i * 20_000 for i in range(101)]]
    more = [[ns + 119_000 for ns in spent] for spent in around]
    line = tracing.compared("step", 95, more, around, Budget(1.02))
    assert line.samples == pytest.approx((1 + 0.119 / 5.95, 1 + 0.119 / 6.9))
    assert line.baselines == pytest.approx([5.95, 6.9])
    assert line.verdict is Verdict.MET


def test_an_engine_that_did_not_trace_is_not_reported_on() -> None:
    seconds = 10
    steps = int(seconds * SECOND / LASTS_NS)
    due = seconds * 50 * 4
    tracing.check("off", steps, 0)
    tracing.check("requests", steps, due - 10)  # some are still on their way
    for level, sent in (("requests", 0), ("calls", due // 2), ("off", 1)):
        with pytest.raises(RuntimeError, match="spans were sent"):
            tracing.check(level, steps, sent)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", tracing.LEVELS)
def test_fifty_loads_a_second_are_traced_as_their_level_demands(level: tracing.Level) -> None:
    engine = tracing.Engine(level)
    for _ in range(400):
        assert engine.step_ns() > 0
    names = [record.name for group in engine.groups() for record in group]
    tracing.check(level, engine.steps, engine.sent)
    assert engine.sent == len(names)
    each = PER_SECOND + engine.per_second(PER_SECOND - RESERVED)  # that may be written at once
    expected = {"off": 0, "requests": 200, "calls": each * (1 + tracing.RANKS)}
    assert engine.per_second(engine.sent) == pytest.approx(expected[level], rel=0.1)
    assert ("kv.call" in names) is (level == "calls")
    assert (engine.dropped > 0) is (level == "calls")
