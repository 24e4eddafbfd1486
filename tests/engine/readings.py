"""Readings of a server's /metrics, and what a connector that counts for itself says about the same calls."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.samples import Sample

from kvobs.export.totals import FRESH_S
from kvobs.schema.signals import hook_label
from kvobs.testing.server import Server
from tests.engine.connectors_counting import EXPORTED, calls_counted
from tests.engine.serving import eventually

IDLE_S = 1.0
"""Time for the last step to end, and for vLLM's own numbers to reach /metrics."""


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


def calls_shown(server: Server, connector: str, engine: str = "0") -> Counter[str]:
    """Return the calls into a connector by hook, as /metrics has them: the sum over the hosts of the engine."""
    shown: Counter[str] = Counter()
    for s in server.metrics():
        is_of_it = (s.labels.get("connector"), s.labels.get("engine")) == (connector, engine)
        if s.name == "kvobs_call_duration_seconds_count" and is_of_it:
            shown[s.labels["hook"]] += int(s.value)
    return shown


def calls_made(counts: Path, engine: str = "0", since: float = 0.0) -> Counter[str]:
    """Return the calls that a ``CountingConnector`` has counted itself, by the label of the hook."""
    made: Counter[str] = Counter()
    for (_, hook), n in calls_counted(counts, engine, since).items():
        made[hook_label(hook)] += n
    return made


def assert_every_call_is_counted(
    server: Server, counts: Path, connector: str, ranks: int, engine: str = "0", *, has_stats: bool = True
) -> None:
    """Compare kvobs's counts of the calls into a ``CountingConnector`` with its own, since the server's start.

    Nothing is in progress: they are equal, without another step. ``has_stats``: vLLM shows the connector's own metrics.
    """
    who = {"scheduler", *(f"worker{rank}" for rank in range(ranks))}
    assert {process for process, _ in calls_counted(counts, engine)} == who
    ours, theirs = Counter[str](), Counter[str]()

    def are_equal() -> bool:
        nonlocal ours, theirs
        ours, theirs = calls_shown(server, connector, engine), calls_made(counts, engine)
        return ours == theirs

    assert eventually(are_equal, 20), {hook: (ours[hook], theirs[hook]) for hook in ours.keys() | theirs.keys()}
    if not has_stats:
        return
    exported = {  # by the connector itself, in its own metrics
        s.labels["call"]: s.value
        for s in server.metrics()
        if s.name == "vllm:stats_connector_calls_total"
        and (s.labels["connector"], s.labels["engine"]) == (connector, engine)
    }
    for (process, hook), n in calls_counted(counts, engine).items():
        if hook in EXPORTED:
            assert exported[f"{process}.{hook}"] == n


def assert_each_scrape_is_right(
    server: Server, counts: Path, connector: str, busy: Callable[[], object], in_progress: int
) -> int:
    """Compare each scrape while a server is ``busy`` with the connector's counts before and after it; return how many.

    The connector counts a call when it begins, kvobs when it ends: so many of a hook may be ``in_progress``.
    """
    scrapes = 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(busy)
        while not done.done():
            before = calls_made(counts)
            ours = calls_shown(server, connector)
            after = calls_made(counts, since=time.monotonic())
            wrong = {
                hook: (before[hook], ours[hook], after[hook])
                for hook in ours.keys() | after.keys()
                if not before[hook] - in_progress <= ours[hook] <= after[hook]
            }
            assert wrong == {}
            scrapes += before != after
            time.sleep(FRESH_S)  # an exporter gives scrapes within it the same text
        done.result()
    return scrapes


def assert_right_while_a_call_hangs(server: Server, counts: Path, connector: str, hook: str) -> None:
    """Compare what /metrics shows with the connector's own counts, while a call of this hook is in progress."""

    def hangs() -> bool:
        samples = [s for s in server.metrics() if s.name == "kvobs_call_in_progress_seconds"]
        return any((s.labels["connector"], s.labels["hook"]) == (connector, hook) for s in samples)

    assert eventually(hangs, 30)
    time.sleep(FRESH_S)
    theirs = calls_made(counts, since=time.monotonic())
    ours = calls_shown(server, connector)
    assert hangs(), "it has ended meanwhile: this proves nothing"
    assert ours == theirs - Counter({hook: 1})


def kvobs_samples(server: Server) -> list[Sample]:
    return [s for s in server.metrics() if s.name.startswith("kvobs_")]


def kvobs_text(server: Server) -> str:
    """Return the part of /metrics that is kvobs's own, with its HELP and TYPE lines."""
    lines = server.request("/metrics").decode().splitlines()
    ours = [line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("kvobs_")]
    return "\n".join(ours) + "\n"
