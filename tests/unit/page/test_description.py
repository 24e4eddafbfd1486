"""Processes of one engine, and of one server, are told by their names; a description says what readers need."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.page.description import FIELDS, ConnectorInfo, End, EngineInfo, Identity, ProcessInfo, process_name
from kvobs.page.writer import describe, plain
from tests.support.watched import config

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
numbers = st.integers(0, 2**31 - 1)
ends = st.builds(End, texts, texts, st.none() | numbers, texts)
connectors = st.builds(ConnectorInfo, texts, texts, texts, st.none() | st.floats(0, 1e6))
engines = st.builds(
    EngineInfo,
    st.lists(connectors, max_size=3).map(tuple),
    model=texts,
    index=numbers,
    load_policy=texts,
    failure_policy=texts,
    vllm_version=texts,
    kvobs_version=texts,
    ranks=st.integers(0, 2**20),
    has_spans=st.booleans(),
    endpoint=st.none() | texts,
    port=st.none() | numbers,
    launch=texts,
)
processes = st.builds(
    ProcessInfo,
    engines,
    numbers,
    st.none() | texts,
    texts,
    st.integers(0, 2**63 - 1),
    st.integers(1, 2**20),
    rank=st.none() | numbers,
    parent=numbers,
    is_native=st.booleans(),
    cost_ns=st.floats(0, 1e9),
    previous=st.none() | ends,
    previous_ago_s=st.floats(0, 1e6),
)


@given(processes)
def test_a_description_is_read_as_it_was_written(process: ProcessInfo) -> None:
    assert ProcessInfo.from_json(process.to_json()) == process


def test_a_version_of_the_page_covers_all_fields() -> None:
    for kind in (ProcessInfo, EngineInfo, ConnectorInfo, End):
        assert {field.name for field in fields(kind)} <= {*FIELDS}


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 10**5, b'{"engine": {"connectors": []}}', b'{"pid": 1}']
)
def test_what_is_no_description_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="its description can't be read: "):
        ProcessInfo.from_json(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"pid": -1}, {"pid": 2**31}, {"rank": -1}, {"rank": 2**31}, {"parent": 2**40}, {"calls": 2**21}, {"calls": -1},
        {"began_ns": -1}, {"cost_ns": -1.0}, {"cost_ns": 1e300},
        {"engine": replace(plain([]), ranks=2**30)}, {"engine": replace(plain([]), index=-1)},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_their_bounds_are_refused(changed: dict[str, Any]) -> None:
    """Readers count up to some, and ask the kernel about others."""
    with pytest.raises(ValueError, match="its description can't be read: Expected "):
        ProcessInfo.from_json(replace(describe(plain(["one"]), 1), **changed).to_json())


def test_a_description_with_text_that_is_no_unicode_is_written() -> None:
    process = describe(replace(plain(["\ud800", "two"]), model="/models/\udce9t\udce9"), 1)
    read = ProcessInfo.from_json(process.to_json())
    assert (read.engine.names, read.engine.model, read.pid) == (["?", "two"], "/models/?t?", process.pid)


def test_processes_share_an_identity_only_in_one_engine() -> None:
    same = [Identity.of(config(name)) for name in ("e", "e")]
    group = [Identity.of(config(f"e_dp{i}")) for i in (0, 3, 12)]
    others = [Identity.of(config(name)) for name in ("f", "e_dp", "e_dpx", "dp0")]
    assert same[0] == same[1]
    assert {each.server for each in (*same, *group)} == {same[0].server}
    assert [each.number for each in group] == [0, 3, 12]
    assert [each.number for each in others] == [0] * 4
    assert len({each.server for each in (*same, *others)}) == 5
    instance = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"), instance_id="two")
    assert Identity.of(instance).server != same[0].server
    assert same[0].digest(b"pages") != same[0].digest(b"other"), "one does not reveal the other"
    assert (process_name(None), process_name(3)) == ("scheduler", "rank 3")
    assert Identity.of(SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=None), instance_id="")).number == 0
