"""Status pages of engines in each state, with ten minutes of history: 8 ranks, 5 connectors, 64 slow loads."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs.export.engine_watch import EngineWatch
from kvobs.export.history import ALL_S, EVERY_S
from kvobs.export.status_page import StatusPage
from kvobs.page.description import ConnectorInfo
from kvobs.schema import __version__, signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.signals import LOAD_DURATION, slot, word
from kvobs.schema.spans import Reason, Record
from tests.support.slow_loads import span
from tests.support.written import Pages

NAMES = ("cpu", "disk", "remote", "peer", "archive")
CLASSES = (
    "OffloadingConnector",
    "OffloadingConnector",
    "LMCacheConnectorV1",
    "NixlConnector",
    "MooncakeStoreConnector",
)
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "שלום \u202e evil",
    "x" * 1000,
    "{{ 7 * 7 }} </style><h1>",
)
REQUEST = "cmpl-8f56e1363ce8d56a-0"
SECOND = 10**9


@dataclass
class Drawn:
    """A status page, what its engine writes, and its clock."""

    pages: Pages
    page: StatusPage
    clock: list[float]
    watch: EngineWatch = field(repr=False)

    def count(self, connector: int, signal: signals.Signal, n: int, *values: str) -> None:
        self.pages.add(word(connector, slot(signal, *values)), n)

    def load(self, connector: int, seconds: float, tokens: int = 1024) -> None:
        """Count a load that took so long."""
        at = word(connector, slot(LOAD_DURATION, "async"))
        ns = round(seconds * SECOND)
        self.pages.add(at + LOAD_DURATION.bucket(ns))
        self.pages.add(at + LOAD_DURATION.sum_offset, ns)
        self.count(connector, signals.LOADS, 1, "async", "ok")
        self.count(connector, signals.LOAD_TOKENS, tokens)
        self.count(connector, signals.LOOKUPS, 2, "hit")
        self.count(connector, signals.LOOKUPS, 3, "miss")

    def waits(self, connector: int, kind: str, n: int, seconds: float) -> None:
        """Let something wait."""
        begin = time.perf_counter_ns() - round(seconds * SECOND)
        page = self.pages.writers[0]
        page.set_gauge(word(connector, slot(signals.IN_FLIGHT, kind)), n)
        page.set_gauge(word(connector, slot(signals.OLDEST_IN_FLIGHT, kind)), begin)

    def hangs(self, connector: int, hook: str, rank: int, seconds: float) -> None:
        """Let a call be in progress."""
        page = self.pages.writers[1 + rank]
        page.words[page.marks(connector, hook)] = time.perf_counter_ns() - round(seconds * SECOND)

    def pass_time(self, each: Callable[[int], None] = lambda _: None) -> None:
        """Let ten minutes pass; ``each`` does what happens in each interval."""
        for i in range(round(ALL_S / EVERY_S)):
            self.page.sample()
            each(i)
            self.clock[0] += EVERY_S
        self.page.sample()

    def html(self, *, is_local: bool = True, reloads: bool = True) -> str:
        self.clock[0] += 2  # the page is made anew
        return self.page.html(is_local=is_local, reloads=reloads).decode()


def drawn(names: Sequence[str] = NAMES, ranks: int = 8, **options: Any) -> Drawn:
    """Return the page of an engine that has done nothing yet."""
    connectors = tuple(ConnectorInfo(name, kind, "kv_both") for name, kind in zip(names, CLASSES, strict=False))
    pages = Pages(
        None, *range(ranks), connectors=connectors, ranks=ranks, model="tiny-llama", kvobs_version=__version__
    )
    engine, clock = pages.engine(), [0.0]
    watch = EngineWatch(engine)
    totals = [pages.totals(watch=watch)]
    page = StatusPage(lambda: totals, ExporterOptions(**options), lambda: clock[0])
    page.sample()
    return Drawn(pages, page, clock, watch)


def slow_load(number: int, connector: str, seconds: float, *, failed: bool = False, ranks: int = 8) -> list[Record]:
    """Return the spans of a slow or failed load."""
    begin_ms = 5000.0 * number
    reason = Reason.ERROR if failed else Reason.SLOW
    same: dict[str, Any] = {"request__id": f"{REQUEST}-{number:08x}", "connector": connector}
    error: dict[str, Any] = {"error": "load_failed"} if failed else {}
    head = span(
        "kv.load", 1000 * number + 1, begin_ms, 1000 * seconds, reason=reason, **same, **error, mode="async",
        outcome="failed" if failed else "ok", tokens=896, bytes=1_769_472, slowest_rank=ranks - 1,
        rank_skew=seconds / 2, queued=0.0147, waited=seconds + 0.0031, saved=0.18, prompt_tokens=900,
        offered_tokens__remote=896,
    )  # fmt: skip
    of_ranks = [
        span("kv.load.rank", 1000 * number + 2 + rank, begin_ms + 0.5 + rank / 8, 1000 * seconds * (rank + 1) / ranks,
             parent=1000 * number + 1, reason=reason, **same, rank=rank, **(error if rank == ranks - 1 else {}))
        for rank in range(ranks)
    ]  # fmt: skip
    return [head, *of_ranks]


def good() -> Drawn:
    made = drawn()

    def each(i: int) -> None:
        for connector in range(3):
            for n in range(3 + connector + i % 4):
                made.load(connector, (0.02 + 0.015 * n) * (connector + 1) * (1.3 + math.sin(i / 4)))

    made.pass_time(each)
    made.waits(0, "load", 2, 0.05)
    made.waits(2, "save", 1, 0.4)
    return made


def failing() -> Drawn:
    """Return the page of an engine with a slow connector, one that fails, one in quarantine, and 64 slow loads."""
    made = good()

    def each(i: int) -> None:
        made.load(0, 0.05)
        for n in range(4):
            made.load(2, 1.2 + 0.4 * n * (i % 3))
        if i % 3:
            made.count(1, signals.LOADS, 2, "async", "failed")
            made.pages.writers[0].rows.add(signals.CALL_ERRORS, 1, ("start_load_kv", "OSError"), 1)
        made.load(1, 0.3)

    made.pass_time(each)
    made.pages.writers[0].set_gauge(word(3, slot(signals.QUARANTINED)), 1)
    for number in range(1, 70):
        failed = number % 5 == 0
        spans = slow_load(number, "disk" if failed else "remote", 1 + number % 7 / 3, failed=failed)
        made.pages.write(spans, writer=number % 2)  # one ring has no room for all
    made.pages.add(slot(signals.INTERNAL_ERRORS, "read"))
    return made


def hanging() -> Drawn:
    made = good()
    made.hangs(2, "start_load_kv", 1, 45)
    made.hangs(2, "start_load_kv", 4, 41)
    made.waits(3, "load", 12, 95)
    made.waits(0, "awaiting_schedule", 3, 20)
    made.pages.write(slow_load(1, "remote", 12.5))
    return made


def empty() -> Drawn:
    return drawn(())


def idle() -> Drawn:
    return drawn()


def hostile() -> Drawn:
    made = drawn(HOSTILE)
    for number, name in enumerate(HOSTILE, 1):
        made.pages.write(slow_load(number, name, 2))
        made.load(number - 1, 2)
        made.waits(number - 1, "load", 1, 50)
    made.pass_time()
    return made


STATES: dict[str, Callable[[], Drawn]] = {
    each.__name__: each for each in (good, failing, hanging, empty, idle, hostile)
}
