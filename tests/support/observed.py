"""A real scheduler and aggregator whose time is the test's, and whose metrics end where Prometheus reads them.

The engine is the second one of a group with data parallelism: what would be said of its first one is not found.
"""

import pkgutil
from importlib import import_module
from typing import Any

import msgspec
import pytest

from kvobs import routing, telemetry
from kvobs.export import totals
from kvobs.telemetry import estimates, scheduler_telemetry, transfers
from kvobs.telemetry.estimates import gains
from kvobs.telemetry.transfers import open_transfers
from kvobs.testing import BLOCK, Rig, Script, engine_config
from tests.support.front import Front
from tests.support.rig import entry_for

S = 10**9
STEP_S = 0.2
NAMES = ["one", "two"]
KV = (2 * BLOCK, True)
SYNC = (2 * BLOCK, False)
BYTES_PER_TOKEN = 2 * 2 * 64 * 4  # of one rank: K and V, heads, head size, bytes
ENGINES, ENGINE = 2, 1
SUFFIX = f"_dp{ENGINE}"  # vLLM's, of the engine's id


def of_group(transfer: Any, ranks: int = 1, rank: int = 0) -> Any:
    """Return vLLM's configuration of the group's second engine, as its EngineCore gets it."""
    config = engine_config(transfer, ranks, rank)
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_index = ENGINES, ENGINE
    parallel.data_parallel_rank = parallel.data_parallel_rank_local = ENGINE
    transfer.engine_id = transfer.engine_id.removesuffix(SUFFIX) + SUFFIX
    return config


class Clocked:
    """A rig, and the clock of its router; ``more`` are arguments of the rig."""

    make_rig: Any = Rig

    def __init__(
        self, patch: pytest.MonkeyPatch, connectors: list[dict[str, Any]], kvobs: dict[str, Any], **more: Any
    ) -> None:
        self.now_ns = 1_700_000_000 * S
        folders = [(package.__name__, package.__path__) for package in (routing, telemetry, estimates, transfers)]
        modules = [f"{name}.{each.name}" for name, path in folders for each in pkgutil.iter_modules(path)]
        for module in map(import_module, modules):
            if hasattr(module, "wall_ns"):
                patch.setattr(module, "wall_ns", lambda: self.now_ns)
        patch.setattr(open_transfers, "WALL_OFFSET", 0)
        patch.setattr(scheduler_telemetry, "EVERY_NS", 0)  # each step looks
        for each in (gains, scheduler_telemetry, totals):
            patch.setattr(each, "perf_counter_ns", lambda: self.now_ns)
        patch.setattr("kvobs.testing.rig.engine_config", of_group)
        self.rig = self.make_rig("kvobs", connectors=connectors, kvobs=kvobs, **more)

    @property
    def now(self) -> float:
        return self.now_ns / S

    def step(self, steps: int = 1, seconds: float = STEP_S) -> None:
        for _ in range(steps):
            self.now_ns += int(seconds * S)
            self.rig.step()


class Observed(Clocked):
    """The same with the API server's side of it."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *scripts: Script,
        connectors: list[dict[str, Any]] | None = None,
        rig: dict[str, Any] | None = None,
        ranks: int = 2,
        policy: str = "recompute",
        **kvobs: Any,
    ) -> None:
        self.scripts = scripts
        self.rank_s: dict[int, float] = {}  # how much later than the scheduler's a rank's clock strikes
        self.token_s = 0.0  # how long a step computes, by token
        connectors = connectors or [entry_for(script) for script in scripts]
        kvobs = {"names": NAMES, **kvobs}
        super().__init__(patch, connectors, kvobs, ranks=ranks, policy=policy, **(rig or {}))
        transfer = self.rig.scheduler.vllm_config.kv_transfer_config
        of_all = transfer.engine_id.removesuffix(SUFFIX)
        self.front = Front(*connectors, engines=ENGINES, engine_id=of_all, **kvobs)
        self.front.shown._is_over.set()  # the test looks itself, and not a thread
        work = self.rig._work

        def late(worker: Any, *args: Any) -> Any:
            late_ns = int(self.rank_s.get(worker._side.rank, 0) * S)
            self.now_ns += late_ns
            try:
                return work(worker, *args)
            finally:
                self.now_ns += int(self.token_s * S) * args[0].total_num_scheduled_tokens - late_ns

        patch.setattr(self.rig, "_work", late)

    def value(self, metric: str, connector: str | None = "one", **labels: str) -> float:
        """Return what Prometheus reads, 0 where there is no such series."""
        self._deliver()
        return self.front.value(metric, connector, engine=str(ENGINE), **labels) or 0

    def series(self, metric: str, engine: int = ENGINE) -> dict[tuple[str, ...], float]:
        """Return label values, in the order of their names, without vLLM's -> number, of all series of a metric."""
        self._deliver()
        return {
            tuple(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine")): s.value
            for family in self.front.registry.collect()
            for s in family.samples
            if s.name == metric and s.labels["engine"] == str(engine)
        }

    def _deliver(self) -> None:
        """Hand the connectors' stats to the API server's side, packed as vLLM packs them."""
        for router in (self.rig.connector, *self.rig.workers):
            router._telemetry._recorders.page.catch_up()  # as its thread does once a second
        stats, self.rig.stats = self.rig.stats, []
        for payload in stats:
            self.front.metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)), ENGINE)
