"""What the tests of `kvobs top` share: servers whose /metrics are kvobs's own, filled as vLLM's API server does it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from weakref import finalize

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from kvobs.cli.scrapes import parse, parse_vllm
from kvobs.export.engine import Engine
from kvobs.export.http_server import Server
from kvobs.export.numbers import Scrape
from kvobs.export.totals import Exposition, Totals
from kvobs.page import writer
from kvobs.page.description import ConnectorInfo, EngineInfo, Identity
from kvobs.probe.recorder import Recorder
from kvobs.schema import __version__
from kvobs.schema.signals import DYNAMIC_COUNTERS, ENGINE_UP, LOCAL_CACHE_TOKENS, Signal, slot
from kvobs.testing.rig import base_config
from tests.support import watched
from tests.support.front import Front, metered

CACHE_TOKENS = 5000


class Engines:
    """An API server's metrics, and the engines whose pages it reads."""

    def __init__(self, *names: str, engines: int = 1) -> None:
        self.names = names
        self.front = Front(*(metered(name) for name in names), engines=engines, names=list(names))
        self.recorders = [_recorder(self.front.config, names, i) for i in range(engines)]
        for recorder in self.recorders:
            finalize(self.front, recorder.page.leave)

    def send(
        self,
        record: Callable[[Recorder], None] = lambda recorder: None,
        gauges: dict[tuple[Any, ...], int] | None = None,
        opened: list[list[Any]] | None = None,
        engine: int = 0,
    ) -> None:
        """Let one engine record; gauges are (connector, signal, values...) -> value, ``opened`` rows of open series."""
        _record(self.recorders[engine], record, gauges or {}, opened or [])

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


def count(recorder: Recorder, index: int, signal: Signal, n: int, *values: str) -> None:
    recorder.count(index, slot(signal, *values), n)


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


def thrashing(
    *, reused: int = 40, evicted: int = 9000, loaded: int = 3000, media: tuple[str, ...] = ("cpu",), more: str = ""
) -> str:
    """Return a page of an engine whose connector evicts what prompts ask for again; of 100 tokens it is known."""
    of = 'engine="0",connector="cpu"'
    saves = "\n".join(f'kvobs_save_tokens_total{{{of},medium="{medium}"}} 9000' for medium in media)
    return f"""
kvobs_connector_info{{{of},class="OffloadingConnector",role="kv_both"}} 1
{saves}
kvobs_evicted_tokens_total{{{of},medium="cpu"}} {evicted}
kvobs_evicted_followed_tokens_total{{{of},medium="cpu"}} 100
kvobs_evicted_reused_tokens_total{{{of},medium="cpu"}} {reused}
kvobs_load_tokens_total{{{of}}} {loaded}
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
    config = watched.config(f"engine-{uuid4()}")
    recorder = _recorder(config, names, 0, None if has_core else 0)
    _record(recorder, record, gauges, opened)
    totals = Totals(Engine(Identity.of(config).server))
    totals.set_gauge(ENGINE_UP, 1)
    exposition = Exposition(lambda: [totals], lambda: None)
    with closing(Server("127.0.0.1", 0, exposition.text, lambda: (True, {}))) as server:
        yield f"127.0.0.1:{server.port}"
    recorder.page.leave()


def _recorder(config: Any, names: Sequence[str], index: int, rank: int | None = None) -> Recorder:
    """Return what records in the page of an engine's process."""
    transfer = config.kv_transfer_config
    of_engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=transfer.engine_id + (f"_dp{index}" if index else "")),
        instance_id=config.instance_id,
    )
    connectors = tuple(ConnectorInfo(name, "MeteredConnector", "kv_both") for name in names)
    info = EngineInfo(connectors, "tiny", index, "first", "recompute", "0.32.0", __version__)
    page = writer.begin(of_engine, writer.describe(info, rank))
    recorder = Recorder(len(names), names=tuple(names), page=page)
    if rank is None:
        recorder.set_gauge(None, slot(LOCAL_CACHE_TOKENS), CACHE_TOKENS)
    return recorder


def _record(
    recorder: Recorder,
    record: Callable[[Recorder], None],
    gauges: dict[tuple[Any, ...], int],
    opened: list[list[Any]],
) -> None:
    record(recorder)
    for (index, signal, *values), value in gauges.items():
        recorder.set_gauge(index, slot(signal, *values), value)
    for name, index, *values, n in opened:
        recorder.count_dynamic(index, next(signal for signal in DYNAMIC_COUNTERS if signal.name == name), *values, n=n)


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Answer every request so; return the URL of the metrics."""
    with web(lambda _path: (status, body)) as address:
        yield f"http://{address}/metrics"
