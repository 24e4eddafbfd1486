"""Each span from the event that causes it to the exporter.

As in ``test_observed``: vLLM's real scheduler and aggregator, every hop pickled or packed, the test's own time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvobs.testing import BLOCK, Script
from tests.support.rig import assert_nothing_is_left, child_config
from tests.unit.test_observed import BYTES_PER_TOKEN, KV, STEP_S, SYNC, Engine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

CLIENT_TRACE, CLIENT_SPAN = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
NOT_SAMPLED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"}


class Traced(Engine):
    """An engine whose spans end in memory."""

    def __init__(self, patch: pytest.MonkeyPatch, *scripts: Script, level: str | None = None, **more: Any) -> None:
        self.exporter = InMemorySpanExporter()
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        patch.setattr("kvobs.exporting.span_export.make_exporter", lambda _endpoint: self.exporter)
        tracing = {**more.pop("tracing", {}), **({"level": level} if level else {})}
        more.setdefault("slow_call_ms", 60_000)  # a busy machine's pause is no slow call here
        super().__init__(patch, *scripts, tracing=tracing, **more)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the spans whose names begin so, in the order of their start."""
        self._deliver()
        cutter = self.front.metrics._cutter
        assert cutter is not None
        cutter._processor.force_flush()
        found = [span for span in self.exporter.get_finished_spans() if span.name.startswith(name)]
        return sorted(found, key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    @property
    def now_ns(self) -> int:
        return int(self.now * 1e9)


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Return trace id, span id and parent's id, in hex."""
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return kvobs's own attributes, without their prefix."""
    prefix = "kv_transfer."
    return {k.removeprefix(prefix): v for k, v in (span.attributes or {}).items() if k.startswith(prefix)}


def load(engine: Traced, request: str = "r", **headers: Any) -> None:
    """Let a request load from the first child: the ranks report one and two steps after the order."""
    engine.rig.add(request, max_tokens=1, **headers)
    engine.step(2)
    engine.scripts[0].say(0, received=request)
    engine.step()
    engine.scripts[0].say(1, received=request)
    engine.step(3)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


# --- loads


def test_an_async_load_is_a_span_with_one_for_each_rank_in_the_clients_trace(
    patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r-0123abcd"], b.offers["r-0123abcd"] = KV, (BLOCK, False)
    engine = Traced(patch, a, b, load_policy="longest")
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


def test_why_a_connector_loads_is_on_the_lookup(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Traced(patch, a, b, load_policy="fastest")
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


def test_a_sync_load_ends_with_what_it_took_of_the_step(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = SYNC
    engine = Traced(patch, a, b)
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


def test_without_a_clients_context_the_lookup_is_the_root_of_a_trace_for_each_request(
    patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r"] = a.offers["q"] = KV
    engine = Traced(patch, a, b)
    load(engine, "r")
    load(engine, "q")
    lookups, loads = engine.spans("kv.lookup"), engine.spans("kv.load one")
    assert len({ids(span)[0] for span in lookups}) == 2
    for lookup, whole in zip(lookups, loads, strict=True):
        assert ids(lookup)[2] == ""
        assert (ids(whole)[0], ids(whole)[2]) == ids(lookup)[:2]
    assert {attributes(span)["sampling.reason"] for span in engine.spans()} == {"level"}


@pytest.mark.parametrize("kind", ["failed", "blocks"])
def test_a_failed_load_is_seen_whatever_was_sampled(kind: str, patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = [KV, (0, False)]
    engine = Traced(patch, a, b)
    engine.rig.add("r", trace_headers=NOT_SAMPLED)
    engine.step(2)
    if kind == "failed":
        a.say(1, failed="r")
    else:
        blocks = engine.rig.connector._side.ledger.load("r").blocks[0]
        a.bad_blocks[1] = set(blocks)
        a.say(1, received="r")
    a.say(0, received="r")
    engine.step(5)
    whole = engine.span("kv.load one")
    assert attributes(whole)["outcome"] == "failed"
    assert attributes(whole)["sampling.reason"] == "error"
    assert attributes(whole)["recomputed_tokens"] == 2 * BLOCK
    assert whole.status.status_code is StatusCode.ERROR
    failed = {attributes(s)["rank"]: (s.attributes or {}).get("error.type") for s in engine.spans("kv.load.rank")}
    assert failed == {0: None, 1: "load_failed"}
    assert engine.spans("kv.lookup") == []


def test_an_aborted_load_is_reported_when_it_is_in(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    engine = Traced(patch, a, b, ranks=1)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step(2)
    engine.rig.abort("r")
    engine.step()
    a.say(0, received="r")
    engine.step(2)
    assert attributes(engine.span("kv.load one"))["outcome"] == "aborted"


def test_a_request_that_is_not_sampled_has_no_spans(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    a.promises.add("r")
    engine = Traced(patch, a, b)
    load(engine, trace_headers=NOT_SAMPLED)
    a.say(0, saved="r")
    a.say(1, saved="r")
    engine.step(2)
    assert engine.value("kvobs_loads_total", mode="async", outcome="ok") == 1
    assert engine.value("kvobs_saves_total", outcome="ok") == 1
    assert engine.spans() == []


def test_a_slow_load_is_seen_whole_whatever_was_sampled(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    engine = Traced(patch, a, b, slow_load_ms=500)
    load(engine, trace_headers=NOT_SAMPLED)
    whole = engine.span("kv.load one")
    assert (ids(whole)[0], ids(whole)[2]) == (CLIENT_TRACE, CLIENT_SPAN)
    assert [attributes(span)["sampling.reason"] for span in engine.spans()] == ["slow"] * 3
    assert {ids(span)[2] for span in engine.spans("kv.load.rank")} == {ids(whole)[1]}
    assert attributes(whole)["slowest_rank"] == 1


@pytest.mark.parametrize(("sampler", "spans"), [("always_off", 0), ("parentbased_always_on", 8), ("traceidratio", 0)])
def test_the_environments_sampler_decides_where_nobody_else_has(
    sampler: str, spans: int, patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r"] = a.offers["q"] = KV
    patch.setenv("OTEL_TRACES_SAMPLER", sampler)
    patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.0")
    engine = Traced(patch, a, b)
    load(engine, "r")
    load(engine, "q", trace_headers=SAMPLED)
    assert len(engine.spans()) == spans


def test_of_a_share_of_the_traces_each_is_whole(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    engine = Traced(patch, a, b)
    for request in ("r" * i for i in range(1, 25)):  # the sum of its letters makes a request's prompt
        a.offers[request] = KV
        load(engine, request)
    traces: dict[str, list[str]] = {}
    for span in engine.spans():
        traces.setdefault(ids(span)[0], []).append(span.name)
    assert 0 < len(traces) < 24
    whole = ["kv.load one", "kv.load.rank", "kv.load.rank", "kv.lookup"]
    assert all(sorted(names) == whole for names in traces.values())


# --- lookups


def test_repeated_lookups_are_one_span(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = [(None, False), (None, False), (0, False)]
    engine = Traced(patch, a, b)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step(5)
    lookup = engine.span("kv.lookup")
    assert attributes(lookup)["lookups"] == 3
    assert attributes(lookup)["outcome"] == "miss"
    assert "connector" not in attributes(lookup)
    assert (lookup.end_time or 0) - (lookup.start_time or 0) == pytest.approx(2 * STEP_S * 1e9, abs=1000)


def test_a_request_that_ends_while_it_waits_has_a_lookup_too(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = (None, False)
    engine = Traced(patch, a, b)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step(2)
    engine.rig.abort("r")
    engine.step(2)
    assert attributes(engine.span("kv.lookup"))["outcome"] == "aborted"
    assert_nothing_is_left(engine.rig)


# --- saves, and a decode engine


def test_a_promised_save_is_a_span_with_one_for_each_rank(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    b.promises.add("r")
    engine = Traced(patch, a, b)
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


def params_of(engine: Traced, request: str, **add: Any) -> Any:
    """Return what the client gets at a request's end."""
    engine.rig.add(request, max_tokens=1, **add)
    finish, noted = engine.rig.connector.request_finished_all_groups, []

    def listen(*args: Any) -> Any:
        noted.append(finish(*args))
        return noted[-1]

    engine.rig.connector.request_finished_all_groups = listen
    engine.step(2)
    engine.rig.connector.request_finished_all_groups = finish
    ((_, params),) = noted
    return params


def test_a_prefill_engine_hands_its_context_on_only_where_a_child_hands_the_request_on(
    patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.params["r"] = a.params["s"] = {"remote": 1}
    a.promises.add("r")
    engine = Traced(patch, a, b)
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
    headers: Any, patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    prefill = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
    a.offers["r"] = KV
    engine = Traced(patch, a, b)
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
    headers: Any, own: Any, patch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    a.offers["r"] = KV
    a.params["r"] = {"remote": 1}
    engine = Traced(patch, a, b)
    load(engine, trace_headers=headers, kvobs=own)
    assert engine.value("kvobs_loads_total", mode="async", outcome="ok") == 1
    assert engine.spans() == []
    assert engine.value("kvobs_malformed_contexts_total", None, source="headers") == 1
    assert engine.value("kvobs_malformed_contexts_total", None, source="params") == 1
    assert_nothing_is_left(engine.rig)


# --- calls


def test_a_slow_call_is_seen_below_the_load_it_serves(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    engine = Traced(patch, a, b, slow_call_ms_by_hook={"start_load_kv": 1e-6})
    load(engine, trace_headers=SAMPLED)
    whole, calls = engine.span("kv.load one"), engine.spans("kv.call start_load_kv")
    assert {attributes(span)["sampling.reason"] for span in calls} == {"slow"}
    below = [span for span in calls if ids(span)[0] == CLIENT_TRACE]
    assert [(ids(span)[2], attributes(span)["rank"]) for span in below] == [(ids(whole)[1], 0), (ids(whole)[1], 1)]
    assert {attributes(span)["connector"] for span in below} == {"one"}
    assert len({ids(span)[0] for span in calls}) == len(calls) - 1, "any other is a trace of its own"


def test_a_slow_lookup_is_seen_with_the_lookups_it_is_part_of(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Traced(patch, a, b, slow_call_ms_by_hook={"get_num_new_matched_tokens": 1e-6})
    engine.rig.add("r", trace_headers=NOT_SAMPLED)
    engine.step(3)
    lookup, calls = engine.span("kv.lookup"), engine.spans("kv.call get_num_new_matched_tokens")
    assert attributes(lookup)["sampling.reason"] == "slow"
    assert [ids(span)[2] for span in calls] == [ids(lookup)[1]] * 2
    assert [attributes(span)["connector"] for span in calls] == ["one", "two"]


def test_a_failed_call_is_seen(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    b.raises["on_new_request"] = TimeoutError("no answer")
    engine = Traced(patch, a, b, ranks=1)
    with pytest.raises(TimeoutError):
        engine.rig.add("r", trace_headers=NOT_SAMPLED)
    b.raises.clear()
    engine.rig.add("q")
    engine.step(2)
    call = engine.span("kv.call on_new_request")
    assert ids(call)[::2] == (CLIENT_TRACE, CLIENT_SPAN)
    assert (call.attributes or {})["error.type"] == "TimeoutError"
    assert call.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("hook", ["get_num_new_matched_tokens", "start_load_kv", "save_kv_layer"])
def test_what_an_isolated_child_raised_is_seen(hook: str, patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """It shows in a number and a line of the log only."""
    for entry in ("tests.unit.test_observed.child_config", "kvobs.testing.rig.entry_of"):
        patch.setattr(entry, partial(child_config, cls="BestEffortConnector"))
    engine = Traced(patch, a, b, ranks=1, isolate=["two"])
    b.raises[hook] = TimeoutError("no answer")
    engine.rig.add("r", max_tokens=2)
    engine.step(3)
    calls = engine.spans(f"kv.call {hook}")
    assert len(calls) == len(b.called(hook)), "it goes on being called, and raises each time"
    for call in calls:
        assert (call.attributes or {})["error.type"] == "TimeoutError"
        assert attributes(call)["connector"] == "two"
        assert attributes(call)["sampling.reason"] == "error"


@pytest.mark.parametrize("layers", [False, True])
def test_with_level_calls_every_call_is_a_span(layers: bool, patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = SYNC
    engine = Traced(patch, a, b, level="calls", tracing={"layers": layers}, ranks=1)
    engine.rig.add("r", trace_headers=SAMPLED)
    engine.step()
    whole = engine.span("kv.load one")
    for name, script in (("one", a), ("two", b)):
        for hook in ("on_new_request", "get_num_new_matched_tokens", "start_load_kv", "wait_for_save"):
            calls = [s for s in engine.spans(f"kv.call {hook}") if attributes(s)["connector"] == name]
            assert len(calls) == len(script.called(hook)) == 1, hook
    layer, _ = engine.spans("kv.call wait_for_layer_load")
    assert ids(layer)[::2] == (CLIENT_TRACE, ids(whole)[1])
    if layers:
        assert attributes(layer)["layer"] == 0
    else:
        assert attributes(layer)["layers"] == 1
        assert attributes(layer)["slowest_layer"] == 0
        assert attributes(layer)["layers_duration"] == attributes(layer)["slowest_layer_duration"] > 0
    of_step = {ids(span)[0] for span in engine.spans("kv.call wait_for_save")}
    assert len(of_step) == 1
    assert of_step == {ids(span)[0] for span in engine.spans("kv.call build_connector_meta")}


def test_level_off_and_no_endpoint_trace_nothing(
    patch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.offers["r"] = KV
    a.params["r"] = {"remote": 1}
    engine = Traced(patch, a, b, level="off")
    assert engine.front.metrics._cutter is None
    assert params_of(engine, "q", trace_headers=SAMPLED) is None
    assert "nothing is traced" not in caplog.text
    patch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert Engine(patch, a, b, tracing={"level": "calls"}).front.metrics._cutter is None
    assert "tracing.level: found 'calls', but nothing is traced" in caplog.text


def test_spans_beyond_a_flush_are_counted(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Traced(patch, a, b, level="calls", ranks=1)
    for i in range(24):
        engine.rig.add(f"r{i}", trace_headers=SAMPLED)
    engine.step(2)
    assert engine.value("kvobs_spans_dropped_total", None, where="flush") > 0
    assert 64 <= len(engine.spans()) <= 4 * 64


# --- exemplars, and children that trace themselves


def test_histograms_have_exemplars_of_exported_spans_only(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = a.offers["q"] = KV
    a.promises |= {"r", "q"}
    engine = Traced(patch, a, b, slow_call_ms_by_hook={"reset_cache": 1e-6})
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
    assert engine.value("kvobs_self_seconds_total", None, where="cut") > 0


def test_a_child_that_traces_itself_finds_the_requests_context(patch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    found = []

    def look(*_args: Any) -> tuple[int, bool]:
        context = trace.get_current_span().get_span_context()
        found.append((f"{context.trace_id:032x}", f"{context.span_id:016x}"))
        return 0, False

    patch.setattr("kvobs.testing.ScriptedConnector.get_num_new_matched_tokens", look)
    for propagate in (False, True):
        engine = Traced(patch, a, b, tracing={"propagate": propagate})
        engine.rig.add("r", trace_headers=SAMPLED)
        engine.step()
    assert found == [("0" * 32, "0" * 16)] * 2 + [(CLIENT_TRACE, CLIENT_SPAN)] * 2
    assert not trace.get_current_span().get_span_context().is_valid
