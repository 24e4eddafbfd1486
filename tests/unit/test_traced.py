"""Each span from the event that causes it to the exporter.

As in ``test_observed``: vLLM's real scheduler and aggregator, every hop pickled or packed, the test's own time.
"""

from functools import partial
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvobs.probe.recorder import NEVER, Recorder
from kvobs.schema.signals import TIMED
from kvobs.telemetry.tracing.journal import RESERVED
from kvobs.testing import BLOCK, Script
from tests.support.observed import BYTES_PER_TOKEN, ENGINE, KV, STEP_S, SYNC, Observed
from tests.support.rig import assert_nothing_is_left, entry_for
from tests.support.traced import CLIENT_SPAN, CLIENT_TRACE, NOT_SAMPLED, SAMPLED, Traced, attributes, ids, load


def test_an_async_load_is_a_span_with_one_for_each_rank(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r-0123abcd"], b.offers["r-0123abcd"] = KV, (BLOCK, False)
    engine = Traced(monkeypatch, a, b, load_policy="longest")
    begin = engine.now_ns
    load(engine, "r-0123abcd", trace_headers=SAMPLED)
    step = int(STEP_S * 1e9)
    lookup, whole = engine.span("kv.lookup"), engine.span("kv.load one")
    ranks, every = engine.spans("kv.load.rank"), list[Any](engine.spans())
    assert len(every) == 4
    for span in (lookup, whole):
        assert (ids(span)[0], ids(span)[2]) == (CLIENT_TRACE, CLIENT_SPAN)
    for span in ranks:
        assert (ids(span)[0], ids(span)[2]) == (CLIENT_TRACE, ids(whole)[1])
    assert len({ids(span)[1] for span in every}) == 4
    own = {"request.id": "r-0123abcd", "engine": ENGINE, "sampling.reason": "parent"}
    offered = {"offered_tokens.one": 2 * BLOCK, "offered_tokens.two": BLOCK}
    tokens = 2 * BLOCK
    assert attributes(lookup) == {
        **own, **offered, "lookups": 1, "local_tokens": 0, "outcome": "hit", "connector": "one", "tokens": tokens,
        "prompt_tokens": 4 * BLOCK + 1, "hit_rate": tokens / (4 * BLOCK + 1),
    }  # fmt: skip
    assert attributes(whole) == {
        **own, "connector": "one", "mode": "async", "outcome": "ok", "tokens": tokens,
        "bytes": tokens * BYTES_PER_TOKEN * 2, "slowest_rank": 1, "rank_skew": pytest.approx(STEP_S),
        "waited": pytest.approx(4 * STEP_S), "queued": pytest.approx(0, abs=3600),
    }  # fmt: skip
    assert [attributes(span) for span in ranks] == [
        {**own, "connector": "one", "rank": rank, "mode": "async"} for rank in (0, 1)
    ]
    assert (lookup.start_time, lookup.end_time) == (begin + step, begin + step)
    assert (whole.start_time, whole.end_time) == pytest.approx((begin + step, begin + 4 * step), abs=1000)
    for span, steps in zip(ranks, (3, 4), strict=True):
        assert (span.start_time, span.end_time) == pytest.approx((begin + step, begin + steps * step), abs=1000)
    for span in every:
        assert span.attributes["gen_ai.request.id"] == "r"
        assert span.attributes["gen_ai.request.model"]
        assert span.instrumentation_scope.name == "kvobs"
        assert span.status.status_code is StatusCode.UNSET


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


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_load_in_the_last_step_of_its_request_is_weighed(
    tokens: int, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """The request ends before the ranks' reports are read."""
    a.offers["r"] = SYNC
    engine = Traced(monkeypatch, a, b)
    engine.rig.add("r", max_tokens=tokens)
    engine.step(3)
    said = attributes(engine.span("kv.load one"))
    assert said["waited"] == pytest.approx(engine.value("kvobs_load_duration_seconds_sum", mode="sync"))
    assert said["waited"] > 0
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("headers", [None, SAMPLED])
def test_a_decode_engine_links_to_prefill(headers: Any, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    prefill = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
    a.offers["r"] = KV
    engine = Traced(monkeypatch, a, b)
    load(engine, trace_headers=headers, kvobs={"traceparent": prefill}, remote=1)
    whole = engine.span("kv.load one")
    (link,) = whole.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == ("12" * 16, "34" * 8)
    assert (ids(whole)[0], ids(whole)[2]) == ((CLIENT_TRACE, CLIENT_SPAN) if headers else ("12" * 16, "34" * 8))
    assert engine.spans("kv.lookup")[0].links == ()


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({"traceparent": "00-garbage"}, 7),
        ({"traceparent": "0" * 10_000}, {"traceparent": 7}),
        ({"traceparent": 7}, {"traceparent": ["x"]}),
        ({"traceparent": "00-garbage"}, {}),
        ({"traceparent": "00-garbage"}, None),
    ],
)
def test_garbage_is_no_context(headers: Any, own: Any, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    a.params["r"] = {"remote": 1}
    engine = Traced(monkeypatch, a, b)
    load(engine, trace_headers=headers, kvobs=own)
    assert engine.value("kvobs_loads_total", mode="async", outcome="ok") == 1
    assert engine.spans() == []
    assert engine.value("kvobs_malformed_contexts_total", None, source="headers") == 1
    assert engine.value("kvobs_malformed_contexts_total", None, source="params") == 1
    assert_nothing_is_left(engine.rig)


def only_is_slow(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Let each call of this hook be slow, and no other."""
    limits = dict.fromkeys(TIMED, NEVER) | {hook: 1}
    monkeypatch.setattr(Recorder, "slow_ns", property(lambda _: limits, lambda *_: None), raising=False)


def test_a_slow_call_is_seen_below_the_load_it_serves(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    b.offers["r"] = KV
    only_is_slow(monkeypatch, "start_load_kv")
    engine = Traced(monkeypatch, a, b)
    load(engine, by=b, trace_headers=SAMPLED)
    whole, calls = engine.span("kv.load two"), engine.spans("kv.call start_load_kv")
    assert {attributes(span)["sampling.reason"] for span in calls} == {"slow"}
    below = [span for span in calls if ids(span)[0] == CLIENT_TRACE]
    assert [(ids(span)[2], attributes(span)["rank"]) for span in below] == [(ids(whole)[1], 0), (ids(whole)[1], 1)]
    assert {attributes(span)["connector"] for span in below} == {"two"}
    assert len({ids(span)[0] for span in calls}) == len(calls) - 1, "any other is a trace of its own"


@pytest.mark.parametrize("hook", ["get_num_new_matched_tokens", "start_load_kv", "save_kv_layer"])
def test_an_isolated_connectors_error_is_seen(hook: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """It shows in a number and a line of the log only."""
    for entry in ("tests.support.observed.entry_for", "kvobs.testing.rig.entry_of"):
        monkeypatch.setattr(entry, partial(entry_for, cls="BestEffortConnector"))
    engine = Traced(monkeypatch, a, b, ranks=1, best_effort=["two"])
    b.raises[hook] = TimeoutError("no answer")
    engine.rig.add("r", max_tokens=2)
    engine.step(3)
    calls = engine.spans(f"kv.call {hook}")
    assert len(calls) == len(b.called(hook)), "it goes on being called, and raises each time"
    for call in calls:
        assert (call.attributes or {})["error.type"] == "TimeoutError"
        assert attributes(call)["connector"] == "two"
        assert attributes(call)["sampling.reason"] == "error"


def test_with_level_calls_every_call_is_a_span(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = SYNC
    engine = Traced(monkeypatch, a, b, level="calls", ranks=1)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step()
    whole = engine.span("kv.load one")
    for name, script in (("one", a), ("two", b)):
        for hook in ("on_new_request", "get_num_new_matched_tokens", "start_load_kv", "wait_for_save"):
            calls = [s for s in engine.spans(f"kv.call {hook}") if attributes(s)["connector"] == name]
            assert len(calls) == len(script.called(hook)) == 1, hook
    layer, _ = engine.spans("kv.call wait_for_layer_load")
    assert ids(layer)[::2] == (CLIENT_TRACE, ids(whole)[1])
    assert attributes(layer)["layers"] == 1
    assert attributes(layer)["slowest_layer"] == 0
    assert attributes(layer)["layers_duration"] == attributes(layer)["slowest_layer_duration"] > 0
    of_step = {ids(span)[0] for span in engine.spans("kv.call wait_for_save")}
    assert len(of_step) == 1
    assert of_step == {ids(span)[0] for span in engine.spans("kv.call build_connector_meta")}


def test_level_off_and_no_endpoint_trace_nothing(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.params["r"] = {"remote": 1}
    engine = Traced(monkeypatch, a, b, level="off")
    engine.rig.add("r", max_tokens=1, trace_headers=SAMPLED)
    given = []
    for _ in range(2):
        engine.step()
        given += [each.kv_transfer_params for each in engine.rig.request_outputs if each.finished]
    assert given == [{"remote": 1}], "no context is handed on"
    assert engine.spans() == []
    assert "nothing is traced" not in caplog.text
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    other = Observed(monkeypatch, a, b, tracing={"level": "calls"})
    for each in (engine, other):
        assert not each.rig.connector._telemetry._recorders.page.process.engine.has_spans
    assert "tracing.level: found 'calls', but nothing is traced" in caplog.text


def test_spans_that_come_too_fast_are_counted(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Of each process so many a second are written: those of a step are more."""
    monkeypatch.setattr("kvobs.telemetry.tracing.journal.PER_SECOND", 60)
    engine = Traced(monkeypatch, a, b, level="calls", ranks=1)
    for router in (engine.rig.connector, *engine.rig.workers):
        journal = router._telemetry._recorders.tracer.journal
        journal._clock = lambda journal=journal: journal._since  # all in one moment
    for i in range(24):
        engine.rig.add(f"r{i}", trace_headers=SAMPLED)
    engine.step(2)
    assert engine.value("kvobs_spans_dropped_total", None, where="rate") > 0
    assert engine.value("kvobs_spans_dropped_total", None, where="missed") == 0
    assert len(engine.spans()) == 2 * (60 - RESERVED)


def test_exemplars_are_of_exported_spans_only(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = a.offers["q"] = KV
    a.promises |= {"r", "q"}
    only_is_slow(monkeypatch, "reset_cache")
    engine = Traced(monkeypatch, a, b)
    for request, headers in (("q", NOT_SAMPLED), ("r", SAMPLED)):
        load(engine, request, trace_headers=headers)
        a.say(0, saved=request)
        a.say(1, saved=request)
        engine.step(2)
    engine.rig.connector.reset_cache()
    engine.rig.add("s", trace_headers=NOT_SAMPLED)
    engine.step(2)
    engine.spans()
    exemplars = {}
    generate: Any = generate_latest
    parse: Any = text_string_to_metric_families
    for family in parse(generate(engine.front.registry).decode()):
        for sample in family.samples:
            if sample.exemplar is not None:
                exemplars[sample.name.removesuffix("_bucket"), sample.labels["connector"]] = sample
    loaded = exemplars.pop(("kvobs_load_duration_seconds", "one"))
    held = exemplars.pop(("kvobs_save_hold_seconds", "one"))
    for sample in (loaded, held):
        assert sample.exemplar.labels == {"trace_id": CLIENT_TRACE}
    assert loaded.labels["mode"] == "async"
    assert loaded.exemplar.value == pytest.approx(3 * STEP_S)
    assert held.exemplar.value == pytest.approx(engine.value("kvobs_save_hold_seconds_sum") / 2)
    called = {f"{ids(span)[0]}" for span in engine.spans("kv.call reset_cache")}
    assert exemplars.keys() == {("kvobs_call_duration_seconds", name) for name in ("one", "two")}
    assert {sample.exemplar.labels["trace_id"] for sample in exemplars.values()} == called
    assert {sample.labels["hook"] for sample in exemplars.values()} == {"other"}
    assert engine.value("kvobs_overhead_seconds_total", None, stage="export") > 0


def test_a_connector_that_traces_finds_the_requests_context(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    found = []

    def look(*_args: Any) -> tuple[int, bool]:
        context = trace.get_current_span().get_span_context()
        found.append((f"{context.trace_id:032x}", f"{context.span_id:016x}"))
        return 0, False

    monkeypatch.setattr("kvobs.testing.ScriptedConnector.get_num_new_matched_tokens", look)
    for propagate in (False, True):
        engine = Traced(monkeypatch, a, b, tracing={"propagate": propagate})
        engine.rig.add("r", trace_headers=SAMPLED)
        engine.step()
    assert found == [("0" * 32, "0" * 16)] * 2 + [(CLIENT_TRACE, CLIENT_SPAN)] * 2
    assert not trace.get_current_span().get_span_context().is_valid
