"""Any record of a span."""

from __future__ import annotations

import hypothesis.strategies as st

from kvobs.schema.spans import ATTRIBUTES, SPANS, Reason, Record
from tests.support.contexts import SAMPLED

ids = st.integers(1, 2**64 - 1).map(lambda n: f"{n:016x}")
times = st.integers(0, 2**63 - 1)
values = st.text(max_size=20) | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
records: st.SearchStrategy[Record] = st.builds(
    Record,
    name=st.sampled_from(sorted(SPANS)),
    trace_id=st.integers(1, 2**128 - 1).map(lambda n: f"{n:032x}"),
    span_id=ids,
    parent_id=st.just("") | ids,
    start_ns=times,
    end_ns=times,
    reason=st.sampled_from(list(Reason)),
    attributes=st.dictionaries(st.sampled_from(sorted(ATTRIBUTES)), values),
    observed_ns=times,
    links=st.lists(st.just(SAMPLED.traceparent), max_size=3).map(tuple),
)
