"""A real scheduler and aggregator whose metrics end where Prometheus reads them; time is the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvobs.testing import BLOCK, Rig, Script
from tests.support.front import Front
from tests.support.rig import child_config

if TYPE_CHECKING:
    import pytest

STEP_S = 0.2
NAMES = ["one", "two"]
KV = (2 * BLOCK, True)
SYNC = (2 * BLOCK, False)
BYTES_PER_TOKEN = 2 * 2 * 64 * 4  # of one rank: K and V, heads, head size, bytes


class Observed:
    """A rig, the API server's side of it, and the clock of both."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *scripts: Script, ranks: int = 2, policy: str = "recompute", **kvobs: Any
    ):
        self.scripts = scripts
        self.now = 1_700_000_000.0
        self.rank_s: dict[int, float] = {}  # how much later than the scheduler's a rank's clock strikes
        self.token_s = 0.0  # how long a step computes, by token
        for module in ("scheduler", "completions", "worker", "outcomes", "gains", "policies"):
            patch.setattr(f"kvobs.routing.{module}.wall_ns", lambda: int(self.now * 1e9))
        kvobs = {"names": NAMES, **kvobs}
        self.rig = Rig("kvobs", *scripts, ranks=ranks, kvobs=kvobs, policy=policy)
        self.front = Front(*map(child_config, scripts), **kvobs)
        work = self.rig._work

        def late(worker: Any, *args: Any) -> Any:
            late_s = self.rank_s.get(worker._side.rank, 0)
            self.now += late_s
            try:
                return work(worker, *args)
            finally:
                self.now += self.token_s * args[0].total_num_scheduled_tokens - late_s

        patch.setattr(self.rig, "_work", late)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.now += STEP_S
            self.rig.step()

    def value(self, metric: str, child: str | None = "one", **labels: str) -> float:
        """Return what Prometheus reads, 0 where there is no such series."""
        self._deliver()
        return self.front.value(metric, child, **labels) or 0

    def series(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return label values, in the order of their names, without vLLM's -> number, of all series of a metric."""
        self._deliver()
        return {
            tuple(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine")): s.value
            for family in self.front.registry.collect()
            for s in family.samples
            if s.name == metric
        }

    def _deliver(self) -> None:
        stats, self.rig.stats = self.rig.stats, []
        for payload in stats:
            self.front.metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)))
