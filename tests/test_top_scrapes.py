"""What two scrapes say of the time between them, whatever happened to the server; quantiles as Prometheus has them."""

from __future__ import annotations

import math
from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from kvobs import signals
from kvobs.signals import LOAD_DURATION, LOAD_TOKENS, LOADS, LOOKUPS, OLDEST_IN_FLIGHT
from kvobs.top.scrapes import Scrape, Series, by_owner, change, has_restarted, parse, quantile
from tests.top import Engines, count

BOUNDS = (*LOAD_DURATION.buckets, math.inf)
COUNTS = st.lists(st.integers(0, 50), min_size=len(BOUNDS), max_size=len(BOUNDS))
NAMES = (
    "kvobs_lookups_total",
    "kvobs_load_duration_seconds_bucket",
    "kvobs_load_duration_seconds_sum",
    "kvobs_self_seconds_total",
    "kvobs_in_flight",
)
VALUES = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.sampled_from("abc").map(lambda c: frozenset({("connector", c)}))),
    st.integers(0, 9).map(float),
)


@given(COUNTS, st.floats(0, 1))
def test_a_quantile_is_linear_between_the_bounds(counts: list[int], q: float) -> None:
    cumulative = [float(n) for n in accumulate(counts)]
    rank = q * cumulative[-1]
    assume(rank not in (0, *cumulative))  # else there may be two bounds to choose from
    assert quantile(dict(zip(BOUNDS, cumulative, strict=True)), q) == pytest.approx(
        np.interp(rank, [0, *cumulative[:-1]], [0, *BOUNDS[:-1]])
    )


@given(st.lists(st.integers(0, 2**36), min_size=1, max_size=40), st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_observation_it_is_about(seen: list[int], percent: int) -> None:
    cumulative = [sum(ns * 1e-9 <= bound for ns in seen) for bound in BOUNDS]
    found = quantile(dict(zip(BOUNDS, map(float, cumulative), strict=True)), percent / 100)
    observed = sorted(seen)[math.ceil(percent * len(seen) / 100) - 1] * 1e-9
    at = next(i for i, bound in enumerate(BOUNDS) if observed <= bound)
    assert found is not None
    assert (0, *BOUNDS)[min(at, len(BOUNDS) - 2)] <= found * (1 + 1e-9)
    assert found <= BOUNDS[min(at, len(BOUNDS) - 2)] * (1 + 1e-9)


@pytest.mark.parametrize("buckets", [{}, {1.0: 0.0, math.inf: 0.0}, {1.0: 3.0}, {math.inf: 3.0}])
def test_without_observations_or_bounds_there_is_no_quantile(buckets: dict[float, float]) -> None:
    assert quantile(buckets, 0.5) is None


def test_a_scrape_in_the_middle_of_an_update_still_has_quantiles() -> None:
    assert quantile({1.0: 5.0, 2.0: 4.0, math.inf: 4.0}, 0.5) == 0.5


@given(VALUES, VALUES)
def test_nothing_ever_grew_by_less_than_nothing(old: dict[Series, float], new: dict[Series, float]) -> None:
    before, after = Scrape(0, 0, old), Scrape(1, 0, new)
    changed = change(before, after)
    assert changed.keys() == new.keys()
    for series, value in changed.items():
        if series[0] == "kvobs_in_flight":
            assert value == new[series]
        else:
            base = 0 if has_restarted(old, new) else old.get(series, 0)
            assert value == max(0, new[series] - base)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=8))
def test_growth_adds_up_over_scrapes_and_restarts(turns: list[tuple[bool, int]]) -> None:
    """Only a restart after which as much was counted by the next scrape can't be seen."""
    loads: Series = ("kvobs_loads_total", frozenset())
    before: Scrape | None = None
    counted, lost, value = 0.0, 0.0, 0.0
    for is_restart, n in turns:
        value = n if is_restart else value + n
        after = Scrape(0, 0, {loads: value})
        counted += change(before, after)[loads]
        if before is not None and is_restart and value >= before.values[loads]:
            lost += before.values[loads]
        before = after
    assert counted == sum(n for _, n in turns) - lost


