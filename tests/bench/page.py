"""What it costs to hold numbers and spans in a page, and to read them: a scrape, a group of spans, the memory.

Times are as on the reference machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar
from uuid import uuid4

from kvobs.export.engine import Engine
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.totals import Exposition, Totals
from kvobs.page.description import Identity
from kvobs.page.layout import ORDINARY, SPAN_BYTES
from kvobs.page.span_ring import SpanReader
from kvobs.page.writer import PageWriter, size_of
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.spans import Reason, Record
from kvobs.telemetry.tracing.journal import Journal
from tests.bench.calls import CONNECTORS, slowness
from tests.bench.report import Budget, Line, Part
from tests.support.watched import begin, config

RANKS = 8
ROUNDS = 200
CALLS = 50
"""Of each hook and connector, as times scatter."""
GROUP = 4
"""Spans of a load of two ranks: lookup, load, and each rank's part of it."""
ERRORS = 4
"""Open series of each connector and process."""
HOOKS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip
NAMES = tuple(f"Connector-{i}" for i in range(CONNECTORS))
MIB = 1 << 20

T = TypeVar("T")


@contextmanager
def engine() -> Iterator[tuple[Engine, PageWriter]]:
    """Yield a reader of an engine with a page of the scheduler and of each rank, and one of these pages."""
    name = f"bench-{uuid4()}"
    pages = [begin(name, rank, NAMES) for rank in (None, *range(RANKS))]
    for seed, page in enumerate(pages):
        _fill(Recorder(CONNECTORS, names=NAMES, page=page), random.Random(seed))
    read = Engine(f"{Identity.of(config(name)).server}-0-")
    read.find()
    if len(read.pages) != len(pages):
        raise RuntimeError(f"{len(read.pages)} of {len(pages)} pages were found")
    try:
        yield read, pages[0]
    finally:
        for page in pages:
            page.close()


def _fill(recorder: Recorder, rng: random.Random) -> None:
    for index in range(CONNECTORS):
        for hook in HOOKS:
            for _ in range(CALLS):
                recorder.add_call(index, hook, 0, int(rng.lognormvariate(9, 0.6)))  # 8 us, and 32 us at p99
        for i in range(ERRORS):
            recorder.count_dynamic(index, signals.CALL_ERRORS, "start_load_kv", f"Error{i}")


def group() -> list[Record]:
    """Return the spans of a load."""
    attributes: dict[str, str | int] = {
        "kv_transfer.connector": NAMES[0],
        "kv_transfer.tokens": 1024,
        "kv_transfer.mode": "async",
    }
    record = Record("kv.load", "1" * 32, "2" * 16, "3" * 16, 1_000, 3_000, Reason.PARENT, attributes)
    return [record._replace(span_id=f"{i:016x}") for i in range(GROUP)]


def measure(rounds: int = ROUNDS) -> Part:
    """Measure all of it; CPU time, medians over the rounds."""
    spans, seconds = group(), count()
    with engine() as (read, page):
        totals = Totals(read, EngineWatch(read))
        exposition = Exposition(lambda: [totals], lambda: None, clock=lambda: float(next(seconds)))
        ring, journal = page.spans[ORDINARY], Journal(page, clock=lambda: float(next(seconds)))

        def summed(_: None) -> None:
            read.counts()
            read.rows()

        def reader() -> SpanReader:
            made = SpanReader(page.words, page.layout.spans(ORDINARY), SPAN_BYTES[ORDINARY])
            list(made.read())
            ring.write(spans)
            return made

        if not (read.counts()[signals.word(0, 0) :] and len(read.rows()) == CONNECTORS * ERRORS):
            raise RuntimeError("the pages are empty")
        lines = [
            _timed(f"a scrape: reading and summing {1 + RANKS} pages", rounds, summed, lambda: None, Budget(200)),
            _timed("a scrape: finding new pages", rounds, lambda _: read.find(), lambda: None),
            _timed("a scrape: all of it, to the text", rounds, lambda _: exposition.text(""), lambda: None),
            _timed(f"writing a group of {GROUP} spans into the ring", rounds, ring.write, lambda: spans),
            _timed("the same through the journal", rounds, journal.add, lambda: spans),
            _timed("reading it", rounds, lambda made: list(made.read()), reader),
        ]
        size = size_of(page.process)
    memory = Line("memory of a page", "MiB", [size / MIB], budget=Budget(2.5))
    return Part(f"A page: {RANKS} ranks, {CONNECTORS} connectors x {len(HOOKS)} hooks", [*lines, memory])


def _timed(
    title: str, rounds: int, call: Callable[[T], object], prepare: Callable[[], T], budget: Budget | None = None
) -> Line:
    times = []
    for number in range(-1, rounds):
        argument = prepare()
        begun = time.thread_time_ns()
        call(argument)
        if number >= 0:  # the first is for warming up
            times.append((time.thread_time_ns() - begun) / 1e3 / slowness())
    return Line(title, "us", times, budget=budget)
