"""/metrics of the exporter is /metrics of the API server: the same samples from the same payloads."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import vllm
from hypothesis import given, settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from kvobs.export.exposition import FRESH_S, Exposition
from kvobs.export.totals import Totals
from kvobs.schema import signals, spans
from kvobs.schema.signals import LOAD_DURATION, Kind, place, slot
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.wire import Increments
from tests.support.contexts import record
from tests.support.front import Front, metered
from tests.support.payloads import CONNECTORS, engine, numbers

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def exposition(totals: Totals, clock: Any = None) -> Exposition:
    return Exposition(totals, lambda: None, *([clock] if clock else []))


def samples(families: Any) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
        and family.name not in ("kvobs_apply", "process", "python_info")
        and sample.name.startswith("kvobs_")
        and not sample.name.startswith(("kvobs_self_seconds", "kvobs_engine_up"))
    }


@pytest.fixture(scope="module")
def front() -> Any:
    def make() -> Front:
        return Front(metered("a"), metered("b"), names=list(CONNECTORS))

    return make


@given(st.lists(numbers(), max_size=4))
@settings(max_examples=40, deadline=None)
def test_it_has_the_samples_of_the_api_server(front: Any, parts: list[Increments]) -> None:
    api, totals = front(), Totals(engine(vllm_version=vllm.__version__))
    for part in parts:
        children = dict.fromkeys(CONNECTORS, "m:C")
        api.metrics.observe({"kvobs": KvobsStats.of(children, part).to_dict()}, 0)
        totals.add(part)
    _, text = exposition(totals).text("")
    ours, theirs = samples(plain(text.decode())), samples(api.registry.collect())
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-9, nan_ok=True), key


@given(st.lists(numbers(), max_size=4), st.integers(1, 10**6))
@settings(max_examples=40, deadline=None)
def test_totals_of_any_size_are_the_same_after_every_hop(parts: list[Increments], times: int) -> None:
    """Two ranks' payloads, merged; by msgpack, as to an API server; and, added up, by a line to an exporter."""
    children, expected, sent = dict.fromkeys(CONNECTORS, "m:C"), Totals(engine()), Increments.none()
    for part in parts:
        many = part._replace(counts={slot: n * times for slot, n in part.counts.items()})
        merged = KvobsStats.of(children, many).aggregate(KvobsStats.of(children, part._replace(gauges={})))
        arrived = KvobsStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict())))
        sent.add(arrived.increments())
        expected.add(many)
        expected.add(part)
    totals = Totals(engine())
    totals.add(wire.read(wire.from_line(wire.to_line(wire.message(sent)))))
    assert sent.counts == sum_of(parts, times + 1)
    ours, theirs = (samples(plain(exposition(one).text("")[1].decode())) for one in (totals, expected))
    assert ours == pytest.approx(theirs, rel=0, nan_ok=True)


def sum_of(parts: list[Increments], times: int) -> dict[int, int]:
    return {slot: sum(part.counts.get(slot, 0) for part in parts) * times for part in parts for slot in part.counts}


def loaded() -> Totals:
    totals = Totals(engine())
    first = place(0, slot(LOAD_DURATION, "async"))
    totals.add(
        Increments({first + LOAD_DURATION.bucket(2_000_000): 3, first + LOAD_DURATION.sum_offset: 6_000_000}, [], {})
    )
    attributes: dict[str, spans.Value] = {spans.CONNECTOR: "one", spans.MODE: "async"}
    totals.mark(record(name="kv.load", observed_ns=2_000_000, attributes=attributes), 5.0)
    return totals


def test_openmetrics_has_exemplars_at_the_same_path() -> None:
    content_type, text = exposition(loaded()).text(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families: Any = open_metrics(text.decode())  # type: ignore[no-untyped-call]
    marked = [s for f in families for s in f.samples if s.exemplar is not None]
    assert [s.labels["le"] for s in marked] == ["0.002097152"]
    assert marked[0].exemplar.labels == {"trace_id": record().trace_id}
    assert marked[0].exemplar.value == 0.002
    content_type, text = exposition(loaded()).text("text/plain")
    assert content_type.startswith("text/plain")
    assert not [s for f in plain(text.decode()) for s in f.samples if s.exemplar is not None]


def test_every_metric_of_the_table_is_announced() -> None:
    _, text = exposition(Totals(engine())).text("")
    kinds = {family.name: family.type for family in plain(text.decode())}
    for signal in signals.SIGNALS:
        name = signal.name.removesuffix("_total") if signal.kind is Kind.COUNTER else signal.name
        assert kinds[name] == signal.kind.value


def test_scrapes_at_the_same_time_get_the_same_text() -> None:
    clock, totals = Clock(), loaded()
    page = exposition(totals, clock)
    before = page.text("")
    totals.add(Increments({place(1, slot(signals.LOOKUPS, "hit")): 1}, [], {}))
    assert page.text("") == before
    assert page.text(OPENMETRICS) != before
    clock.now += FRESH_S
    assert page.text("") != before


def test_a_text_is_kept_for_a_few_forms_only() -> None:
    page = exposition(loaded(), Clock())
    for i in range(100):
        page.text(f"application/openmetrics-text;version=1.{i}.0")
    assert len(page._texts) <= 2


def test_nothing_is_infinite_but_the_last_bucket() -> None:
    _, text = exposition(loaded()).text("")
    assert all(math.isfinite(s.value) for f in plain(text.decode()) for s in f.samples)
