"""Pages of an engine that the test's process writes, and random numbers for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock
from uuid import uuid4
from weakref import finalize

import hypothesis.strategies as st

from kvobs.export import totals
from kvobs.export.engine import Engine, Positions
from kvobs.export.totals import Totals
from kvobs.page import writer
from kvobs.page.description import ConnectorInfo, EngineInfo, Identity
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.page.writer import PageWriter
from kvobs.schema import signals
from kvobs.schema.signals import CONNECTOR_WIDTH, DYNAMIC_COUNTERS, PROCESS_WIDTH, SERIES, Kind, Scope, Signal
from kvobs.schema.spans import Record
from tests.support.watched import config

CONNECTORS = ("one", "two")
_GAUGES = [series for series in SERIES[Scope.CONNECTOR] if series.signal.kind is Kind.GAUGE]
_COUNTED = [
    (series.first + offset) + (PROCESS_WIDTH + CONNECTOR_WIDTH * index if scope is Scope.CONNECTOR else 0)
    for scope in (Scope.PROCESS, Scope.CONNECTOR)
    for index in range(len(CONNECTORS) if scope is Scope.CONNECTOR else 1)
    for series in SERIES[scope]
    if series.signal.kind is not Kind.GAUGE
    for offset in range(series.width)
]


def engine(**more: Any) -> EngineInfo:
    """Return the description of an engine with two connectors."""
    connectors = tuple(ConnectorInfo(name, "MeteredConnector", "kv_both") for name in CONNECTORS)
    given: dict[str, Any] = {
        "model": "tiny", "connectors": connectors, "load_policy": "first", "failure_policy": "recompute",
        "vllm_version": "0.32.0", "kvobs_version": "1",
    }  # fmt: skip
    return EngineInfo(**given | more)


class Pages:
    """The pages of an engine's processes of these ranks (None: the scheduler's); ``info`` describes the engine.

    ``of`` are those of another engine of the same server.
    """

    def __init__(self, *ranks: int | None, of: "Pages | None" = None, **info: Any) -> None:
        self.info = engine(**info)
        self.engine_id: str = of.engine_id if of is not None else f"engine-{uuid4()}"
        self.config = config(f"{self.engine_id}_dp{self.info.index}" if self.info.index else self.engine_id)
        self.server = Identity.of(self.config).server
        self.name = f"{self.server}-{self.info.index}-"
        self.writers: list[PageWriter] = []
        for rank in ranks or (None,):
            self.begin(rank)

    def begin(self, rank: int | None, info: EngineInfo | None = None) -> PageWriter:
        """Begin the page of another process."""
        page = writer.begin(self.config, writer.describe(info or self.info, rank))
        finalize(self, page.leave)
        self.writers.append(page)
        return page

    def add(self, slot: int, n: int = 1, writer: int = 0) -> None:
        self.writers[writer].add(slot, n)

    def write(self, *groups: Sequence[Record], writer: int = 0) -> None:
        """Write groups of spans."""
        for group in groups:
            ring = URGENT if any(record.is_urgent for record in group) else ORDINARY
            assert self.writers[writer].spans[ring].write(group)

    def engine(self, positions: Positions | None = None) -> Engine:
        """Return what reads them."""
        made = Engine(self.name, positions)
        made.find()
        return made

    def totals(self, **more: Any) -> Totals:
        return Totals(self.engine(), **more)


NOW_NS = 2**62


@contextmanager
def stopped_clock(now_ns: int = NOW_NS) -> Iterator[None]:
    """Stop the clock by which ages are read."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(totals, "perf_counter_ns", return_value=now_ns))
        yield


class Numbers(NamedTuple):
    """What a process has counted: by slot, and by signal, connector and label values; and its gauges, by slot."""

    counts: dict[int, int]
    rows: dict[tuple[Signal, int, tuple[str, ...]], int]
    gauges: dict[int, int]

    def add_to(self, page: PageWriter) -> None:
        """Let a process count this."""
        for slot, n in self.counts.items():
            page.add(slot, n)
        for (signal, index, values), n in self.rows.items():
            page.rows.add(signal, index, values, n)
        for slot, value in self.gauges.items():
            page.set_gauge(slot, value)


@st.composite
def numbers(draw: Callable[..., Any], at_most: int = 2**40) -> Numbers:
    """Draw what one process has counted."""
    counts = draw(st.dictionaries(st.sampled_from(_COUNTED), st.integers(1, at_most), max_size=12))
    gauges = {
        signals.word(index, series.first): value
        for series, index, value in draw(
            st.lists(st.tuples(st.sampled_from(_GAUGES), st.integers(0, 1), st.integers(0, 2**60)), max_size=3)
        )
    }
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
    rows = {
        (signal, index, draw(st.tuples(*[text for _ in signal.labels]))): n
        for signal, index, n in draw(
            st.lists(st.tuples(st.sampled_from(DYNAMIC_COUNTERS), st.integers(0, 1), st.integers(1, 9)), max_size=3)
        )
    }
    return Numbers(counts, rows, gauges)