def test_a_restart_shows_in_whole_numbers_and_in_series_that_are_gone() -> None:
    def of(**values: float) -> dict[Series, float]:
        return {(f"kvobs_{name}", frozenset()): value for name, value in values.items()}

    assert has_restarted(of(loads_total=2), of(loads_total=1))
    assert has_restarted(of(load_duration_seconds_bucket=2), of(load_duration_seconds_bucket=1))
    assert has_restarted(of(loads_total=2, in_flight=1), of(in_flight=1))
    assert not has_restarted(of(loads_total=2), of(loads_total=2, saves_total=1))
    assert not has_restarted(of(in_flight=2), of(in_flight=1))
    # Of several processes, floats may be added up in another order.
    assert not has_restarted(of(load_stall_seconds_sum=2), of(load_stall_seconds_sum=2 - 1e-12))


def test_what_kvobs_exposes_is_read_as_it_was_counted() -> None:
    engines = Engines("cpu", "disk", engines=2)
    engines.tell(lambda recorder: count(recorder, 0, LOADS, 3, "async", "ok"))
    engines.tell(lambda recorder: count(recorder, 1, LOADS, 4, "sync", "failed"), engine=1)
    engines.tell(lambda recorder: recorder.observe(1, LOAD_DURATION, 2**25, "async"), engine=1)
    owners = by_owner(change(None, engines.scrape()))
    assert owners.keys() == {(e, c) for e in "01" for c in ("", "cpu", "disk")}
    assert owners["0", "cpu"].total(LOADS) == 3
    assert owners["0", "disk"].total(LOADS) == 0
    assert owners["1", "disk"].total(LOADS, outcome="failed") == 4
    assert owners["1", "disk"].total(LOADS, outcome="ok") == 0
    assert owners["1", "disk"].total(LOAD_DURATION, "_count") == 1
    assert owners["1", "disk"].total(LOAD_DURATION, "_sum") == pytest.approx(2**25 / 1e9)
    assert 2**24 / 1e9 < (owners["1", "disk"].quantile(LOAD_DURATION, 0.5) or 0) <= 2**25 / 1e9
    assert owners["0", "cpu"].label(signals.CONNECTOR_INFO, "class") == "MeteredConnector"


def test_what_is_no_number_is_not_there() -> None:
    engines = Engines("cpu")
    engines.tell(gauges={(0, OLDEST_IN_FLIGHT, "load"): 0})
    assert "kvobs_oldest_in_flight_timestamp_seconds" in engines.text
    assert by_owner(engines.scrape().values)["0", "cpu"].values(OLDEST_IN_FLIGHT) == []


def test_other_metrics_are_left_alone_even_where_they_are_malformed() -> None:
    text = 'vllm:x{a= 1\nhtml <b>\nkvobs_load_tokens_total{connector="cpu"} 7.0\nkvobs_of_tomorrow_total 1.0\n'
    assert parse(text) == {(LOAD_TOKENS.name, frozenset({("connector", "cpu")})): 7}
    for malformed in ("kvobs_loads_total{connector", "kvobs_loads_total x", 'kvobs_skew_bucket{le="b"} 1'):
        with pytest.raises(ValueError, match=r"."):
            parse(f"{malformed.replace('skew', 'rank_skew_seconds')}\n")


@given(st.sampled_from(("", "{", '{connector="')), st.text(max_size=30))
def test_any_text_is_read_or_refused(begin: str, text: str) -> None:
    try:
        found = parse(f"{LOOKUPS.name}{begin}{text}\n")
    except ValueError:
        return
    assert all(math.isfinite(value) for value in found.values())


def test_labels_can_t_steer_a_terminal() -> None:
    text = LOOKUPS.name + '{connector="\x1b[2Jred\\n"} 1.0\n'
    assert list(parse(text)) == [(LOOKUPS.name, frozenset({("connector", "?[2Jred?")}))]
