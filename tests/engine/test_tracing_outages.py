"""A collector that is down, dies or hangs costs spans and nothing else: serving, memory and log stay as they are."""

from __future__ import annotations

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.demo.server import Server
from tests.engine.metered import ASYNC, configuration
from tests.engine.serving import TOKENS, eventually, of_tests, prompt, resident, serve, total
from tests.support.grpc_collector import GrpcCollector

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUEUE = 128  # spans that wait for the collector at most
BATCHES = {"OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE), "OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
GROWTH_AT_MOST = 30 * 1024 * 1024  # bytes, over some 1,400 spans that were never taken


def lost(server: Server, where: str) -> float:
    return total(server, "kvobs_spans_dropped_total", where=where)


def serve_some(server: Server, about: str, requests: int = 120) -> float:
    """Send requests with loads, check the answers, and return the median of their times in seconds."""

    def ask(i: int) -> float:
        plan: dict[str, Any] = {"steer": {"steered": {**ASYNC, "load_ms": 5}}}
        begin = time.monotonic()
        answer = server.complete(prompt("outage", about, i), TOKENS, kv_transfer_params=plan)
        assert len(answer.tokens) == TOKENS
        return time.monotonic() - begin

    with ThreadPoolExecutor(4) as pool:
        return statistics.median(pool.map(ask, range(requests)))


def test_serving_is_untouched_whatever_the_collector_does(model: Path, tmp_path: Path) -> None:
    """Down from the start, there, dying midway, hanging, and there again; vLLM's own exporter is off.

    By gRPC; what the exporter for HTTP does is much the same, see ``tests/unit/export/test_span_export_failing.py``.
    """
    config = configuration(of_tests("SteeredChild"), host_memory(), names=["steered", "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {
        "slow_call_ms": 5000, "slow_load_ms": 5000, "tracing": {"level": "calls"}
    }  # fmt: skip
    with GrpcCollector() as collector:
        collector.stop()  # its port is known now
        # Not the variable for traces, which vLLM's own exporters read too.
        env = {**collector.env, **BATCHES, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with serve(model, tmp_path, config, env=env) as server:
            serve_some(server, "warm")
            down_s = serve_some(server, "down")
            assert eventually(lambda: lost(server, "export") > 0)
            collector.start()
            assert eventually(lambda: served_and_seen(server, collector))
            up_s = serve_some(server, "up")
            assert eventually(lambda: drained(server, collector))
            assert any(span.name.startswith("kv.call") for span in collector.spans)
            before = lost(server, "export")
            collector.stop()
            serve_some(server, "dead", 20)
            assert eventually(lambda: lost(server, "export") > before)
            collector.hang = True
            collector.start()
            memory = resident(server)
            hanging_s = max(serve_some(server, f"hanging {i}") for i in range(4))
            assert lost(server, "queue") > 0
            assert resident(server) - memory < GROWTH_AT_MOST
            collector.stop()
            collector.hang = False
            collector.start()
            assert eventually(lambda: served_and_seen(server, collector))
            assert max(down_s, hanging_s) < 3 * up_s + 0.05, (down_s, hanging_s, up_s)
            assert total(server, "kvobs_internal_errors_total") == 0
            collector.stop()
            collector.hang = True
            collector.start()
            serve_some(server, "at the end", 1)
            text = server.log.read_text()
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 20
    assert text.count("spans can't be exported") == 1
    assert len(re.findall(r"(?i)failed to export|transient error|retrying in", text)) <= 1, "our line quotes it"


def served_and_seen(server: Server, collector: GrpcCollector) -> bool:
    """Serve a request, and return whether a span of kvobs's has come in since."""
    before = len(collector.spans)
    serve_some(server, f"seen {before} {time.monotonic()}", 1)
    time.sleep(0.5)
    return len(collector.spans) > before


def drained(server: Server, collector: GrpcCollector) -> bool:
    """Return whether nothing more is coming in."""
    before = len(collector.spans)
    time.sleep(1)
    return len(collector.spans) == before
