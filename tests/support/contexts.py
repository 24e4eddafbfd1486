"""What the tests of tracing share: what a client may send, a sampler that says what a test wants, and records."""

import os
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest

from kvobs.page.writer import PageWriter, describe, plain
from kvobs.probe.recorder import CallEvent
from kvobs.schema.spans import ATTRIBUTES, SPANS, Reason, Record
from kvobs.state.transfers import LookupResult, Offer
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.sampling import TracingSettings, Verdicts
from kvobs.telemetry.tracing.trace_context import TraceContext
from tests.support.numbers import spans

SAMPLED = TraceContext("a" * 31 + "1", "b" * 15 + "1", True)
UNSAMPLED = TraceContext("c" * 31 + "1", "d" * 15 + "1", False)

TRACING = TracingSettings(
    is_on=True,
    has_calls=False,
    propagates=False,
    slow_load_ns=1_000_000_000,
    slow_sync_load_ns=100_000_000,
    endpoint="http://collector:4317",
)

_KEYS = st.sampled_from(["kvobs", "traceparent", "tracestate"]) | st.text(max_size=5)


def _cut_and_pasted(at: int, cut: int, pasted: str) -> str:
    value = SAMPLED.traceparent
    return value[:at] + pasted + value[at + cut :]


near_misses = st.builds(
    _cut_and_pasted,
    st.integers(0, 55),
    st.integers(0, 20),
    st.text(max_size=3) | st.text("0123456789abcdefABCDEF-\n", max_size=33),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | near_misses
    | st.sampled_from([SAMPLED.traceparent, UNSAMPLED.traceparent, "0" * 10_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)

span_ids = st.integers(1, 2**64 - 1).map(lambda n: f"{n:016x}")
times = st.integers(0, 2**63 - 1)
attribute_values = st.text(max_size=20) | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
records: st.SearchStrategy[Record] = st.builds(
    Record,
    name=st.sampled_from(sorted(SPANS)),
    trace_id=st.integers(1, 2**128 - 1).map(lambda n: f"{n:032x}"),
    span_id=span_ids,
    parent_id=st.just("") | span_ids,
    start_ns=times,
    end_ns=times,
    reason=st.sampled_from(list(Reason)),
    attributes=st.dictionaries(st.sampled_from(sorted(ATTRIBUTES)), attribute_values),
    observed_ns=times,
    links=st.lists(st.just(SAMPLED.traceparent), max_size=3).map(tuple),
)


class Sampler(Verdicts):
    """Samples traces that begin here or not, as a test says, and follows a caller's flag."""

    def __init__(self, roots: bool) -> None:
        self.roots = roots

    def on(self, trace_id: str, parent: TraceContext | None) -> bool:
        return self.roots if parent is None else parent.is_sampled


class BrokenSampler(Sampler):
    def __init__(self) -> None:
        super().__init__(True)

    def on(self, trace_id: str, parent: TraceContext | None) -> bool:
        raise RuntimeError("no verdict")


class Noting:
    """A tracer that keeps what it is given."""

    step = None

    def __init__(self, traces_all: bool = False) -> None:
        self.traces_all = traces_all
        self.noticed: list[CallEvent] = []

    def note(self, noticed: CallEvent) -> None:
        self.noticed.append(noticed)

    def join_step(self, trace: Any, loads: Any) -> None: ...


def request(request_id: str = "r", headers: Any = None, params: Any = None) -> Any:
    return SimpleNamespace(
        request_id=request_id, num_prompt_tokens=64, trace_headers=headers, kv_transfer_params=params
    )


def record(name: str = "kv.load", **changes: Any) -> Record:
    """Return a well-formed record of a sampled trace."""
    made = Record(name, "1" * 32, "2" * 16, "", 1_000, 3_000, Reason.PARENT, {"kv_transfer.connector": "disk"})
    return made._replace(**changes)


def written(journal: Journal) -> list[Record]:
    """Return the records that were written since the last call."""
    return [one for group in spans(journal._page) for one in group]


def journal() -> Journal:
    """Return a journal in a page that no other process sees."""
    return Journal(PageWriter(describe(plain(("one", "two")), None)))


def lookup(*offers: tuple[int, int], local: int = 0, **more: Any) -> LookupResult:
    """Return the result of a lookup; ``offers`` are connectors and tokens."""
    return LookupResult([Offer(index, tokens, True) for index, tokens in offers], local, **more)


def no_otel_variables(patch: pytest.MonkeyPatch, **variables: str) -> None:
    """Let the environment have these OTEL_* variables, and no other."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
