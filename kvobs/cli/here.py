"""Read the metrics of the engines on this host from their pages, without an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from kvobs.cli.scrapes import PLAIN, EndedError, all_of, parse_vllm, values_of
from kvobs.cli.web import NoAnswerError, get
from kvobs.export.engine import Engine, engines_of, servers
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.numbers import Scrape
from kvobs.export.totals import Totals, TotalsCollector
from kvobs.page.description import ProcessInfo

VLLM_S = 2.0
"""How long vLLM's own metrics are waited for."""


class HostServer:
    """A server with pages on this host; what it has counted is kept when its engines are gone."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._engines: dict[str, Totals] = {}
        registry = CollectorRegistry()
        registry.register(TotalsCollector(lambda: tuple(self._engines.values())))
        self._registry = registry
        self.find()

    def find(self) -> None:
        """Find the engines, and the processes of them, that have begun since."""
        for name in engines_of(self.server):
            if name not in self._engines:
                engine = Engine(name)
                self._engines[name] = Totals(engine, EngineWatch(engine))
        for totals in self._engines.values():
            totals.engine.find()

    @property
    def is_alive(self) -> bool:
        """Whether an engine of it runs."""
        return any(totals.engine.is_alive for totals in self._engines.values())

    @property
    def head(self) -> ProcessInfo | None:
        """Return the process that is asked about it: of an engine that runs, if one does."""
        engines = sorted((totals.engine for totals in self._engines.values()), key=lambda engine: not engine.is_alive)
        return next((engine.head for engine in engines if engine.head is not None), None)

    def name(self, taken: Collection[str] = ()) -> str:
        """Return its model and port, and another text than those that other servers have."""
        if (head := self.head) is None:
            return self.server[:8]
        info = head.engine
        name = (info.model or self.server[:8]) + (f" at port {info.port}" if info.port is not None else "")
        return name + (f", process {head.pid}" if name in taken else "")

    def live(self) -> Scrape:
        """Read its metrics while an engine of it runs; else ``EndedError``."""
        if not self.is_alive:
            raise EndedError("its engine has ended")
        return Scrape(time.monotonic(), values_of(self._text()))

    def last(self) -> Scrape:
        """Read its metrics, also of engines that have ended, and vLLM's own if its server answers."""
        self.find()
        return Scrape(time.monotonic(), all_of(self._text()), self._of_vllm())

    def _text(self) -> str:
        return generate_latest(self._registry).decode()

    def _of_vllm(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        port = self.head.engine.port if self.head is not None else None
        if port is None or not self.is_alive:
            return {}
        with suppress(NoAnswerError):
            return parse_vllm(get(f"http://localhost:{port}/metrics", PLAIN, VLLM_S).text)
        return {}


def running() -> dict[str, Callable[[], Scrape]]:
    """Return what reads the metrics of each server on this host, by its name; of one with an engine that runs."""
    readers: dict[str, Callable[[], Scrape]] = {}
    for server in map(HostServer, servers()):  # the one that began last at the end
        if server.is_alive and server.head is not None:
            readers[server.name(readers)] = server.live
    return readers
