"""Each fault of the demo, on a real server: serving continues; top, metrics, trace name the connector or rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvobs.cli.scrapes import fetch
from kvobs.cli.summary.rows import ConnectorSums, ServerSums
from kvobs.cli.top.live import Watch
from kvobs.cli.web import url_of
from kvobs.demo.host_offload import SLOW_RANK, SLOW_S
from kvobs.demo.run import FAULTS, Demo
from kvobs.export.connector_rows import ConnectorRow
from kvobs.testing.collector import Collector, ReceivedSpan
from kvobs.testing.server import Server
from tests.engine.forked_server import ForkedServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass
class Seen:
    """What the tools said."""

    printed: StringIO = field(default_factory=StringIO)
    top: dict[str, ConnectorRow] = field(default_factory=dict)
    spans: Sequence[ReceivedSpan] = ()

    def span(self, name: str, **attributes: Any) -> ReceivedSpan:
        return next(
            span
            for span in self.spans
            if span.name == name and attributes.items() <= {**span.attributes, "error": span.error}.items()
        )


@dataclass(frozen=True)
class Watched(Demo):
    """A demo that is also looked at with ``top``, and whose spans are kept."""

    seen: Seen = field(default_factory=Seen)

    def measure(self, server: Server) -> ServerSums:
        url = url_of(server.url)
        watch = Watch(url, partial(fetch, url), 1.0)
        watch.scrape()
        sums = super().measure(server)
        watch.scrape()
        self.seen.top = {row.connector: row for row in watch.lately.connectors}
        return sums

    def show_slowest_load(self, collector: Collector) -> None:
        super().show_slowest_load(collector)
        self.seen.spans = list(collector.spans)


def run(fault: str) -> tuple[dict[str, ConnectorSums], Seen]:
    """Run the demo with a fault: it fails by itself if an answer is missing, or another one than before."""
    seen = Seen()
    demo = Watched(Console(file=seen.printed, width=200), requests=48, fault=FAULTS[fault], seen=seen)
    return {row.connector: row for row in demo.run().connectors}, seen


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    monkeypatch.setattr("kvobs.demo.run.Server", ForkedServer)


def test_a_slow_connector_is_named() -> None:
    rows, seen = run("slow-connector")
    assert rows["cpu"].loads
    assert (rows["cpu"].load_mean_s or 0) > SLOW_S > (rows["disk"].load_mean_s or 0)
    cpu, disk = seen.top["cpu"], seen.top["disk"]
    assert cpu.load_p50_s
    assert disk.load_p99_s
    assert cpu.load_p50_s > 1 > disk.load_p99_s
    load = seen.span("kv.load cpu")
    assert load.end_ns - load.start_ns > 1e9 * SLOW_S
    assert 'kvobs_load_duration_seconds{connector="cpu", mode="async"}' in seen.printed.getvalue()


def test_a_failing_connector_is_left_out_while_the_other_serves() -> None:
    rows, seen = run("failing-connector")
    assert not rows["cpu"].loads
    assert rows["cpu"].failed_loads
    assert rows["disk"].loads
    assert seen.top["cpu"].exceptions_per_s
    assert not seen.top["disk"].exceptions_per_s
    assert not seen.top["disk"].failed_loads_per_s
    failed = seen.span("kv.call update_state_after_alloc", **{"kv_transfer.connector": "cpu"}, error=True)
    assert failed.attributes["error.type"] == "ConnectionError"
    printed = seen.printed.getvalue()
    errors = 'kvobs_call_errors_total{connector="cpu", hook="update_state_after_alloc", error_type="ConnectionError"}'
    assert errors in printed
    assert 'kvobs_quarantines_total{connector="cpu"}' in printed
    assert "AssertionError" not in printed, "of OffloadingConnector, asked for results without a step's metadata"


def test_wrong_bytes_are_found_though_every_load_succeeds() -> None:
    rows, seen = run("wrong-bytes")
    assert rows["cpu"].loads
    assert not rows["cpu"].failed_loads
    printed = seen.printed.getvalue()
    assert 'kvobs_corrupt_blocks_total{connector="cpu", rank="0"}' in printed
    assert 'kvobs_corrupt_blocks_total{connector="disk"' not in printed
    assert "connector 'cpu' loaded wrong bytes on rank 0: " in printed
    assert seen.top["cpu"].state == "Corrupt"


def test_a_slow_rank_is_named() -> None:
    rows, seen = run("slow-rank")
    loads = rows["cpu"].loads
    assert loads
    assert seen.top["cpu"].slowest_rank == str(SLOW_RANK)
    assert seen.top["cpu"].slowest_rank_share == 1
    assert seen.top["cpu"].skew_p99_s
    assert seen.top["cpu"].skew_p99_s > 1
    quick, slow = (seen.span("kv.load.rank", **{"kv_transfer.rank": rank}) for rank in (0, SLOW_RANK))
    assert slow.end_ns - slow.start_ns > 1e9 * SLOW_S > quick.end_ns - quick.start_ns
    assert f'kvobs_slowest_rank_total{{connector="cpu", rank="{SLOW_RANK}"}} {loads}' in seen.printed.getvalue()
