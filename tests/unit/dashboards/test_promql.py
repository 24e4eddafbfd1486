"""PromQL is built from the table of signals: what is not registered can't be queried, what is built parses."""

from collections.abc import Callable
from dataclasses import replace

import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.promql import ENGINE_LABELS, Selection, ratio, share, worst
from kvobs.schema import signals
from kvobs.schema.signals import OPEN, SIGNALS, Kind, Signal, labelnames

SELECTION = Selection("5m", 'job="vllm"', 'connector="cpu"')
PARTS = {Kind.HISTOGRAM: ["_bucket", "_sum", "_count"], Kind.COUNTER: [""], Kind.GAUGE: [""]}


@st.composite
def selected(draw: st.DrawFn) -> tuple[Signal, str, dict[str, str]]:
    """Return a signal, a part of it, and values for some of its labels."""
    signal = draw(st.sampled_from(SIGNALS))
    part = draw(st.sampled_from(PARTS[signal.kind]))
    labels = {}
    own = sorted(signal.labels.keys() - {"connector"})
    for name in draw(st.lists(st.sampled_from(own), unique=True) if own else st.just([])):
        values = signal.labels[name]
        chosen = st.lists(st.sampled_from(values), min_size=1, unique=True) if values is not OPEN else st.just(["x"])
        labels[name] = "|".join(draw(chosen))
    return signal, part, labels


@given(selected())
def test_a_selector_parses_and_has_what_was_asked(choice: tuple[Signal, str, dict[str, str]]) -> None:
    signal, part, labels = choice
    parsed = promql_parser.parse(SELECTION.series(signal, part, **labels))
    assert isinstance(parsed, promql_parser.VectorSelector)
    wanted = {"job": "vllm", **labels} | ({"connector": "cpu"} if "connector" in labelnames(signal) else {})
    assert parsed.name == signal.name + part
    assert {m.name: m.value for m in parsed.matchers.matchers} == wanted
    several = {m.name for m in parsed.matchers.matchers if str(m.op) == "MatchOp.Re"}
    assert several == {name for name, value in labels.items() if "|" in value}


@given(st.sampled_from(SIGNALS), st.lists(st.sampled_from(ENGINE_LABELS), unique=True))
def test_everything_that_is_built_parses(signal: Signal, by: list[str]) -> None:
    built = {
        Kind.COUNTER: lambda: [
            *(ask(signal, *by) for ask in (SELECTION.rate, SELECTION.increase, SELECTION.count)),
            SELECTION.rates(signal), share(SELECTION.rate(signal, *by), SELECTION.rate(signal, *by)),
        ],
        Kind.GAUGE: lambda: [SELECTION.gauge(signal, *by, how=how) for how in ("sum", "max", "min")],
        Kind.HISTOGRAM: lambda: [
            SELECTION.quantile(0.99, signal, *by), SELECTION.mean(signal, *by),
            SELECTION.increase(signal, "le", part="_bucket"),
        ],
    }[signal.kind]()  # fmt: skip
    for expr in (*built, *map(worst, built), ratio(built[0], built[-1])):
        promql_parser.parse(expr)


def test_metrics_of_vllm_are_found_by_both_names() -> None:
    parsed = promql_parser.parse(SELECTION.vllm_quantile(0.5, "time_to_first_token_seconds"))
    assert '__name__=~"vllm[:_]time_to_first_token_seconds_bucket",job="vllm"' in parsed.prettify()
    assert SELECTION.vllm_rate("prompt_tokens_total", "engine").startswith("sum by (engine) (rate({__name__=~")


STRAY = replace(signals.LOADS, name="kvobs_loads_of_another_table_total")
REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "no signal": (lambda: SELECTION.rate(STRAY), "kvobs_loads_of_another_table_total is not a signal of kvobs"),
    "no label": (lambda: SELECTION.rate(signals.LOADS, "hook"), "total has no label 'hook': it has cluster, connector"),
    "no value": (lambda: SELECTION.rate(signals.LOADS, outcome="fine"), "outcome is one of ok, failed, aborted, not"),
    "no part": (lambda: SELECTION.rate(signals.LOAD_DURATION), "is a histogram: its parts are"),
    "a part": (lambda: SELECTION.rate(signals.LOADS, part="_sum"), "is a counter: its parts are"),
    "a gauge's rate": (lambda: SELECTION.rate(signals.IN_FLIGHT), "kvobs_in_flight is a gauge: it has no rate"),
    "counted gauge": (lambda: SELECTION.count(signals.IN_FLIGHT), "kvobs_in_flight is a gauge, not a counter"),
    "rates of a histogram": (lambda: SELECTION.rates(signals.LOAD_STALL), "is a histogram, not a counter"),
    "no connector": (lambda: SELECTION.rate(signals.OVERHEAD_SECONDS, "connector"), "has no label 'connector'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unregistered_names_cannot_be_queried(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()
