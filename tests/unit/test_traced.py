"""Each span from the event that causes it to the exporter.

As in ``test_observed``: vLLM's real scheduler and aggregator, every hop pickled or packed, the test's own time.
"""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from kvobs.testing import BLOCK, Script
from tests.support.observed import BYTES_PER_TOKEN, KV, STEP_S, SYNC
from tests.support.rig import assert_nothing_is_left
from tests.support.traced import (
    CLIENT_SPAN,
    CLIENT_TRACE,
    NOT_SAMPLED,
    SAMPLED,
    Traced,
    attributes,
    ids,
    load,
    params_of,
)

# --- loads


def test_an_async_load_is_a_span_with_one_for_each_rank_in_the_clients_trace(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r-0123abcd"], b.offers["r-0123abcd"] = KV, (BLOCK, False)
    engine = Traced(monkeypatch, a, b, load_policy="longest")
    begin = engine.now_ns
    load(engine, "r-0123abcd", trace_headers=SAMPLED)
    step = int(STEP_S * 1e9)
    lookup, whole = engine.span("kv.lookup"), engine.span("kv.load one")
    ranks = engine.spans("kv.load.rank")
    assert len(engine.spans()) == 4
    for span in (lookup, whole):
        assert (ids(span)[0], ids(span)[2]) == (CLIENT_TRACE, CLIENT_SPAN)
    for span in ranks:
        assert (ids(span)[0], ids(span)[2]) == (CLIENT_TRACE, ids(whole)[1])
    assert len({ids(span)[1] for span in engine.spans()}) == 4
    own = {"request.id": "r-0123abcd", "engine": 0, "sampling.reason": "parent"}
    offered = {"offered_tokens.one": 2 * BLOCK, "offered_tokens.two": BLOCK}
    tokens = 2 * BLOCK
    assert attributes(lookup) == {
        **own, **offered, "lookups": 1, "local_tokens": 0, "outcome": "hit", "connector": "one", "tokens": tokens,
        "prompt_tokens": 4 * BLOCK + 1, "hit_rate": tokens / (4 * BLOCK + 1),
    }  # fmt: skip
    assert attributes(whole) == {
        **own, "connector": "one", "mode": "async", "outcome": "ok", "tokens": tokens,
        "bytes": tokens * BYTES_PER_TOKEN * 2, "slowest_rank": 1, "rank_skew": pytest.approx(STEP_S),
        "waited": pytest.approx(4 * STEP_S),
    }  # fmt: skip
    assert [attributes(span) for span in ranks] == [
        {**own, "connector": "one", "rank": rank, "mode": "async"} for rank in (0, 1)
    ]
    assert (lookup.start_time, lookup.end_time) == (begin + step, begin + step)
    assert (whole.start_time, whole.end_time) == pytest.approx((begin + step, begin + 4 * step), abs=1000)
    for span, steps in zip(ranks, (3, 4), strict=True):
        assert (span.start_time, span.end_time) == pytest.approx((begin + step, begin + steps * step), abs=1000)
    for span in engine.spans():
        assert span.attributes is not None
        assert span.attributes["gen_ai.request.id"] == "r"
        assert span.attributes["gen_ai.request.model"]
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "kvobs"
        assert span.status.status_code is StatusCode.UNSET


def test_why_a_connector_loads_is_on_the_lookup(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Traced(monkeypatch, a, b, load_policy="fastest")
    engine.token_s = 0.0025  # on each of two ranks
    for i in range(40):
        engine.rig.add(f"cold{i}", tokens=20 + 7 * i % 90, max_tokens=1)
        engine.step()
    a.offers["r"] = a.offers["q"] = KV
    for request in ("r", "q"):
        load(engine, request, trace_headers=SAMPLED)
    first, second = [attributes(span) for span in engine.spans("kv.lookup") if ids(span)[0] == CLIENT_TRACE]
    computing = {"predicted_computing": pytest.approx((4 * BLOCK + 1) * 0.005, rel=0.05)}
    assert {k: v for k, v in first.items() if "predicted" in k or k == "decision"} == {
        "decision": "unknown",
        **computing,
    }
    assert {k: v for k, v in second.items() if "predicted" in k or k == "decision"} == {
        "decision": "computing_is_faster",
        "predicted.one": pytest.approx(3 * STEP_S + 33 * 0.005, rel=0.1),
        **computing,
    }
    assert (first["outcome"], second["outcome"]) == ("hit", "miss")


def test_a_sync_load_ends_with_what_it_took_of_the_step(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = SYNC
    engine = Traced(monkeypatch, a, b)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step(3)
    whole, ranks = engine.span("kv.load one"), engine.spans("kv.load.rank")
    assert attributes(whole)["mode"] == "sync"
    assert [attributes(span)["rank"] for span in ranks] in ([0, 1], [1, 0])
    for span in ranks:
        assert 0 < attributes(span)["stall"] < STEP_S
        assert whole.start_time is not None
        assert whole.end_time is not None
        assert span.end_time is not None
        assert whole.start_time <= (span.start_time or 0) < span.end_time <= whole.end_time


@pytest.mark.parametrize("offset_s", [-600, -0.05, 0.05, 600])
def test_no_clock_of_a_rank_changes_a_number(offset_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an asynchronous load and a promised save; only where the spans of that rank begin."""
    names = ("load_duration", "load_waited", "load_resume_delay", "save_hold", "rank_skew", "slowest_rank")

    def numbers(rank_s: dict[int, float]) -> Any:
        a = Script("a", offers={"r": KV}, promises={"r"})
        engine = Traced(monkeypatch, a, Script("b"))
        engine.rank_s = rank_s
        load(engine, trace_headers=SAMPLED)
        for rank in (0, 1):
            a.say(rank, saved="r")
            engine.step()
        engine.step()
        spans = [
            (span.name, (span.end_time or 0) - (span.start_time or 0), attributes(span)) for span in engine.spans()
        ]
        series = [engine.series(f"kvobs_{name}{end}") for name in names for end in ("_seconds_sum", "_total")]
        return series, sorted(spans, key=lambda span: (span[0], str(span[2].get("rank"))))

    (series, spans), (expected, others) = numbers({1: offset_s}), numbers({})
    assert series == [pytest.approx(of, abs=1e-6) for of in expected]
    assert [(name, more) for name, _, more in spans] == [
        (name, pytest.approx(more, abs=1e-6)) for name, _, more in others
    ]
    assert [ns for _, ns, _ in spans] == pytest.approx([ns for _, ns, _ in others], abs=1000)
    assert len(spans) == 7


def test_without_a_clients_context_the_lookup_is_the_root_of_a_trace_for_each_request(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r"] = a.offers["q"] = KV
    engine = Traced(monkeypatch, a, b)
    load(engine, "r")
    load(engine, "q")
    lookups, loads = engine.spans("kv.lookup"), engine.spans("kv.load one")
    assert len({ids(span)[0] for span in lookups}) == 2
    for lookup, whole in zip(lookups, loads, strict=True):
        assert ids(lookup)[2] == ""
        assert (ids(whole)[0], ids(whole)[2]) == ids(lookup)[:2]
    assert {attributes(span)["sampling.reason"] for span in engine.spans()} == {"level"}


def test_a_slow_load_is_seen_whole_whatever_was_sampled(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    engine = Traced(monkeypatch, a, b, slow_load_ms=500)
    load(engine, trace_headers=NOT_SAMPLED)
    whole = engine.span("kv.load one")
    assert (ids(whole)[0], ids(whole)[2]) == (CLIENT_TRACE, CLIENT_SPAN)
    assert [attributes(span)["sampling.reason"] for span in engine.spans()] == ["slow"] * 3
    assert {ids(span)[2] for span in engine.spans("kv.load.rank")} == {ids(whole)[1]}
    assert attributes(whole)["slowest_rank"] == 1


def test_of_a_share_of_the_traces_each_is_whole(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    engine = Traced(monkeypatch, a, b)
    for request in ("r" * i for i in range(1, 25)):  # the sum of its letters makes a request's prompt
        a.offers[request] = KV
        load(engine, request)
    traces: dict[str, list[str]] = {}
    for span in engine.spans():
        traces.setdefault(ids(span)[0], []).append(span.name)
    assert 0 < len(traces) < 24
    whole = ["kv.load one", "kv.load.rank", "kv.load.rank", "kv.lookup"]
    assert all(sorted(names) == whole for names in traces.values())


# --- saves, and a decode engine


def test_a_promised_save_is_a_span_with_one_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    b.promises.add("r")
    engine = Traced(monkeypatch, a, b)
    engine.rig.add("r", max_tokens=1, trace_headers=SAMPLED)
    engine.step(2)
    b.say(0, saved="r")
    engine.step()
    b.say(1, saved="r")
    engine.step(2)
    whole, ranks = engine.span("kv.save two"), engine.spans("kv.save.rank")
    assert ids(whole)[2] == CLIENT_SPAN
    assert {ids(span)[2] for span in ranks} == {ids(whole)[1]}
    assert attributes(whole)["slowest_rank"] == 1
    assert attributes(whole)["rank_skew"] == pytest.approx(STEP_S)
    for span in ranks:
        assert span.start_time is not None
        assert span.end_time is not None
        assert whole.start_time is not None
        assert whole.end_time is not None
        assert whole.start_time <= span.start_time
        assert span.end_time <= whole.end_time


def test_a_prefill_engine_hands_its_context_on_only_where_a_child_hands_the_request_on(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.params["r"] = a.params["s"] = {"remote": 1}
    a.promises.add("r")
    engine = Traced(monkeypatch, a, b)
    params = params_of(engine, "r", trace_headers=SAMPLED)
    a.say(0, saved="r")
    a.say(1, saved="r")
    engine.step(2)
    save = engine.span("kv.save one")
    assert params == {"remote": 1, "kvobs": {"traceparent": f"00-{CLIENT_TRACE}-{ids(save)[1]}-01"}}
    assert params_of(engine, "s", trace_headers=SAMPLED)["kvobs"]["traceparent"] == SAMPLED["traceparent"]
    assert params_of(engine, "t", trace_headers=SAMPLED) is None


@pytest.mark.parametrize("headers", [None, SAMPLED])
def test_a_decode_engine_links_to_the_prefill_engines_trace_and_adopts_it_if_it_has_none(
    headers: Any, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    prefill = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
    a.offers["r"] = KV
    engine = Traced(monkeypatch, a, b)
    load(engine, trace_headers=headers, kvobs={"traceparent": prefill}, remote=1)
    whole = engine.span("kv.load one")
    (link,) = whole.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == ("12" * 16, "34" * 8)
    expected = (CLIENT_TRACE, CLIENT_SPAN) if headers else ("12" * 16, "34" * 8)
    assert (ids(whole)[0], ids(whole)[2]) == expected
    assert engine.spans("kv.lookup")[0].links == ()


@pytest.mark.parametrize("headers", [{"traceparent": "00-garbage"}, {"traceparent": "0" * 10_000}, {"traceparent": 7}])
@pytest.mark.parametrize("own", [7, {"traceparent": 7}, {"traceparent": ["x"]}, {}, None])
def test_garbage_is_no_context_and_counted_and_the_request_has_no_spans(
    headers: Any, own: Any, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r"] = KV
    a.params["r"] = {"remote": 1}
    engine = Traced(monkeypatch, a, b)
    load(engine, trace_headers=headers, kvobs=own)
    assert engine.value("kvobs_loads_total", mode="async", outcome="ok") == 1
    assert engine.spans() == []
    assert engine.value("kvobs_malformed_contexts_total", None, source="headers") == 1
    assert engine.value("kvobs_malformed_contexts_total", None, source="params") == 1
    assert_nothing_is_left(engine.rig)
