"""Readings of a server's /metrics, and what a child that counts for itself says about the same calls."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.samples import Sample

from kvobs.demo.server import Server
from kvobs.schema.signals import hook_label
from tests.engine.children_counting import EXPORTED, calls_counted
from tests.engine.serving import eventually, prompt

IDLE_S = 1.0
"""Time for the last step's numbers to reach /metrics, and for the children's counts to reach their files."""

AFTER_THE_FLUSH = {
    "get_kv_connector_stats": {"worker", "scheduler"},
    "get_kv_connector_kv_cache_events": {"worker"},
    "build_connector_worker_meta": {"worker"},
    "clear_connector_metadata": {"worker"},
    "take_events": {"scheduler"},
}
"""Hooks whose call in the last step comes with the next one's numbers, and the processes that call them."""


class Growth:
    """By how much samples of /metrics grew while a ``with`` block ran, and in an idle second after it."""

    def __init__(self, server: Server, **labels: str) -> None:
        self._server, self._labels = server, labels

    def __enter__(self) -> Self:
        self._before = self._server.metrics()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            time.sleep(IDLE_S)
            self._after = self._server.metrics()

    def reaches(self, growth: float, metric: str, **labels: str) -> bool:
        """Return whether the samples grow by this much in time, which a busy machine may need; all is read again."""

        def has_grown() -> bool:
            self._after = self._server.metrics()
            return self(metric, **labels) >= growth

        return eventually(has_grown, 20)

    def __call__(self, metric: str, **labels: str) -> float:
        """Return the growth of the samples that carry these labels, and those that all readings here are about."""
        wanted = {**self._labels, **labels} if metric.startswith("kvobs_") else labels
        return added(self._after, metric, wanted) - added(self._before, metric, wanted)


def added(samples: list[Sample], metric: str, labels: dict[str, str]) -> float:
    return sum(s.value for s in samples if s.name == metric and labels.items() <= s.labels.items())


def assert_every_call_is_counted(server: Server, counts: Path, connector: str, ranks: int, engine: str = "0") -> None:
    """Compare kvobs's counts of the calls into a ``CountingChild`` with the child's own, since the server's start."""
    # A last plain request, after which nothing is pending: whatever came before it has been sent by then.
    server.complete(prompt("the last", connector, engine), 2, headers={"X-data-parallel-rank": engine})
    time.sleep(IDLE_S)
    theirs: dict[str, int] = {}
    for (_, hook), n in calls_counted(counts, engine).items():
        theirs[hook_label(hook)] = theirs.get(hook_label(hook), 0) + n
    ours = {
        s.labels["hook"]: s.value
        for s in server.metrics()
        if s.name == "kvobs_call_duration_seconds_count"
        and (s.labels["connector"], s.labels["engine"]) == (connector, engine)
    }
    assert ours.keys() == theirs.keys()
    processes = {"worker": ranks, "scheduler": 1}
    late = {hook: sum(processes[side] for side in sides) for hook, sides in AFTER_THE_FLUSH.items()}
    wrong = {
        hook: f"{ours[hook]:.0f} instead of {n}"
        for hook, n in theirs.items()
        if not 0 <= n - ours[hook] <= late.get(hook, 0)
    }
    assert wrong == {}
    exported = {  # by the child itself, in its own metrics
        s.labels["call"]: s.value
        for s in server.metrics()
        if s.name == "vllm:stats_child_calls_total"
        and (s.labels["connector"], s.labels["engine"]) == (connector, engine)
    }
    for (who, hook), n in calls_counted(counts, engine).items():
        if hook in EXPORTED:
            assert exported[f"{who}.{hook}"] == n


def kvobs_samples(server: Server) -> list[Sample]:
    return [s for s in server.metrics() if s.name.startswith("kvobs_")]


def kvobs_text(server: Server) -> str:
    """Return the part of /metrics that is kvobs's own, with its HELP and TYPE lines."""
    lines = server.request("/metrics").decode().splitlines()
    ours = [line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("kvobs_")]
    return "\n".join(ours) + "\n"
