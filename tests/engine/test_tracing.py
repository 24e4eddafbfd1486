"""Spans of real servers, as a real collector receives them, by both protocols."""

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.collector import Collector, ReceivedSpan
from kvobs.testing.server import HOST, Server
from tests.engine import serving
from tests.engine.connectors import SPAN as OF_CONNECTOR
from tests.engine.metered import ASYNC, SYNC, configuration
from tests.engine.prometheus import scraping
from tests.engine.readings import Growth
from tests.engine.serving import TOKENS, ServedEngine, ask_all, eventually, of_tests, prompt, total
from tests.support.grpc_collector import GrpcCollector

pytestmark = pytest.mark.engine

CLIENT_SPAN = "cd" * 8
CLOCK_NS = 5_000_000  # by how much clocks of two processes on one machine may differ, and then some
SECRET = "s3cr3t-" + "0123456789" * 3
WHOLE = ["kv.load steered", "kv.load.rank", "kv.load.rank", "kv.lookup"]

_traces = count(1)


def sampled(share: float) -> dict[str, str]:
    """Return an environment in which so many of the traces that begin here are sampled, the clients' as they say."""
    return {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(share)}


def traced(connector: str, **tracing: Any) -> dict[str, Any]:
    """Return a configuration in which only what the tests slow down is slow, however busy the machine is."""
    config = configuration(of_tests(connector, access_key=SECRET), host_memory(), names=["steered", "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"slow_call_ms": 2000, "slow_load_ms": 5000, "tracing": tracing}
    return config


def traceparent(flags: str = "01") -> dict[str, str]:
    """Return the headers of a client with a trace of its own, as every client here."""
    return {"traceparent": f"00-{next(_traces):032x}-{CLIENT_SPAN}-{flags}"}


def trace_id(headers: Mapping[str, str]) -> str:
    return headers["traceparent"].split("-")[1]


def ask(server: Server, text: str, plan: Any = None, *, headers: Mapping[str, str] | None = None, **params: Any) -> Any:
    params = {**({"steer": {"steered": plan}} if plan else {}), **params}
    return server.complete(text, TOKENS, kv_transfer_params=params or None, headers=headers)


def arrived(collector: Collector, trace: str, *names: str) -> list[ReceivedSpan]:
    """Wait for spans of these names in a trace, and return all of it."""
    eventually(lambda: set(names) <= {span.name for span in collector.trace(trace)})
    return collector.trace(trace)


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def of(span: ReceivedSpan, attribute: str) -> Any:
    return span.attributes[f"kv_transfer.{attribute}"]


def kvobs_spans(collector: Collector) -> list[ReceivedSpan]:
    return [span for span in collector.spans if span.scope == "kvobs"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with GrpcCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(served_engine: ServedEngine, collector: Collector) -> Iterator[Server]:
    """Two ranks; of the traces that begin here one in a hundred is sampled, the clients' as they say."""
    args = ("--otlp-traces-endpoint", collector.endpoint)
    env = {**collector.env, **sampled(0.01), "OTEL_SERVICE_NAME": "kv-under-test"}
    env["OTEL_BSP_SCHEDULE_DELAY"] = "500"  # vLLM's own exporters would take 5 s
    with served_engine(traced("TracingConnector", propagate=True), *args, ranks=2, env=env) as server:
        ask(server, prompt("warm"), headers=traceparent("00"))
        yield server


def test_a_trace_holds_vllms_span_and_each_ranks_load(server: Server, collector: Collector) -> None:
    headers = traceparent("03")  # as SDKs send it: sampled, and the ids are random
    ask(server, prompt("async"), {**ASYNC, "load_ms": {"0": 5, "1": 200}}, headers=headers)
    spans = arrived(collector, trace_id(headers), "llm_request", "kv.lookup", "kv.load steered", OF_CONNECTOR)
    own = named(spans, OF_CONNECTOR)
    spans = [span for span in spans if span not in own]
    (request,), (lookup,), (load,) = (named(spans, name) for name in ("llm_request", "kv.lookup", "kv.load steered"))
    ranks = named(spans, "kv.load.rank")
    assert len(spans) == 5
    assert len({span.span_id for span in spans}) == 5
    assert {span.parent_id for span in (request, lookup, load, *own)} == {CLIENT_SPAN}
    assert {span.parent_id for span in ranks} == {load.span_id}
    assert sorted(of(span, "rank") for span in ranks) == [0, 1]
    for span in ranks:
        assert load.start_ns - CLOCK_NS <= span.start_ns < span.end_ns <= load.end_ns + CLOCK_NS
    for span in (lookup, load):
        assert request.start_ns - CLOCK_NS <= span.start_ns <= span.end_ns <= request.end_ns + CLOCK_NS
    assert lookup.end_ns <= load.start_ns
    assert 0.2e9 <= load.end_ns - load.start_ns < 2e9
    assert (of(load, "slowest_rank"), of(load, "mode"), of(load, "outcome")) == (1, "async", "ok")
    assert of(load, "tokens") == of(lookup, "tokens") == of(lookup, "offered_tokens.steered") == 64
    assert of(lookup, "offered_tokens.cpu") == 0
    assert load.attributes["gen_ai.request.id"] == request.attributes["gen_ai.request.id"]
    assert of(load, "request.id").startswith(load.attributes["gen_ai.request.id"])
    assert load.attributes["gen_ai.request.model"]
    assert {of(span, "sampling.reason") for span in (lookup, load, *ranks)} == {"parent"}
    assert load.resource == request.resource
    assert load.resource["service.name"] == "kv-under-test"


def test_prometheus_keeps_it_with_the_jobs_of_the_page(server: Server, collector: Collector, tmp_path: Path) -> None:
    (jobs,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (serving.ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    jobs = jobs.replace("localhost:8000", f"{HOST}:{server.port}")
    with scraping(tmp_path, jobs, "--enable-feature=exemplar-storage") as prometheus:
        headers = traceparent()
        ask(server, prompt("scraped"), ASYNC, headers=headers)
        assert arrived(collector, trace_id(headers), "kv.load steered")

        def kept() -> set[str]:
            found = prometheus.api(
                "query_exemplars", query="kvobs_load_duration_seconds_bucket", start=time.time() - 60, end=time.time()
            )
            return {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}

        assert eventually(lambda: trace_id(headers) in kept())
        targets = prometheus.api("targets")["activeTargets"]
        assert {target["scrapePool"]: target["lastError"] for target in targets} == {"vllm": "", "kvobs": ""}
        assert eventually(lambda: bool(prometheus.value('count({__name__=~"vllm:.*"})'))), targets
        assert prometheus.value('count({__name__=~"vllm_.*"})') is None
        assert prometheus.value("count(kvobs_build_info) by (job)") == 1


def test_a_promised_save_is_traced_on_each_rank(server: Server, collector: Collector) -> None:
    headers = traceparent()
    ask(server, prompt("save"), {"promise": True, "save_ms": {"0": 20, "1": 100}}, headers=headers)
    spans = arrived(collector, trace_id(headers), "kv.save steered")
    (save,), ranks = named(spans, "kv.save steered"), named(spans, "kv.save.rank")
    assert 0.1e9 <= save.end_ns - save.start_ns < 2e9
    assert sorted(of(span, "rank") for span in ranks) == [0, 1]
    for span in ranks:
        assert span.parent_id == save.span_id
        assert save.start_ns - CLOCK_NS <= span.start_ns < span.end_ns <= save.end_ns + CLOCK_NS


def test_slow_ranks_load_is_traced_whatever_was_sampled(server: Server, collector: Collector) -> None:
    headers = traceparent("00")
    with Growth(server, connector="steered") as grown:
        ask(server, prompt("slow"), {**SYNC, "sleep_in": "start_load_kv", "sleep_ms": {"1": 2200}}, headers=headers)
    assert grown("kvobs_slowest_rank_total", rank="1") == grown("kvobs_slowest_rank_total") == 1
    assert grown("kvobs_slow_calls_total", hook="start_load_kv") == grown("kvobs_slow_calls_total") == 1
    spans = arrived(collector, trace_id(headers), "kv.load steered", "kv.call start_load_kv")
    assert sorted(s.name for s in spans) == ["kv.call start_load_kv", "kv.load steered", "kv.load.rank", "kv.load.rank"]
    (load,), (call,) = named(spans, "kv.load steered"), named(spans, "kv.call start_load_kv")
    assert of(load, "slowest_rank") == of(call, "rank") == 1
    assert (load.parent_id, call.parent_id) == (CLIENT_SPAN, load.span_id)
    assert {of(span, "sampling.reason") for span in spans} == {"slow"}
    assert 2.2e9 <= call.end_ns - call.start_ns < 4e9


HOSTILE: list[dict[str, Any]] = [
    {"kvobs": 7},
    {"kvobs": {"traceparent": 7}},
    {"kvobs": {"traceparent": "0" * 100_000}},
    {"kvobs": {"traceparent": f"ff-{'ab' * 16}-{'cd' * 8}-01"}},
    {"kvobs": {"traceparent": "x\n" * 50}},
    {"kvobs": [[[[]]]], "other": {"deep": [{"er": None}] * 100}},
]


def test_invented_context_is_served_counted_and_leaves_no_span(server: Server, collector: Collector) -> None:
    headers = ({"traceparent": "garbage"}, {"traceparent": "00-" + "é" * 30}, {"traceparent": f"00-{'f' * 6000}-01"})
    texts = [prompt("hostile", i) for i in range(len(HOSTILE) + len(headers))]
    expected = ask_all(server, texts)
    time.sleep(2)  # one of those may be sampled
    before = len(kvobs_spans(collector))
    with Growth(server) as grown:
        for text, made_up in zip(texts, HOSTILE, strict=False):
            assert ask(server, text, headers=None, **made_up).tokens == expected[text]
        for text, own in zip(texts[len(HOSTILE) :], headers, strict=True):
            assert ask(server, text, headers=own).tokens == expected[text]
    assert grown("kvobs_malformed_contexts_total", source="params") == len(HOSTILE)
    assert grown("kvobs_malformed_contexts_total", source="headers") == len(headers)
    assert grown("kvobs_internal_errors_total") == 0
    time.sleep(2)
    assert len(kvobs_spans(collector)) == before


def test_no_prompt_header_param_or_configuration_gets_out(server: Server, collector: Collector) -> None:
    """Not into spans, metrics, the server's files or its log."""
    headers = {"authorization": f"Bearer {SECRET}", "baggage": f"k={SECRET}", "tracestate": f"v={SECRET}"}
    made_up = {"api_key": SECRET, "kvobs": {"note": SECRET, "traceparent": SECRET}}
    ids = [7 + 11 * i % 240 for i in range(200)]
    plans: list[dict[str, Any]] = [
        {**ASYNC, "load_ms": 5},
        {**SYNC, "sleep_in": "start_load_kv", "sleep_ms": 150},
        {**ASYNC, "fail": "recv"},
        {"promise": True, "save_ms": 30, "params": {"remote_key": SECRET}},
        {**ASYNC, "stray": "load"},
    ]
    traces = []
    with Growth(server) as grown:
        for i, plan in enumerate(plans):
            sent = traceparent()
            traces.append(trace_id(sent))
            ask(server, prompt(SECRET, i) + SECRET, plan, headers={**headers, **sent}, **made_up)
        params = {"steer": {"steered": plans[0]}, **made_up}
        server.complete(ids, TOKENS, kv_transfer_params=params, headers={**headers, **traceparent()})
    assert grown("kvobs_malformed_contexts_total", source="params") == len(plans) + 1
    assert arrived(collector, traces[3], "kv.save steered", "kv.save.rank")
    assert named(arrived(collector, traces[2], "kv.load steered"), "kv.load steered")
    log = server.log.read_text()
    assert "kvobs_unexpected_reports_total" in log
    assert server.scratch is not None
    files = [path.read_bytes() for path in server.scratch.rglob("*") if path.is_file()]
    out = {
        "spans": repr(kvobs_spans(collector)),
        "metrics": server.request("/metrics").decode() + server.request("/metrics/").decode(),
        "log": log,
        "files": repr(files),
    }
    assert {where for where, content in out.items() if "s3cr3t" in content or repr(ids[:8])[1:-1] in content} == set()


def test_each_sampled_trace_is_whole(server: Server, collector: Collector) -> None:
    """Of 1,000 at 1 % there are none, or more than 27, once in 20,000 runs."""
    before = {span.trace_id for span in kvobs_spans(collector)}
    plan = {"steer": {"steered": {**ASYNC, "load_ms": 2}}}
    with ThreadPoolExecutor(16) as pool:
        texts = [prompt("share", i) for i in range(1000)]
        list(pool.map(lambda text: server.complete(text, 1, kv_transfer_params=plan), texts))
    time.sleep(4)
    traces = defaultdict(list)
    for span in kvobs_spans(collector):
        if span.trace_id not in before and of(span, "sampling.reason") == "level":
            traces[span.trace_id].append(span.name)
    assert 1 <= len(traces) <= 27
    assert [sorted(names) for names in traces.values()] == [WHOLE] * len(traces)
    assert total(server, "kvobs_spans_dropped_total") == 0
