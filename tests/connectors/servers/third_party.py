"""A connector from PyPI on real engines: alone, and beside host memory in vLLM's own MultiConnector and in kvobs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.samples import Sample

from kvobs.cli.summary.sources import SETTLE_S
from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.server import Server
from tests.connectors.servers import traffic
from tests.connectors.servers.served import STORE, blocks_are_free
from tests.connectors.servers.traffic import LONG, SMALL_CACHE, Asked
from tests.engine.serving import ServedEngine, eventually, stock, total

ROUTERS = ("alone", "stock", "stock-second", "kvobs", "kvobs-second")
"""What calls the connector, which comes second after host memory or first."""
KNOWN, NEW = LONG[:-2], LONG[-2:]
"""Prompts that are asked for while the store is whole, and others."""
REQUESTS = 48
ABORTS = 8
WRONG = ("kvobs_call_errors_total", "kvobs_internal_errors_total", "kvobs_unexpected_reports_total")
VARIES = ("_created", "_sum", "_bucket")
"""Ends of the names of series that depend on the time."""


@dataclass
class Run:
    """The life of one engine, and of the connector's store."""

    router: str
    package: str
    server: Server
    answers: list[Asked] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """All metrics when the prompts had been asked one after the other."""
    stored: Sequence[str] = ()
    """What the store held then."""
    is_settled: bool = False
    """Whether no block was held at the end, for no load or save."""
    wrong: list[Sample] = field(default_factory=list)
    """Faults that kvobs has counted."""

    def ask_one_after_the_other(self, stored: Callable[[], Sequence[str]]) -> None:
        """Ask for each prompt twice, with vLLM's own cache empty before each pair that begins alike; take notes."""
        for n, text in enumerate(2 * KNOWN):
            if n % 2 == 0:
                self.server.reset_prefix_cache()
            self.answers.append(traffic.ask(self.server, text))
        self.server.reset_prefix_cache()  # waits for the last save
        time.sleep(SETTLE_S)
        self.samples, self.stored = self.server.metrics(), stored()

    def ask_and_abort(self) -> None:
        """Ask four at a time, with more than vLLM's own cache holds, and hang up on some."""
        self.answers += traffic.ask_and_abort(self.server, REQUESTS, ABORTS, prompts=KNOWN)

    def look_at_the_end(self) -> None:
        """Note what is left over, and what went wrong."""
        self.is_settled = eventually(lambda: blocks_are_free(self.server) and not total(self.server, "kvobs_in_flight"))
        self.wrong = [sample for sample in self.server.metrics() if sample.name in WRONG and sample.value]

    def total(self, metric: str, **labels: str) -> float:
        """Add up the samples that carry these labels, when the prompts had been asked one after the other."""
        return sum(s.value for s in self.samples if s.name == metric and labels.items() <= s.labels.items())

    @property
    def own(self) -> dict[str, float]:
        """The connector's own metrics, without times, and without the label that kvobs adds."""
        return {
            f"{s.name}{sorted((name, value) for name, value in s.labels.items() if name != 'connector')}": s.value
            for s in self.samples
            if s.name.startswith(f"{self.package}_") and not s.name.endswith(VARIES)
        }


@contextmanager
def running_in(router: str, package: str, connector: dict[str, Any], served_engine: ServedEngine) -> Iterator[Run]:
    pair, names = [connector, host_memory()], [STORE, "host"]
    if router.endswith("second"):
        pair, names = pair[::-1], names[::-1]
    config = multi_connector(*pair, names=names)
    config = {"alone": connector, "stock": stock(config), "kvobs": config}[router.partition("-")[0]]
    args = (*SMALL_CACHE, "--max-model-len", "2048")  # for the long answers that are hung up on
    with served_engine(config, *args, packages=[package]) as server:
        yield Run(router, package, server)
