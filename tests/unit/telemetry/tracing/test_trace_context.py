"""What a client sends is a well-formed context or none, whatever it is; ids are nobody else's."""

import random
import subprocess
import sys
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from opentelemetry import trace
from opentelemetry.context import attach, detach, get_value, set_value

from kvobs.telemetry.tracing import trace_context
from kvobs.telemetry.tracing.trace_context import (
    REPORT,
    TRACEPARENT,
    MalformedContextError,
    TraceContext,
    as_otel,
    into_params,
    of_headers,
    of_params,
    parse,
    remote_of,
)
from tests.support.contexts import SAMPLED, UNSAMPLED, json_values, near_misses

HEX = set("0123456789abcdef")


def is_traceparent(value: Any) -> bool:
    """State the grammar of W3C Trace Context plainly."""
    if not isinstance(value, str) or len(value) > 512 or "\n" in value or value.count("-") < 3:
        return False
    version, trace_id, span_id, flags, *more = value.split("-")
    fields = ((version, 2), (trace_id, 32), (span_id, 16), (flags, 2))
    return (
        all(len(field) == digits and set(field) <= HEX for field, digits in fields)
        and version != "ff"
        and not (version == "00" and more)
        and set(trace_id) != {"0"}
        and set(span_id) != {"0"}
    )


PARTS = (
    ["00", "01", "fe", "ff", "0", "000", "0g", "0\u0660", ""],
    ["a" * 32, "0" * 32, "0" * 31 + "1", "a" * 31, "a" * 33, "A" * 32, "a" * 31 + "\x00", ""],
    ["b" * 16, "0" * 16, "0" * 15 + "1", "b" * 15, "b" * 17, "B" * 16, "b" * 15 + "\uff10", ""],
    ["00", "01", "02", "03", "ff", "1", "001", "0g", ""],
    ["", "-", "-more", "-" + "x" * 1000, "x", "\n", "-\n"],
)


def test_good_and_bad_parts_are_read_as_the_grammar_demands() -> None:
    values = [f"{'-'.join(parts)}{rest}" for *parts, rest in product(*PARTS)]
    read = {value: parse(value) for value in values}
    assert [v for v in values if (read[v] is not None) is not is_traceparent(v)] == []
    contexts = {value: context for value, context in read.items() if context is not None}
    assert contexts == {value: (value[3:35], value[36:52], value[54] in "13f") for value in contexts}
    assert sum(map(is_traceparent, values)) == 3 * 2 * 2 * 5 + 2 * (2 * 2 * 5) * 2, "both kinds are there"


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_later_versions_context_may_be_longer_to_a_limit(length: int) -> None:
    assert (parse(("01" + SAMPLED.traceparent[2:] + "-").ljust(length, "x")) is not None) is (length <= 512)


def outcome(read: Any, value: Any) -> TraceContext | str | None:
    try:
        found: TraceContext | None = read(value)
    except MalformedContextError:
        return "malformed"
    return found


@given(json_values | st.dictionaries(st.just("traceparent"), json_values | near_misses | st.binary()))
def test_headers_hold_a_context_none_or_something_malformed(headers: Any) -> None:
    found = outcome(of_headers, headers)
    if headers is None or (isinstance(headers, dict) and "traceparent" not in headers):
        assert found is None
    elif isinstance(headers, dict) and is_traceparent(headers["traceparent"]):
        assert found == parse(headers["traceparent"])
    else:
        assert found == "malformed"


@given(
    json_values
    | st.dictionaries(
        st.just("kvobs"), json_values | st.dictionaries(st.just("traceparent"), json_values | near_misses)
    )
)
def test_params_hold_a_context_none_or_something_malformed(params: Any) -> None:
    found = outcome(of_params, params)
    own = params["kvobs"] if isinstance(params, dict) and "kvobs" in params else None
    if not isinstance(params, dict) or "kvobs" not in params:
        assert found is None
    elif isinstance(own, dict) and is_traceparent(own.get("traceparent")):
        assert found == parse(own["traceparent"])
    else:
        assert found == "malformed"


@pytest.mark.parametrize(
    ("params", "remote"),
    [
        ({"remote_engine_id": "e", "remote_host": "h", "remote_port": 5600}, {"engine_id": "e", "host": "h"}),
        (
            {"remote_engine_id": "e", "remote_bootstrap_addr": "http://h:8998"},
            {"engine_id": "e", "host": "http://h:8998"},
        ),
        ({"remote_engine_id": 7, "remote_host": "h" * 300}, {"host": "h" * 256}),
        ({"remote_engine_id": "\ud800", "remote_host": "a\nb"}, {}),
        ({}, {}),
    ],
)
def test_the_prefill_engine_is_named_as_params_do(params: Any, remote: dict[str, str]) -> None:
    named = {f"kv_transfer.remote.{key}": value for key, value in remote.items()}
    assert remote_of({"do_remote_prefill": True, **params}) == named
    assert remote_of(params) == remote_of({"do_remote_decode": True, **params}) == {}


