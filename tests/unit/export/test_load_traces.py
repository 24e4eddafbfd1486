"""What belongs to a slow or failed load is put into its waterfall, and nothing else."""

from typing import Any

import pytest

from kvobs.export.load_traces import Found, LoadTrace, load_traces
from kvobs.schema.spans import Reason, Record
from tests.support.slow_loads import BEGIN_NS, FAILED, HEAD, MS, OF_LOAD, REQUEST, SLOW, span


def traces(*records: Record, engine: str = "e", rank: int | None = None) -> list[LoadTrace]:
    return load_traces(Found(engine, rank, record) for record in records)


def shown(trace: LoadTrace) -> list[tuple[Any, ...]]:
    """Return the parts: title, depth, begin and duration in ms since the whole began, words, whether it failed."""
    zero_ns = trace.parts[0].start_ns
    return [
        (part.title, part.depth, round((part.start_ns - zero_ns) / MS, 2), round((part.end_ns - part.start_ns) / MS, 2),
         part.words, part.is_bad)
        for part in trace.parts
    ]  # fmt: skip


def test_an_unsampled_load_has_its_queue_ranks_and_resume() -> None:
    (trace,) = traces(*SLOW)
    assert (trace.connector, trace.request, trace.outcome, trace.mode) == (
        "remote",
        REQUEST["request__id"],
        "ok",
        "async",
    )
    assert (trace.start_ns, trace.duration_ns) == (BEGIN_NS + 14_680_000, 872_580_000)
    words = "160 of 215 tokens, 655.4 kB, rank 1 last by 840.22 ms, computing: 17.90 ms"
    assert shown(trace) == [
        ("request", 0, 0, 888.78, "", False),
        ("queue and lookup", 1, 0, 14.68, "offered: remote 160 cpu 0", False),
        ("load remote", 1, 14.68, 872.58, words, False),
        ("rank 0", 2, 15.36, 31.07, "", False),
        ("rank 1", 2, 15.97, 871.29, "", False),
        ("resume", 1, 887.26, 1.52, "", False),
    ]
    assert [part.rank for part in trace.parts] == [None, None, None, 0, 1, None]
    assert [1 + part.depth for part in trace.parts] == [1, 2, 2, 3, 3, 2]


def test_a_failed_load_is_named() -> None:
    (trace,) = traces(*FAILED)
    failed = [(title, words) for title, _, _, _, words, is_bad in shown(trace) if is_bad]
    assert failed == [("load cpu", "896 of 900 tokens, 1.8 MB, failed, 896 tokens computed"), ("rank 0", "load_failed")]


def test_a_traced_request_has_its_last_lookup_before_the_load() -> None:
    early, last = (
        span("kv.lookup", 20 + i, at, 2, reason=Reason.PARENT, **REQUEST, offered_tokens__remote=tokens)
        for i, (at, tokens) in enumerate([(3, 0), (11, 160)])
    )
    late = span("kv.lookup", 22, 900, 1, reason=Reason.PARENT, **REQUEST)
    other = span("kv.lookup", 23, 11, 1, reason=Reason.PARENT, request__id="other")
    (trace,) = traces(late, last, early, other, *SLOW)
    assert [part[:5] for part in shown(trace)][1:4] == [
        ("queue", 1, 0, 11, ""),
        ("lookup", 1, 11, 2, "offered: remote 160"),
        ("load remote", 1, 14.68, 872.58, "160 of 215 tokens, 655.4 kB, rank 1 last by 840.22 ms, computing: 17.90 ms"),
    ]


def test_calls_and_wrong_bytes_that_belong_to_it_are_in_it() -> None:
    calls = [
        span("kv.call", 30, 2, 11, **OF_LOAD, hook="get_num_new_matched_tokens"),
        span("kv.call", 31, 20, 500, connector="remote", hook="start_load_kv", rank=1),
        span("kv.call", 32, 20, 500, connector="cpu", hook="start_load_kv", rank=1),
        span("kv.call", 33, 20, 500, connector="remote", hook="wait_for_save", rank=1),
        span("kv.call", 34, 2000, 5, connector="remote", hook="start_load_kv", rank=1),
        span("kv.call", 35, 100, 5, **OF_LOAD, hook="update_state_after_alloc", error="OSError", reason=Reason.ERROR),
    ]
    calls.append(span("kv.call", 36, 100, 5, **OF_LOAD, hook="update_state_after_alloc", reason=Reason.LEVEL))
    wrong = span("kv.load.wrong", 40, 950, 0, **OF_LOAD, wrong_blocks=3, error="wrong_bytes", reason=Reason.ERROR)
    found = [Found("e", 1 if "kv_transfer.rank" in each.attributes else None, each) for each in [*calls, wrong, *SLOW]]
    (trace,) = load_traces(found)
    assert [(title, depth, words, is_bad) for title, depth, _, _, words, is_bad in shown(trace)][2:] == [
        ("get_num_new_matched_tokens", 1, "slow", False),
        ("load remote", 1, "160 of 215 tokens, 655.4 kB, rank 1 last by 840.22 ms, computing: 17.90 ms", False),
        ("rank 0", 2, "", False),
        ("rank 1", 2, "", False),
        ("start_load_kv on rank 1", 2, "slow", False),
        ("update_state_after_alloc", 2, "OSError", True),
        ("resume", 1, "", False),
        ("wrong bytes", 1, "3 blocks", True),
    ]  # fmt: skip


def test_only_slow_and_failed_loads_are_shown_once_in_order() -> None:
    well = span("kv.load", 50, 1, 1, reason=Reason.LEVEL, **OF_LOAD, mode="async", outcome="ok")
    found = traces(*FAILED, *SLOW, *SLOW, well)
    assert [trace.connector for trace in found] == ["remote", "cpu"]
    assert len(found[0].parts) == 6


def test_engines_with_the_same_requests_are_kept_apart() -> None:
    found = load_traces([*(Found("a", None, one) for one in SLOW), Found("b", None, HEAD)])
    assert [(trace.engine, len(trace.parts)) for trace in found] == [("a", 6), ("b", 4)]


def test_a_sync_load_waits_within_its_step() -> None:
    head = span("kv.load", 3, 10, 150, **OF_LOAD, mode="sync", outcome="ok", tokens=32, waited=0.15)
    assert [(part[0], part[4]) for part in shown(traces(head)[0])] == [
        ("request", ""), ("load remote", "32 tokens, within the step")
    ]  # fmt: skip


@pytest.mark.parametrize("odd", [{}, {"tokens": "x", "queued": "y", "outcome": "\x1b[31m", "offered_tokens__a": "z"}])
def test_a_load_with_odd_attributes_is_shown_without_escapes(odd: dict[str, Any]) -> None:
    (trace,) = traces(span("kv.load", 3, 10, 150, **odd))
    assert (trace.connector, trace.request) == ("?", "?")
    assert not any("\x1b" in part.title + part.words for part in trace.parts)


def test_as_a_dict_it_has_what_is_shown_in_seconds() -> None:
    made = traces(*SLOW)[0].as_dict()
    assert (made["seconds"], made["start"]) == (0.87258, pytest.approx(BEGIN_NS / 1e9 + 0.01468))
    assert made["attributes"]["kv_transfer.local_tokens"] == 0
    assert made["parts"][4] == {
        "part": "rank 1", "depth": 2, "rank": 1, "start": pytest.approx(BEGIN_NS / 1e9 + 0.01597), "seconds": 0.87129,
        "words": "", "failed": False,
    }  # fmt: skip
