"""The table of metrics is fit for Prometheus, and its slots are one to one with the series."""

import re

import pytest

from kvobs.schema.signals import (
    CALL_DURATION,
    CONNECTOR_WIDTH,
    LOAD_DURATION,
    LOADS,
    LOOKUPS,
    OPEN,
    OTHER,
    PROCESS_WIDTH,
    SERIES,
    SIGNALS,
    Kind,
    Scope,
    Signal,
    hook_label,
    is_timed,
    slot,
    slots,
    word,
)
from kvobs.vllm_api.hooks import HOOKS, Cadence, Side
from tests.support.numbers import locate

by_name = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
SUFFIXES = {Kind.COUNTER: r"_total", Kind.HISTOGRAM: r"_(seconds|tokens)", Kind.GAUGE: r""}


def test_names_are_unique() -> None:
    assert len({signal.name for signal in SIGNALS}) == len(SIGNALS) > 20


@by_name
def test_names_and_help_follow_the_conventions(signal: Signal) -> None:
    assert re.fullmatch(rf"kvobs_[a-z_]+{SUFFIXES[signal.kind]}", signal.name)
    assert signal.help.endswith(".")
    assert ("tokens)" in signal.help) is ("tokens" in signal.name)


@by_name
def test_label_values_are_closed_sets_of_words_or_marked_as_open(signal: Signal) -> None:
    for label, values in signal.labels.items():
        assert re.fullmatch(r"[a-z_]+", label)
        assert len(set(values)) == len(values)
        assert values is OPEN or all(re.fullmatch(r"[a-z_][a-z0-9_]*", value) for value in values)


@by_name
def test_bounds_rise_and_belong_to_histograms(signal: Signal) -> None:
    assert list(signal.bounds) == sorted(set(signal.bounds))
    assert len(signal.bounds) < (66 if signal.is_narrow else 17)
    assert signal.buckets == [bound / (1e9 if "_seconds" in signal.name else 1) for bound in signal.bounds]
    found = [signal.bucket(ns) for ns in (0, *(bound + more for bound in signal.bounds for more in (0, 1)))]
    assert found == [0, *(i + more for i in range(len(signal.bounds)) for more in (0, 1))]


def test_each_timed_hook_has_a_label_and_single_calls_share_one() -> None:
    for hook in filter(is_timed, HOOKS.values()):
        assert hook_label(hook.name) in CALL_DURATION.labels["hook"]
        assert hook_label(hook.name) == (OTHER if hook.cadence is Cadence.ONCE else hook.name)
    assert not [hook for hook in HOOKS.values() if hook.side is Side.CONFIG and is_timed(hook)]


@pytest.mark.parametrize("scope", [Scope.PROCESS, Scope.CONNECTOR])
def test_slots_and_series_are_one_to_one(scope: Scope) -> None:
    begin = 0 if scope is Scope.PROCESS else PROCESS_WIDTH + 2 * CONNECTOR_WIDTH
    place = begin
    for series in SERIES[scope]:
        assert slot(series.signal, *series.values) == series.first
        for offset in range(series.width):
            assert locate(place) == (series, offset, -1 if scope is Scope.PROCESS else 2)
            place += 1
    assert place - begin == (PROCESS_WIDTH if scope is Scope.PROCESS else CONNECTOR_WIDTH)


def test_the_slots_of_a_metric_with_one_label_are_by_its_value() -> None:
    assert slots(LOOKUPS) == {outcome: slot(LOOKUPS, outcome) for outcome in LOOKUPS.labels["outcome"]}
    with pytest.raises(ValueError, match="too many values"):
        slots(LOADS)


def test_connectors_have_their_words_one_after_another() -> None:
    assert [word(index, slot) for index in range(2) for slot in (0, CONNECTOR_WIDTH - 1)] == [
        PROCESS_WIDTH,
        PROCESS_WIDTH + CONNECTOR_WIDTH - 1,
        PROCESS_WIDTH + CONNECTOR_WIDTH,
        PROCESS_WIDTH + 2 * CONNECTOR_WIDTH - 1,
    ]


def test_a_histogram_has_slots_for_buckets_the_rest_and_the_sum() -> None:
    series = next(s for s in SERIES[Scope.CONNECTOR] if s.signal is CALL_DURATION)
    assert series.width == len(CALL_DURATION.bounds) + 2


def test_metrics_with_open_labels_have_no_slots() -> None:
    in_table = {series.signal.name for table in SERIES.values() for series in table}
    in_payloads = [signal for signal in SIGNALS if signal.scope in {Scope.CONNECTOR, Scope.PROCESS}]
    assert in_table == {signal.name for signal in in_payloads if not signal.is_open}


def test_series_stay_within_the_budget() -> None:
    """1,700 for 2 connectors and 4,000 for 5, with every series of the table in use, and for each hook an error."""
    connectors = sum(
        len(s.signal.bounds) + len(("+Inf", "sum", "count")) if s.signal.kind is Kind.HISTOGRAM else 1
        for s in SERIES[Scope.CONNECTOR]
    )
    # A vLLM calls one of each pair.
    connectors -= 2 * (len(CALL_DURATION.bounds) + 3 + 1)  # get_finished or get_transfer_results; the same of finish
    connectors -= len(LOAD_DURATION.bounds) + 3  # a connector of vLLM loads in one mode
    errors, by_rank, info = len(CALL_DURATION.labels["hook"]), 3 * 8, 1
    per_connector = connectors + errors + by_rank + info
    process = PROCESS_WIDTH + 1 + sum(signal.scope is Scope.EXPORTER for signal in SIGNALS)
    assert 2 * per_connector + process <= 1700
    assert 5 * per_connector + process <= 4000
