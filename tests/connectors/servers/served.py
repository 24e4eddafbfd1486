"""An engine whose first connector has a real store behind it and whose second is host memory, and a look at both."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvobs.demo.run import host_memory, multi_connector
from kvobs.schema import signals
from kvobs.testing.server import Server, ServerError
from tests.connectors.servers import stores
from tests.connectors.servers.stores import Store, running
from tests.connectors.servers.traffic import SMALL_CACHE
from tests.engine.serving import ServedEngine, eventually, total

STORE = "store"
"""The name of the connector in front of the store."""
LEFT_OUT = re.compile(rf"connector '{STORE}' failed .* for ([0-9.]+) s \(kvobs_quarantined\)")


@dataclass(frozen=True)
class Kind:
    """A kind of store: its server, and its connector, which are in the packages of that name."""

    name: str
    server: Callable[[Path], Store]
    entry: Callable[..., dict[str, Any]]
    env: Callable[[Store, Path], dict[str, str]]
    after_s: float
    """How long answers are looked at while the server is dead, the first seconds aside. Mooncake's lookups of a dead
    master take 4.4 s each: there have to be enough others for a 95th percentile."""
    is_spawned: bool = False
    """Whether its engines are: LMCache does not start in a forked process."""


LMCACHE = Kind(
    "lmcache", stores.lmcache_server, stores.lmcache_entry, lambda _store, _folder: {}, after_s=15, is_spawned=True
)
MOONCAKE = Kind("mooncake", stores.mooncake_master, stores.mooncake_store_entry, stores.mooncake_store_env, after_s=40)


@dataclass(frozen=True)
class Served:
    """The engine and the store, both up."""

    kind: Kind
    store: Store
    server: Server
    is_best_effort: bool

    def total(self, metric: str, **labels: str) -> float:
        return total(self.server, metric, connector=STORE, **labels)

    def backoffs(self) -> list[float]:
        """Return for how many seconds it was left out, each time, as the log says."""
        return [float(seconds) for seconds in LEFT_OUT.findall(self.server.log.read_text(errors="replace"))]

    @property
    def loads(self) -> float:
        return self.total("kvobs_loads_total", outcome="ok")


@contextmanager
def served(
    served_engine: ServedEngine, folder: Path, kind: Kind, *, is_best_effort: bool, **more: Any
) -> Iterator[Served]:
    with (
        running(kind.server(folder)) as store,
        serving(served_engine, folder, store, kind, is_best_effort=is_best_effort, **more) as engine,
    ):
        yield engine


@contextmanager
def serving(
    served_engine: ServedEngine,
    folder: Path,
    store: Store,
    kind: Kind,
    *,
    is_best_effort: bool,
    ranks: int = 1,
    **entry: Any,
) -> Iterator[Served]:
    """Run an engine that uses a store, which runs or not, and verifies all that it loads."""
    config = multi_connector(kind.entry(store, **entry), host_memory(), names=[STORE, "host"])
    config["kv_load_failure_policy"] = "recompute"
    config["kv_connector_extra_config"]["kvobs"] |= {"verify": {"sample_ratio": 1}}
    if is_best_effort:
        config["kv_connector_extra_config"]["kvobs"] |= {"best_effort": [STORE]}
    more: dict[str, Any] = {"env": kind.env(store, folder), "packages": [kind.name], "is_spawned": kind.is_spawned}
    with served_engine(config, *SMALL_CACHE, ranks=ranks, **more) as server:
        yield Served(kind, store, server, is_best_effort)


def is_idle(server: Server) -> bool:
    """Say whether nothing is open any more: no request, no block, no transfer."""
    samples = {signals.IN_FLIGHT.name: 0.0}  # it has no series where nothing was ever open
    for sample in server.metrics():
        samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    open_ones = ("vllm:num_requests_running", "vllm:num_requests_waiting", signals.IN_FLIGHT.name)
    return not any(samples[name] for name in open_ones)


def blocks_are_free(server: Server) -> bool:
    """Say whether every block is free, which vLLM's own cache can be emptied for only then."""
    try:
        server.reset_prefix_cache(timeout=10)
    except ServerError:
        return False
    return True


def until_loads_grow(engine: Served, seconds: float) -> float | None:
    """Return after how long the store's connector has loaded something again; None if it did not in time."""
    begin, before = time.monotonic(), engine.loads
    return time.monotonic() - begin if eventually(lambda: engine.loads > before, seconds) else None
