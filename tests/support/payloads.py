"""Random numbers of a process, as payloads carry them, and the engine whose payloads they are."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import hypothesis.strategies as st

from kvobs.export import totals
from kvobs.probe.increments import Increments
from kvobs.schema import signals
from kvobs.schema.signals import CHILD_WIDTH, PROCESS_WIDTH, SERIES, SIGNALS, Kind, Scope
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import ConnectorInfo, EngineInfo

CONNECTORS = ("one", "two")
_OPENED = [signal for signal in SIGNALS if signal.is_open and signal.kind is Kind.COUNTER]
_GAUGES = [series for series in SERIES[Scope.CHILD] if series.signal.kind is Kind.GAUGE]
_COUNTED = [
    (series.first + offset) + (PROCESS_WIDTH + CHILD_WIDTH * child if scope is Scope.CHILD else 0)
    for scope in (Scope.PROCESS, Scope.CHILD)
    for child in range(len(CONNECTORS) if scope is Scope.CHILD else 1)
    for series in SERIES[scope]
    if series.signal.kind is not Kind.GAUGE
    for offset in range(series.width)
]


def engine(**more: Any) -> EngineInfo:
    """Return an engine with two connectors."""
    connectors = tuple(ConnectorInfo(name, "MeteredConnector", "kv_both") for name in CONNECTORS)
    given: dict[str, Any] = {
        "pid": 1, "began_ns": 1, "model": "tiny", "index": 0, "connectors": connectors, "load_policy": "first",
        "failure_policy": "recompute", "vllm_version": "0", "host": "127.0.0.1", "port": None,
    }  # fmt: skip
    return EngineInfo(**given | more)


NOW_NS = 2**62


@contextmanager
def stopped_clock(now_ns: int = NOW_NS) -> Iterator[None]:
    """Stop the clock by which ages are sent, read and served."""
    with ExitStack() as stack:
        for module in (wire, totals):
            stack.enter_context(mock.patch.object(module, "perf_counter_ns", return_value=now_ns))
        yield


@st.composite
def numbers(draw: st.DrawFn) -> Increments:
    """Draw the increments of one payload."""
    counts = draw(st.dictionaries(st.sampled_from(_COUNTED), st.integers(1, 2**40), max_size=12))
    gauges = {
        signals.place(child, series.first): value
        for series, child, value in draw(
            st.lists(st.tuples(st.sampled_from(_GAUGES), st.integers(0, 1), st.integers(0, 2**60)), max_size=3)
        )
    }
    values = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5)
    opened = [
        [signal.name, child, *draw(st.tuples(*[values for _ in signal.labels])), n]
        for signal, child, n in draw(
            st.lists(st.tuples(st.sampled_from(_OPENED), st.integers(0, 1), st.integers(1, 9)), max_size=3)
        )
    ]
    return Increments(counts, opened, gauges)
