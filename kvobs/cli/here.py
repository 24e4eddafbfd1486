"""Read the metrics of the engines on this host from their pages, without an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from kvobs.cli.scrapes import EndedError, Scrape, values_of
from kvobs.export.engine import Engine, engines_of, servers
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.totals import Totals, TotalsCollector


def running() -> dict[str, Callable[[], Scrape]]:
    """Return what reads the metrics of each server on this host, by its name; of one with an engine that runs."""
    found: dict[str, Callable[[], Scrape]] = {}
    for server in servers():
        engines = [Engine(name) for name in engines_of(server)]
        for engine in engines:
            engine.find()
        alive = [engine for engine in engines if engine.is_alive]
        if alive and (head := alive[0].head) is not None:
            info = head.engine
            name = (info.model or server[:8]) + (f" at port {info.port}" if info.port is not None else "")
            name += f", process {head.pid}" if name in found else ""
            found[name] = partial(_read, [Totals(e, EngineWatch(e)) for e in alive])
    return found


def _read(engines: Sequence[Totals]) -> Scrape:
    registry = CollectorRegistry()
    registry.register(TotalsCollector(lambda: engines))
    if not any(totals.engine.is_alive for totals in engines):
        raise EndedError("its engine has ended")
    return Scrape(time.monotonic(), values_of(generate_latest(registry).decode()))
