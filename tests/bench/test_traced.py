"""What the parts about tracing add up to, and that they notice when nothing was traced."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kvobs.demo.server import ServerError
from tests.bench import traced, tracing
from tests.bench.receiver import Received, receiving
from tests.bench.report import Budget, Line, Verdict
from tests.bench.traced import CONFIGS, Turn

SECOND = 10**9


# --- in one process


def test_a_step_is_its_forward_and_what_is_around_it() -> None:
    around = [[i * 10_000 for i in range(101)], [i * 20_000 for i in range(101)]]
    more = [[ns + 119_000 for ns in spent] for spent in around]
    line = tracing.compared("step", 95, more, around, Budget(1.02))
    assert line.samples == pytest.approx((1 + 0.119 / 5.95, 1 + 0.119 / 6.9))
    assert (line.baseline, line.measured) == pytest.approx(((5.95 + 6.9) / 2, (5.95 + 6.9) / 2 + 0.119))
    assert line.verdict is Verdict.MET


def test_an_engine_that_did_not_trace_is_not_reported_on() -> None:
    seconds = 10
    steps = int(seconds * SECOND / tracing.LASTS_NS)
    due = seconds * 50 * 4
    tracing.check("off", steps, 0)
    tracing.check("requests", steps, due - 10)  # some are still on their way
    for level, sent in (("requests", 0), ("calls", due // 2), ("off", 1)):
        with pytest.raises(RuntimeError, match="spans were sent"):
            tracing.check(level, steps, sent)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", tracing.LEVELS)
def test_the_engine_makes_50_loads_a_second_and_traces_what_its_level_says(level: tracing.Level) -> None:
    engine = tracing.Engine(level)
    for _ in range(190):
        assert engine.step_ns() > 0
    names = [record[0] for group in engine.groups() for record in group]
    tracing.check(level, engine.steps, engine.sent)
    assert engine.sent == len(names)
    assert engine.per_second(engine.sent) == pytest.approx({"off": 0, "requests": 200}.get(level, 1900), rel=0.1)
    assert ("kv.call" in names) is (level == "calls")
    assert (engine.dropped > 0) is (level == "calls")


# --- servers


def turns(*p95: float) -> list[Turn]:
    return [Turn(100_000 / ms, ms / 2, ms, 5.0, i * SECOND, i * SECOND + SECOND // 2) for i, ms in enumerate(p95)]


def completion(line: Line) -> bool:
    return line.title == "completion, p95, requests"


def test_completions_may_take_a_twentieth_longer_or_as_much_as_off_and_off_are_apart() -> None:
    same = turns(100, 100, 100, 100, 100)
    for again, requests, allowed, verdict in (
        (same, turns(104, 104, 104, 104, 104), 1.05, Verdict.MET),
        (same, turns(106, 106, 106, 106, 106), 1.05, Verdict.MISSED),
        (turns(90, 110, 110, 90, 110), turns(106, 106, 106, 106, 106), 100 / 90, Verdict.MET),
    ):
        found = traced.lines({"off": same, "off again": again, "requests": requests, "calls": same})
        assert len(found) == 3 * len(traced.METRICS)
        (line,) = filter(completion, found)
        assert line.budget is not None
        assert line.budget.limit == pytest.approx(allowed)
        assert line.verdict is verdict
        assert [other.title for other in found if other.budget is not None] == [line.title]


def received(**numbers: int) -> list[Received]:
    """Return spans that ended evenly in the first two seconds, half of them between turns."""
    return [
        Received(server, "kv.load", i * 2 * SECOND // number)
        for server, number in numbers.items()
        for i in range(number)
    ]


ALL = {name: turns(1, 1) for name in CONFIGS}
NONE = dict.fromkeys(CONFIGS, 0)


def test_spans_are_counted_where_they_were_measured() -> None:
    found = traced.arrivals(ALL, received(requests=400, calls=200), {**NONE, "calls": 5000})
    assert [line.samples for line in found] == [(200, 200), (100, 100)]
    assert [line.title.partition(", ")[2] for line in found] == [
        "requests (0 others dropped)",
        "calls (5,000 others dropped)",
    ]


@pytest.mark.parametrize("numbers", [{}, {"requests": 9}, {"calls": 9}, {"requests": 9, "calls": 9, "off": 1}])
def test_an_idle_tracer_is_not_measured_nor_one_that_should_be_off(numbers: dict[str, int]) -> None:
    with pytest.raises(ServerError, match="of kvobs's spans arrived"):
        traced.arrivals(ALL, received(**numbers), NONE)


def test_the_receiver_counts_kvobs_spans_by_server_once() -> None:
    def span(scope: str, server: str) -> ReadableSpan:
        return ReadableSpan(
            "kv.lookup",
            context=SpanContext(1, 2, is_remote=False),
            resource=Resource({"service.name": server}),
            instrumentation_scope=InstrumentationScope(scope),
            start_time=1,
            end_time=7,
        )

    with receiving() as receiver:
        exporter = OTLPSpanExporter(endpoint=receiver.endpoint, insecure=True)
        assert exporter.export([span("kvobs", "calls"), span("vllm", "calls")]) is SpanExportResult.SUCCESS
        assert receiver.take() == [Received("calls", "kv.lookup", 7)]
        assert receiver.take() == []
        exporter.shutdown()
