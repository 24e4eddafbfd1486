"""A request that one engine prefills and another one decodes, kvobs on both sides, seen as one story.

NIXL's host buffers are in use, so that real blocks pass through the operation that kvobs hands it.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from kvobs.testing.collector import Collector, ReceivedSpan
from tests.engine.metered import BYTES_PER_TOKEN
from tests.engine.pair import NIXL, Pair, hand_over, pair
from tests.engine.readings import Growth
from tests.engine.serving import TOKENS, ServedEngine, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BUFFERED = {**NIXL, "kv_connector": "HostBufferedNixl", "kv_connector_module_path": "tests.engine.connectors_nixl"}
BYTES_PER_BLOCK = 32 * BYTES_PER_TOKEN
OF_PREFILL, OF_DECODE = ({"traceparent": f"00-{trace * 16}-{'cd' * 8}-01"} for trace in ("aa", "bb"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def engines(served_engine: ServedEngine, collector: Collector) -> Iterator[Pair]:
    args = ("--otlp-traces-endpoint", collector.endpoint)
    with pair(served_engine, *args, nixl=BUFFERED, env=collector.env) as engines:
        yield engines


def of_request(collector: Collector, name: str, request: str) -> ReceivedSpan:
    """Wait for the span of this name about a request, as a client knows it."""

    def found() -> list[ReceivedSpan]:
        return [s for s in collector.spans if s.name == name and s.attributes["gen_ai.request.id"].startswith(request)]

    assert eventually(lambda: bool(found())), (name, request, [s.name for s in collector.spans])
    (span,) = found()
    return span


def test_the_decode_engine_loads_what_the_prefill_one_computed(engines: Pair) -> None:
    text = prompt("hand over")
    with Growth(engines.prefill, connector="nixl") as at_prefill, Growth(engines.decode, connector="nixl") as at_decode:
        params, answer = hand_over(engines, text)
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"]
    assert at_decode("kvobs_loads_total", mode="async", outcome="ok") == at_decode("kvobs_loads_total") == 1
    assert at_decode("kvobs_load_tokens_total") == answer.prompt_tokens
    peer = f"{params['remote_host']}:{params['remote_port']}"
    assert at_decode("kvobs_peer_loads_total", peer=peer, outcome="ok") == at_decode("kvobs_peer_loads_total") == 1
    seconds = at_decode("kvobs_load_duration_seconds_sum")
    assert at_decode("kvobs_peer_load_seconds_total", peer=peer) == pytest.approx(seconds) != 0
    assert at_decode("vllm:nixl_bytes_transferred_sum", connector="nixl") > 0
    assert at_prefill("kvobs_saves_total", outcome="ok") == at_prefill("kvobs_saves_total") == 1
    assert at_prefill("kvobs_loads_total") == 0
    engines.decode.reset_prefix_cache()
    assert engines.decode.complete(text, TOKENS).tokens == answer.tokens


def test_host_buffers_copy_exactly_and_are_counted(engines: Pair) -> None:
    for length in (1, 3, 7):
        text = prompt("buffered", length)[: 32 * length]
        with Growth(engines.prefill, connector="nixl") as sent, Growth(engines.decode, connector="nixl") as got:
            params, answer = hand_over(engines, text)
        blocks = sum(len(group) for group in params["remote_block_ids"])
        assert blocks >= length
        for grown, there, other in ((sent, "d2h", "h2d"), (got, "h2d", "d2h")):
            assert grown("kvobs_block_copy_bytes_total", direction=there) == blocks * BYTES_PER_BLOCK
            assert grown("kvobs_block_copy_duration_seconds_count", direction=there) == 1
            assert grown("kvobs_block_copy_duration_seconds_sum", direction=there) > 0
            assert grown("kvobs_block_copy_bytes_total", direction=other) == 0
        assert got("kvobs_loads_total", outcome="ok") == 1
        engines.decode.reset_prefix_cache()
        assert engines.decode.complete(text, TOKENS).tokens == answer.tokens


def test_the_decode_engines_trace_links_to_the_prefill_engines(engines: Pair, collector: Collector) -> None:
    before = {"X-Request-Id": "links"}
    params, _ = hand_over(
        engines, prompt("link"), headers_to_prefill=OF_PREFILL | before, headers_to_decode=OF_DECODE | before
    )
    load, save = (of_request(collector, name, "cmpl-links") for name in ("kv.load nixl", "kv.save nixl"))
    assert params["kvobs"] == {"traceparent": f"00-{save.trace_id}-{save.span_id}-01"}
    assert (save.trace_id, load.trace_id) == ("aa" * 16, "bb" * 16)
    assert load.links == ((save.trace_id, save.span_id),)
    assert load.parent_id == "cd" * 8
    assert load.attributes["kv_transfer.outcome"] == "ok"
    remote = {name: load.attributes[f"kv_transfer.remote.{name}"] for name in ("engine_id", "host")}
    assert remote == {name: params[f"remote_{name}"] for name in ("engine_id", "host")}
    ranks = [s for s in collector.trace(load.trace_id) if s.name == "kv.load.rank"]
    assert [s.parent_id for s in ranks] == [load.span_id]


def test_both_share_a_trace_behind_a_proxy_without_headers(engines: Pair, collector: Collector) -> None:
    request = {"X-Request-Id": "proxied"}
    hand_over(engines, prompt("proxy"), headers_to_prefill=request, headers_to_decode=request)
    load, save = (of_request(collector, name, "cmpl-proxied") for name in ("kv.load nixl", "kv.save nixl"))
    assert load.trace_id == save.trace_id
    assert load.parent_id == save.span_id
    assert load.start_ns < save.end_ns, "the prefill engine holds its blocks until they are read"
    lookups = [s for s in collector.trace(load.trace_id) if s.name == "kv.lookup"]
    assert len(lookups) == 2
    assert {s.resource["vllm.process_id"] for s in (load, save)} == {s.resource["vllm.process_id"] for s in lookups}


def without_ours(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "kvobs"}


def made_up(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "kvobs": {"traceparent": 7}}


@pytest.mark.parametrize("change", [without_ours, made_up])
def test_a_transfer_works_without_the_added_parameter(change: Any, engines: Pair, collector: Collector) -> None:
    request = {"X-Request-Id": change.__name__}
    with Growth(engines.decode) as grown:
        _, answer = hand_over(
            engines, prompt(request), change=change, headers_to_prefill=request, headers_to_decode=OF_DECODE | request
        )
    assert len(answer.tokens) == TOKENS
    assert grown("kvobs_loads_total", connector="nixl", outcome="ok") == 1
    assert grown("kvobs_malformed_contexts_total", source="params") == (change is made_up)
    load = of_request(collector, "kv.load nixl", f"cmpl-{change.__name__}")
    assert (load.trace_id, load.links) == ("bb" * 16, ())
