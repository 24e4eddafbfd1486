"""Families are made once, whoever asks for them, and take counts that are bucketed already."""

from __future__ import annotations

import time
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.utils import floatToGoString

from kvobs.export.metric_families import Buckets, Families, spread
from kvobs.schema.signals import CALL_DURATION, IN_FLIGHT, LOAD_DURATION, LOOKUPS, SAVE_HOLD, Signal

TYPES = {kind: kind for kind in (Counter, Gauge, Histogram)}


def test_an_engine_built_twice_in_one_process_starts_with_fresh_series() -> None:
    """Into the process's own registry, which refuses a name that it has."""
    for _ in range(2):
        family = Families(TYPES).make(LOOKUPS, ["x"])
        family.labels("1", "hit").inc()
        assert family.labels("1", "hit")._value.get() == 1


def test_a_family_is_made_once() -> None:
    families = Families(TYPES)
    assert families.make(LOOKUPS, ["x"]) is families.make(LOOKUPS, ["x"])
    stand_ins = families.types()
    assert stand_ins[Counter]("families_twice", "Made twice.") is stand_ins[Counter]("families_twice", "Made twice.")


def test_gauges_of_several_processes_are_the_most_recent_ones() -> None:
    assert Families(TYPES).make(IN_FLIGHT, ["x"])._multiprocess_mode == "mostrecent"


BOUNDS = LOAD_DURATION.bounds
durations = st.lists(st.integers(1, 2**36), min_size=1, max_size=30)


def bucket_of(ns: float) -> int:
    return next((i for i, k in enumerate(BOUNDS) if ns <= 2**k), len(BOUNDS))


@given(durations)
def test_what_is_spread_over_buckets_falls_into_them_and_adds_up(observed: list[int]) -> None:
    counts: dict[int, int] = {}
    for ns in observed:
        counts[bucket_of(ns)] = counts.get(bucket_of(ns), 0) + 1
    spread_out = spread(counts, sum(observed), BOUNDS)
    assert {bucket_of(value): n for value, n in spread_out} == counts
    assert sum(value * n for value, n in spread_out) == pytest.approx(sum(observed), rel=1e-4, abs=100)


def test_nothing_is_spread_over_nothing() -> None:
    assert spread({}, 0, BOUNDS) == []


class Single:
    """A histogram that takes single observations only."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, value: float) -> None:
        self.seen.append(value)


@pytest.mark.parametrize("is_direct", [True, False])
def test_slots_go_where_they_belong(is_direct: bool) -> None:
    registry = CollectorRegistry()
    histogram: Any = Histogram("h", "H.", buckets=LOAD_DURATION.buckets, registry=registry) if is_direct else Single()
    buckets = Buckets(histogram, LOAD_DURATION)
    assert buckets.is_direct is is_direct
    assert len(buckets.sinks) == len(BOUNDS) + 2
    for _ in range(2):
        buckets.sinks[0](2)
        buckets.sinks[-1](1_500_000)
        buckets.flush()
    if is_direct:
        assert registry.get_sample_value("h_count") == 4
        assert registry.get_sample_value("h_sum") == pytest.approx(0.003)
    else:
        assert histogram.seen == pytest.approx([0.00075] * 4)


def test_what_is_kept_until_the_flush_is_observed_to_the_nanosecond_and_once() -> None:
    """Several payloads of a step may add to one bucket."""
    single = Single()
    buckets = Buckets(single, LOAD_DURATION)
    for ns in (3, 4):
        buckets.sinks[0](1)
        buckets.sinks[1](2)
        buckets.sinks[-1](ns + 2 * 2 ** BOUNDS[0] + 10)
    buckets.flush()
    assert len(single.seen) == 6
    assert sum(single.seen) * 1e9 == pytest.approx(7 + 4 * 2 ** BOUNDS[0] + 20, abs=1e-3)
    buckets.flush()
    assert len(single.seen) == 6


@pytest.mark.parametrize("total", [0, 1, 2**60])
def test_what_does_not_fit_the_buckets_stays_in_them(total: int) -> None:
    """A sum and counts of different moments: the counts are right, and each value is in its bucket."""
    counts = {0: 1, 3: 2, len(BOUNDS) - 1: 1}
    spread_out = spread(counts, total, BOUNDS)
    assert [(bucket_of(value), n) for value, n in spread_out] == [*counts.items()]


def test_small_durations_of_a_wide_bucket_keep_their_sum() -> None:
    assert sum(value * n for value, n in spread({0: 2}, 2, BOUNDS)) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("names", [("_sum",), ("_buckets",)])
def test_a_histogram_of_another_library_is_observed_one_by_one_whatever_it_calls_its_parts(
    names: tuple[str, ...],
) -> None:
    histogram = Single()
    for name in names:
        setattr(histogram, name, None)
    assert not Buckets(histogram, LOAD_DURATION).is_direct


# --- exemplars


def read_back(registry: CollectorRegistry) -> list[Any]:
    """Return the samples of the only family, as who scrapes OpenMetrics reads them."""
    expose, parse = cast("Any", exposition.generate_latest), cast("Any", parser.text_string_to_metric_families)
    (family,) = parse(expose(registry).decode())
    return list(family.samples)


histograms = st.sampled_from([LOAD_DURATION, SAVE_HOLD, CALL_DURATION])


@given(histograms, st.integers(1, 2**40))
def test_an_exemplar_is_on_the_bucket_that_its_duration_fell_into(signal: Signal, ns: int) -> None:
    """As Prometheus reads it; what else is exposed does not change."""
    registry = CollectorRegistry()
    histogram = Histogram("h", "H.", buckets=signal.buckets, registry=registry)
    buckets = Buckets(histogram, signal)
    bucket = next((i for i, k in enumerate(signal.bounds) if ns <= 2**k), len(signal.bounds))
    buckets.sinks[bucket](1)
    buckets.sinks[-1](ns)
    plain = generate_latest(registry)
    buckets.mark(ns, "1" * 32)
    assert generate_latest(registry) == plain
    (sample,) = [sample for sample in read_back(registry) if sample.exemplar]
    assert sample.labels["le"] == [*map(floatToGoString, signal.buckets), "+Inf"][bucket]
    assert sample.value == 1
    assert sample.exemplar.labels == {"trace_id": "1" * 32}
    assert sample.exemplar.value == pytest.approx(ns / 1e9)
    assert float(sample.exemplar.timestamp) == pytest.approx(time.time(), abs=60)


def test_of_several_exemplars_in_a_bucket_the_last_one_is_shown() -> None:
    registry = CollectorRegistry()
    buckets = Buckets(Histogram("h", "H.", buckets=LOAD_DURATION.buckets, registry=registry), LOAD_DURATION)
    for ns, trace_id in ((1, "a"), (2**20, "b"), (2**20 + 1, "c")):
        buckets.mark(ns, trace_id)
    assert [s.exemplar.labels["trace_id"] for s in read_back(registry) if s.exemplar] == ["b", "c"]


def test_a_histogram_without_buckets_of_its_own_takes_no_exemplars() -> None:
    single = Single()
    Buckets(single, LOAD_DURATION).mark(5, "1" * 32)
    assert single.seen == []