@given(json_values)
def test_params_of_any_kind_name_nobody(params: Any) -> None:
    assert remote_of(params) == {}


def test_a_context_is_handed_on_beside_what_is_there() -> None:
    mine = {"remote_block_ids": [1]}
    handed_on = into_params(mine, TRACEPARENT, UNSAMPLED.traceparent)
    assert mine == {"remote_block_ids": [1]}
    assert handed_on == {"remote_block_ids": [1], "kvobs": {"traceparent": UNSAMPLED.traceparent}}
    assert of_params(handed_on) == UNSAMPLED
    assert into_params(handed_on, TRACEPARENT, SAMPLED.traceparent) == handed_on, "a connector's value stays"
    both = into_params(handed_on, REPORT, {"asked": True})
    assert both["kvobs"] == {"traceparent": UNSAMPLED.traceparent, "report": {"asked": True}}
    assert into_params(None, REPORT, True) == into_params({}, REPORT, True) == {"kvobs": {"report": True}}
    for theirs in ({"kvobs": 3}, {"kvobs": None}, {"kvobs": {"report": 3}}):
        assert into_params(theirs, REPORT, True) == theirs
    assert of_params({"kvobs": {"blocks": []}}) is None
    assert of_params({"kvobs": {"report": True}}) is None, "a client's question for a report is no malformed context"


def test_ids_do_not_follow_from_the_seed_that_vllm_sets() -> None:
    made = []
    for _ in range(2):
        random.seed(0)
        made += [trace_context.new_trace_id(), trace_context.new_span_id() * 2]
    assert len(set(made)) == 4
    assert all(len(one) == 32 and set(one) <= HEX for one in made)


def test_a_forked_process_makes_other_ids() -> None:
    ids = f"import os; from {trace_context.__name__} import new_span_id; os.fork() and os.wait(); print(new_span_id())"
    both = subprocess.run([sys.executable, "-c", ids], capture_output=True, text=True, check=True).stdout.split()
    assert len(set(both)) == 2


@pytest.mark.parametrize("request_id", ["chatcmpl-0123ABCD", "cmpl-0123abc", "0123abcd", ""])
def test_an_id_that_vllm_has_not_made_is_whole(request_id: str) -> None:
    assert trace_context.external_id(request_id) == request_id


@given(st.text(max_size=400), st.text("0123456789abcdef", min_size=8, max_size=8))
@example("chatcmpl-1-0123abcd", "0123abcd")
@example("x" * 1000, "0123abcd")
def test_exactly_what_vllm_appends_is_cut(given_id: str, random_digits: str) -> None:
    assert trace_context.external_id(f"{given_id}-{random_digits}") == given_id[:256]


@pytest.mark.parametrize("sent", [SAMPLED, UNSAMPLED])
def test_for_others_it_is_a_remote_parent(sent: TraceContext) -> None:
    token = attach(set_value("key", "value"))
    context = as_otel(sent)
    detach(token)
    assert get_value("key", context) is None, "of the active context there is nothing in it"
    found = trace.get_current_span(context).get_span_context()
    assert (found.trace_id, found.span_id) == (int(sent.trace_id, 16), int(sent.span_id, 16))
    assert (found.is_remote, found.is_valid, found.trace_flags.sampled) == (True, True, sent.is_sampled)


def current() -> int:
    return trace.get_current_span().get_span_context().trace_id


@pytest.mark.parametrize("sent", [SAMPLED, None])
def test_a_context_is_active_during_the_call_and_not_after_it(sent: TraceContext | None) -> None:
    def connector(subject: Any, *args: Any, **kwargs: Any) -> Any:
        return current(), subject, args, kwargs

    call = trace_context.activated(connector, lambda subject: sent and trace_context.as_otel(sent))
    assert call("r", 1, two=2) == (int(sent.trace_id, 16) if sent else 0, "r", (1,), {"two": 2})
    assert current() == 0


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_an_error_goes_on_untouched_and_leaves_no_context_behind(error: BaseException) -> None:
    def fail(subject: Any) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        trace_context.activated(fail, lambda subject: trace_context.as_otel(SAMPLED))("r")
    assert raised.value is error
    assert current() == 0
