"""What the tests of `kvobs top` share: servers whose /metrics are kvobs's own, filled as vLLM's API server does it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from kvobs.cli.scrapes import Scrape, parse, parse_vllm
from kvobs.export.http_server import Server
from kvobs.export.totals import Exposition, Totals
from kvobs.probe.increments import Increments
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import ENGINE_UP, Signal, place, slot
from kvobs.telemetry.payload.wire import ConnectorInfo, EngineInfo
from kvobs.testing.rig import base_config
from tests.support.front import Front, metered, own


class Engines:
    """An API server's metrics, and the engines that report to it what their children do."""

    def __init__(self, *names: str, engines: int = 1) -> None:
        self.names = names
        self.front = Front(*(metered(name) for name in names), engines=engines, names=list(names))

    def send(
        self,
        record: Callable[[Recorder], None] = lambda recorder: None,
        gauges: dict[tuple[Any, ...], int] | None = None,
        opened: list[list[Any]] | None = None,
        engine: int = 0,
    ) -> None:
        """Apply what one engine recorded; gauges are (child, signal, values...) -> value."""
        recorder = Recorder(len(self.names))
        record(recorder)
        taken = recorder.take()
        at = {place(child, slot(signal, *values)): value for (child, signal, *values), value in (gauges or {}).items()}
        self.front.metrics.observe(
            {"kvobs": own(taken.counts, dict.fromkeys(self.names, "m:C"), at, [*taken.opened, *(opened or [])])}, engine
        )

    @property
    def text(self) -> str:
        return generate_latest(self.front.registry).decode()

    def scrape(self, at_s: float = 0.0, vllm: "Vllm | None" = None) -> Scrape:
        text = self.text + (vllm.text if vllm is not None else "")
        return Scrape(at_s, parse(text), parse_vllm(text))


class Vllm:
    """The metrics that vLLM's own API server prints, by vLLM's own code."""

    def __init__(self, engines: int = 1) -> None:
        # Without a connector: kvobs would register its own, with threads that watch. It clears those of an earlier one.
        self._logger = PrometheusStatLogger(base_config(), list(range(engines)))

    def send(
        self, engine: int = 0, *, running: int = 0, waiting: int = 0, first_tokens_s: Sequence[float] = ()
    ) -> None:
        """Record a step of an engine."""
        iteration = IterationStats()
        iteration.time_to_first_tokens_iter = list(first_tokens_s)
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)
        self._logger.record(stats, iteration, engine_idx=engine)

    @property
    def text(self) -> str:
        lines = generate_latest(REGISTRY).decode().splitlines(keepends=True)
        return "".join(line for line in lines if "vllm:" in line)


def count(recorder: Recorder, child: int, signal: Signal, n: int, *values: str) -> None:
    recorder.count(child, slot(signal, *values), n)


def unserved(
    *,
    of_class: str = "LMCacheConnectorV1",
    role: str = "kv_both",
    hours: int = 4,
    asked: int = 50,
    loadable: int = 200,
    more: str = "",
) -> str:
    """Return a page of an engine that started some hours ago, and whose connector has served nothing."""
    return f"""
kvobs_connector_info{{engine="0",connector="cpu",class="{of_class}",role="{role}"}} 1
kvobs_lookups_total{{engine="0",connector="cpu",outcome="miss"}} {asked}
kvobs_start_time_seconds{{engine="0"}} {time.time() - hours * 3600}
kvobs_reuse_distance_tokens_count{{engine="0"}} 1000
kvobs_loadable_tokens_total{{engine="0"}} {loadable}
{more}
"""


@contextmanager
def web(answer: Callable[[str], tuple[int, str]], port: int = 0) -> Iterator[str]:
    """Run a web server, ``answer`` making status and body of a path; return its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving(engines: Engines, port: int = 0) -> Iterator[str]:
    """Serve their metrics at the path /metrics; return the address."""
    with web(lambda path: (200, engines.text) if path == "/metrics" else (404, ""), port) as address:
        yield address


@contextmanager
def exporting(
    record: Callable[[Recorder], None],
    gauges: dict[tuple[Any, ...], int],
    opened: list[list[Any]],
    names: tuple[str, ...],
    *,
    has_core: bool = True,
) -> Iterator[str]:
    """Serve what one engine recorded as its exporter does, or that of another host; return the address."""
    recorder = Recorder(len(names))
    record(recorder)
    at = {place(child, slot(signal, *values)): value for (child, signal, *values), value in gauges.items()}
    connectors = tuple(ConnectorInfo(name, "C", "kv_both") for name in names if has_core)
    totals = Totals(EngineInfo(1, 1, "tiny", 0, connectors, "first", "fail", "0.32.0", host="127.0.0.1", port=None))
    taken = recorder.take()
    totals.add(Increments(taken.counts, [*taken.opened, *opened], at))
    totals.set_exporter_gauge(ENGINE_UP, 1)
    with closing(Server("127.0.0.1", 0, Exposition(totals, lambda: None).text, lambda: (True, {}))) as server:
        yield f"127.0.0.1:{server.port}"


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Answer every request so; return the URL of the metrics."""
    with web(lambda _path: (status, body)) as address:
        yield f"http://{address}/metrics"
