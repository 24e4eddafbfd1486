"""Serve a story with a real server of two ranks, under the eyes of a real Prometheus that evaluates the real rules, and
of VictoriaMetrics.

``python -m tests.stack.run FOLDER`` leaves Prometheus's data of a run in FOLDER/data, for whoever wants to look at it.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from kvobs.schema.signals import SIGNALS, Kind
from kvobs.testing.model import make_model
from kvobs.testing.server import HOST, Server
from tests.engine.prometheus import Prometheus, scraping, victoria
from tests.engine.serving import ROOT, TOKENS, eventually, hang_up, serve
from tests.stack.stories import EVERYTHING, ONE_FAILING, Ask, Story
from tests.support.grpc_collector import GrpcCollector

RULES = ROOT / "dashboards" / "generated" / "rules"
HOLD = "2s"
"""What stands for the rules' own ``for`` in a run of a minute."""
SPANS = {"OTEL_BSP_SCHEDULE_DELAY": "500", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}


@dataclass(frozen=True)
class Live:
    """A run whose load is over; server, Prometheus, VictoriaMetrics and collector are still up."""

    server: Server
    prometheus: Prometheus
    victoria: Prometheus
    collector: GrpcCollector
    began: float
    ended: float

    def series(self, query: str, step: float = 1, of: Prometheus | None = None) -> list[dict[str, Any]]:
        """Return what a query finds over the run: label sets under ``metric``, samples under ``values``."""
        store = of or self.prometheus
        return list(store.api("query_range", query=query, start=self.began, end=self.ended, step=step)["result"])

    def at_the_end(self, query: str, of: Prometheus) -> list[dict[str, Any]]:
        """Return what an instant query finds when the load ends: samples under ``value``."""
        return list(of.api("query", query=query, time=self.ended)["result"])

    def without_data(self) -> list[str]:
        """Return the signals that Prometheus has no sample of."""
        suffix = {Kind.HISTOGRAM: "_count"}
        return sorted(s.name for s in SIGNALS if not self.series(f"count({s.name}{suffix.get(s.kind, '')})"))


@contextmanager
def live(model: Path, folder: Path, story: Story, seconds: float) -> Iterator[Live]:
    """Run a story for so many seconds, and return once Prometheus has scraped its end."""
    with GrpcCollector() as collector:
        args = (*story.args, "--otlp-traces-endpoint", collector.endpoint)
        env = {**collector.env, **SPANS}
        config = story.configuration()
        with serve(model, folder, config, *args, ranks=2, env=env) as server:
            jobs = scrape_jobs(server)
            configuration = f"rule_files: [{hurried_rules(folder / 'rules')}/*.yml]\n{jobs}"
            with (
                scraping(folder, configuration, "--enable-feature=exemplar-storage") as prometheus,
                victoria(folder, jobs, hurried_rules(folder / "vmalert", "keep_firing_for")) as metrics,
            ):
                warm(server)
                began = time.time()
                Load(server, collector, story, seconds).run()
                ended = began + seconds  # the clients' last requests are under way then
                assert eventually(lambda: (prometheus.value('min(timestamp(up{job="kvobs"}))') or 0) > ended)
                yield Live(server, prometheus, metrics, collector, began, ended)


def scrape_jobs(server: Server) -> str:
    """Return the two jobs without the exporter."""
    (jobs,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    return str(jobs.replace("localhost:8000", f"{HOST}:{server.port}"))


def hurried_rules(folder: Path, *unknown: str) -> Path:
    """Write the rules, hurried up and without ``unknown`` fields (vmalert has some since 1.91); return the folder."""
    folder.mkdir(exist_ok=True)
    for file in RULES.glob("*.y*ml"):
        hurried = hurry(yaml.safe_load(file.read_text()), *unknown)
        (folder / f"{file.stem}.yml").write_text(yaml.safe_dump(hurried, sort_keys=False))
    return folder


def hurry(rules: dict[str, Any], *unknown: str) -> dict[str, Any]:
    """Return the same rules with a short ``for``, evaluated each second; so are subqueries, else of each 30 s."""

    def hurried(rule: dict[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in rule.items() if name not in unknown}
        known["expr"] = re.sub(r"\[(\d+)m:30s\]", lambda of: f"[{2 * int(of[1])}s:1s]", known["expr"])
        return {**known, "for": HOLD} if "for" in rule else known

    return {"groups": [{**g, "interval": "1s", "rules": list(map(hurried, g["rules"]))} for g in rules["groups"]]}


def warm(server: Server) -> None:
    """Have the first steps, which take seconds, behind."""
    for i in range(2):
        ask(server, Ask(document=True), i)


def ask(server: Server, request: Ask, i: int) -> None:
    params = {**({"steer": request.steer} if request.steer else {}), **request.params} or None
    if request.hangs_up_after is not None:
        hang_up(server, request.hangs_up_after, request.text(i), kv_transfer_params=params)
    else:
        server.complete(request.text(i), TOKENS, kv_transfer_params=params, headers=request.context())


class Load:
    """A story's requests, sent by a few clients, and its events beside them."""

    def __init__(self, server: Server, collector: GrpcCollector, story: Story, seconds: float) -> None:
        self._server, self._collector, self._story = server, collector, story
        self._seconds, self._began = seconds, time.monotonic()
        self._requests, self._numbers = count(), {True: count(), False: count()}
        self._is_over = threading.Event()

    @property
    def share(self) -> float:
        """How much of the run is over."""
        return (time.monotonic() - self._began) / self._seconds

    def run(self) -> None:
        """Return when the time is up and the last answer is there; raise what a client met with."""
        with ThreadPoolExecutor(self._story.clients + len(self._story.events) + 1) as pool:
            parts = [pool.submit(self._client) for _ in range(self._story.clients)]
            parts += [pool.submit(self._event, *event) for event in self._story.events]
            parts.append(pool.submit(self._outage))
            for part in parts:
                part.result()

    def _client(self) -> None:
        while (share := self.share) < 1:
            asked = self._story.rounds(share)
            self._ask(asked[next(self._requests) % len(asked)])

    def _ask(self, request: Ask) -> None:
        ask(self._server, request, next(self._numbers[request.document]))

    def _event(self, every_s: float, start: float, request: Ask) -> None:
        self._wait_until(start)
        while self.share < 1:
            self._ask(request)
            self._is_over.wait(min(every_s, max(0.0, 1 - self.share) * self._seconds))

    def _outage(self) -> None:
        down, up = self._story.collector_is_down
        if down < 1:
            self._wait_until(down)
            self._collector.stop()
            self._wait_until(up)
            self._collector.start()

    def _wait_until(self, share: float) -> None:
        self._is_over.wait(max(0.0, share - self.share) * self._seconds)


def main() -> None:
    """Leave the data of a run in a folder, with the time range and what has no data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument(
        "--one-failing", action="store_true", help="one of three connectors fails, from a third of it on"
    )
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    story = ONE_FAILING if options.one_failing else EVERYTHING
    model = make_model(folder / "model", **story.model)
    with live(model, folder, story, options.seconds) as run:
        noted = {"from": run.began, "to": run.ended, "without_data": run.without_data()}
        text = json.dumps({**noted, "spans": len(run.collector.spans)}, indent=2)
    (folder / "run.json").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
