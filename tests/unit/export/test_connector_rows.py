"""What each connector did, out of metrics that kvobs's own code filled; sorted; as JSON."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from io import StringIO
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console

import kvobs
from kvobs.cli.scrapes import parse
from kvobs.cli.top.screen import Picture
from kvobs.export.connector_rows import ConnectorRow, Server, server_row
from kvobs.export.numbers import Scrape
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import SIGNALS, slot
from tests.support.pages import TEXTS
from tests.support.top_engines import Engines, Vllm, count, thrashing, unserved
from tests.support.top_rows import ERRORS, GAUGES, MS, NOW_NS, RANKS, busy
from tests.support.written import stopped_clock

about: Any = pytest.approx
TEN = about(10)  # seconds, between two times as floats


@stopped_clock(NOW_NS)
def test_a_row_says_what_happened_between_two_scrapes_per_second() -> None:
    engines = Engines("cpu", "disk")
    engines.send(busy, opened=[*RANKS, *ERRORS])
    before = engines.scrape(at_s=100)
    engines.send(busy, GAUGES, [*RANKS, *ERRORS])
    server = server_row("here", before, engines.scrape(at_s=102))
    assert (server.address, server.error, server.model, server.seconds) == ("here", None, "tiny", 2)
    assert server.kvobs_version == kvobs.__version__
    cpu, disk = server.connectors
    assert (cpu.engine, cpu.connector, cpu.connector_class) == ("0", "cpu", "MeteredConnector")
    assert (cpu.lookups_per_s, cpu.hit_share, cpu.loads_per_s, cpu.load_tokens_per_s) == (4, 6 / 8, 2, 1024)
    assert (
        cpu.load_bytes_per_s,
        cpu.lost_to_shorter_offer_per_s,
        disk.load_bytes_per_s,
        disk.lost_to_shorter_offer_per_s,
    ) == (
        5 * 10**8,
        0,
        0,
        32,
    )
    assert (cpu.save_tokens_per_s, disk.save_tokens_per_s) == (192, None)
    assert (cpu.evicted_tokens_per_s, cpu.stored_tokens, cpu.capacity_tokens) == (48, 1024, 1500)
    assert (disk.evicted_tokens_per_s, disk.stored_tokens, disk.capacity_tokens) == (None, None, None)
    assert 2 * 0.001 < (cpu.load_p50_s or 0) < 4.2 * 0.001
    assert 0.067 < (cpu.load_p99_s or 0) < 0.135
    assert (cpu.load_stall_s_per_s, cpu.save_stall_s_per_s, cpu.stall_s_per_s) == (
        about(0.005),
        about(0.015),
        about(0.020),
    )
    assert (cpu.gain_s_per_s, disk.gain_s_per_s) == (about(-0.015), None)
    assert (cpu.scheduler_s_per_s, disk.scheduler_s_per_s) == (about(0.1), 0)
    assert 0.001 < (cpu.skew_p99_s or 0) < 0.0042
    assert (cpu.slowest_rank, cpu.slowest_rank_share) == ("1", 0.75)
    assert (cpu.loads_open, cpu.saves_held, cpu.oldest_s, cpu.quarantined) == (2, 3, TEN, False)
    assert (cpu.failed_loads_per_s, cpu.exceptions_per_s, cpu.errors_per_s) == (0, 0, 0)
    assert ({disk.hit_share, disk.load_p50_s, disk.slowest_rank}, disk.oldest_s) == ({None}, 0)
    assert (
        disk.lookups_per_s,
        disk.failed_loads_per_s,
        disk.exceptions_per_s,
        disk.errors_per_s,
        disk.quarantined,
    ) == (0, 1.5, 2, 3.5, True)


def test_first_scrapes_show_what_happened_since_the_start() -> None:
    engines = Engines("cpu", "disk")
    for _ in range(3):
        engines.send(busy)
    before = engines.scrape(at_s=0)
    again = Engines("cpu", "disk")
    again.send(busy, opened=ERRORS)
    first = server_row("here", None, again.scrape())
    assert first.seconds is None
    cpu, disk = first.connectors
    assert (cpu.lookups_per_s, cpu.load_tokens_per_s, cpu.stall_s_per_s, cpu.scheduler_s_per_s) == (
        8,
        2048,
        about(0.040),
        about(0.2),
    )
    assert disk.exceptions_per_s == 4
    (cpu, _) = server_row("here", before, again.scrape(at_s=2)).connectors
    assert (cpu.lookups_per_s, cpu.load_tokens_per_s, cpu.stall_s_per_s) == (4, 1024, about(0.020))


def test_engines_have_their_own_connectors_in_configured_order() -> None:
    engines = Engines("second", "first", engines=11)
    engines.send(lambda recorder: count(recorder, 1, signals.LOAD_TOKENS, 7), engine=10)
    connectors = server_row("here", None, engines.scrape()).connectors
    assert [(c.engine, c.connector) for c in connectors] == [
        (str(e), c) for e in range(11) for c in ("second", "first")
    ]
    assert [c.load_tokens_per_s for c in connectors] == [0] * 21 + [7]


def test_the_cost_of_kvobs_is_the_servers() -> None:
    engines = Engines("cpu", engines=2)
    engines.send()
    before = engines.scrape(at_s=0)
    for recorder in engines.recorders:
        recorder.page.add(slot(signals.OVERHEAD_SECONDS, "export"), 40 * MS)
        recorder.page.add(slot(signals.INTERNAL_ERRORS, "record"), 2)
    engines.front.shown._totals[1].count(slot(signals.INTERNAL_ERRORS, "read"), 1)
    server = server_row("here", before, engines.scrape(at_s=2))
    assert server.telemetry_s_per_s == pytest.approx(0.040)
    assert server.internal_errors == 5
    assert "".join(c.connector for c in server.connectors) == "cpucpu"


def waiting(kind: str) -> dict[tuple[Any, ...], int]:
    return {(0, signals.IN_FLIGHT, kind): 1, (0, signals.OLDEST_IN_FLIGHT, kind): NOW_NS - 15 * 10**9}


def called(recorder: Recorder, ms: int = 1) -> None:
    recorder.add_call(0, "build_connector_meta", 0, ms * MS)


def computing(recorder: Recorder) -> None:
    recorder.count(None, slot(signals.STEP_SECONDS), MS)


def failing_when_not_aborted(recorder: Recorder) -> None:
    for outcome, loads in {"ok": 94, "failed": 6, "aborted": 100}.items():
        count(recorder, 0, signals.LOADS, loads, "async", outcome)


def polling(recorder: Recorder) -> None:
    for _ in range(200):
        called(recorder)


def both(recorder: Recorder) -> None:
    polling(recorder)
    computing(recorder)


def corrupt(recorder: Recorder) -> None:
    recorder.count_dynamic(0, signals.CORRUPT_BLOCKS, "1")


ASKED = {(0, signals.IN_FLIGHT, "lookup"): 1}
STATES: list[tuple[Callable[[Recorder], None], dict[tuple[Any, ...], int], int, tuple[str, str]]] = [
    (lambda _: None, {}, 0, ("Idle", "configured")),
    (lambda _: None, {}, 1, ("OK", "requests")),
    (called, {}, 0, ("OK", "time_in_calls")),
    (lambda _: None, {(0, signals.IN_FLIGHT, "save"): 1}, 0, ("OK", "in_progress")),
    (lambda _: None, waiting("save"), 0, ("OK", "in_progress")),
    *((lambda _: None, waiting(kind), 0, ("Hangs", kind)) for kind in ("lookup", "load", "awaiting_schedule")),
    (computing, waiting("load"), 0, ("Hangs", "load")),
    (computing, waiting("awaiting_schedule"), 0, ("OK", "in_progress")),
    (lambda _: None, waiting("load") | {(0, signals.QUARANTINED): 1}, 0, ("Hangs", "load")),
    (corrupt, {(0, signals.QUARANTINED): 1}, 0, ("Corrupt", "corrupt_blocks")),
    (called, {(0, signals.QUARANTINED): 1}, 0, ("Quarantined", "quarantined")),
    (lambda recorder: count(recorder, 0, signals.LOADS, 1, "sync", "failed"), {}, 0, ("Failing", "failing_share")),
    (failing_when_not_aborted, {}, 0, ("Failing", "failing_share")),
    (lambda recorder: called(recorder, 200), ASKED, 0, ("Blocks steps", "scheduler_share")),
    (lambda recorder: called(recorder, 100), {}, 0, ("OK", "time_in_calls")),
    (polling, ASKED, 0, ("OK", "time_in_calls")),
    (both, ASKED, 0, ("Blocks steps", "scheduler_share")),
    (lambda recorder: recorder.observe(0, signals.LOAD_DURATION, 2000 * MS, "async"), {}, 0, ("Slow", "load_p99")),
]


@pytest.mark.parametrize(("record", "gauges", "running", "state"), STATES)
@stopped_clock(NOW_NS)
def test_a_state_is_the_worst_that_is_true(
    record: Any, gauges: dict[tuple[Any, ...], int], running: int, state: tuple[str, str]
) -> None:
    engines, vllm = Engines("cpu"), Vllm()
    engines.send(computing)
    before = engines.scrape(at_s=0)
    engines.send(record, gauges)
    vllm.send(running=running)
    (row,) = server_row("here", before, engines.scrape(at_s=2, vllm=vllm)).connectors
    assert (row.state, row.state_by) == state


SERVING_OTHERS = (
    *("NixlConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"),
    *("HiSparseConnector", "MooncakeConnectorV1", "MooncakeLayerwiseConnector"),
)


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, "Never serves"),
        ({"more": 'kvobs_admitted_tokens_total{engine="0",connector="disk"} 16'}, "Never serves"),
        ({"more": 'kvobs_admitted_tokens_total{engine="0",connector="cpu"} 16'}, "Idle"),
        ({"hours": 2}, "Idle"),
        ({"loadable": 90}, "Idle"),
        ({"asked": 0}, "Idle"),
        ({"role": "kv_producer"}, "Idle"),
        ({"role": "kv_consumer"}, "Idle"),
        *(({"of_class": between_engines}, "Idle") for between_engines in SERVING_OTHERS),
    ],
)
def test_a_connector_that_served_nothing_for_hours_is_told(more: dict[str, Any], state: str) -> None:
    """Of all that the engine has counted, also where nothing happens between two scrapes."""
    scrape = Scrape(0.0, parse(unserved(**more)))
    assert {server_row("here", before, scrape).connectors[0].state for before in (None, scrape)} == {state}


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, ("Thrashes", "thrash_share", 0.4)),
        ({"reused": 30, "loaded": 2699}, ("Thrashes", "thrash_share", 0.3)),
        ({"reused": 29}, ("Idle", "configured", 0)),
        ({"loaded": 3600}, ("Idle", "configured", 0)),  # as much as it evicted too early
        ({"evicted": 99, "loaded": 0}, ("Idle", "configured", 0)),
        ({"media": ("cpu", "storage")}, ("Idle", "configured", 0)),  # the other one keeps it
        ({"more": 'kvobs_save_tokens_total{engine="0",connector="disk",medium="storage"} 9'},
         ("Thrashes", "thrash_share", 0.4)),
        ({"more": 'kvobs_quarantined{engine="0",connector="cpu"} 1'}, ("Quarantined", "quarantined", 1)),
    ],
)  # fmt: skip
def test_a_connector_that_evicts_more_than_it_serves_thrashes(
    more: dict[str, Any], state: tuple[str, str, float]
) -> None:
    row = server_row("here", None, Scrape(0.0, parse(thrashing(**more)))).connectors[0]
    assert (row.state, row.state_by, row.state_value) == state


def test_a_connector_thrashes_only_while_it_evicts() -> None:
    before, after = (Scrape(at, parse(thrashing(evicted=n))) for at, n in ((0.0, 9000), (10.0, 10_000)))
    assert server_row("here", before, after).connectors[0].state == "Thrashes", "a hundred tokens per second"
    later = Scrape(20.0, after.values)
    assert server_row("here", after, later).connectors[0].state == "Idle"


def test_the_cause_is_shown_where_a_store_thrashes() -> None:
    scrape = Scrape(0.0, parse(unserved(more=thrashing(loaded=0))))
    assert server_row("here", None, scrape).connectors[0].state == "Thrashes"


def test_a_server_shows_how_much_of_its_prompts_was_used_before() -> None:
    engines = Engines("cpu")
    engines.send()
    before = engines.scrape(at_s=0)
    assert server_row("here", None, before).seen_share is None
    first, last = slot(signals.REUSE_DISTANCE), slot(signals.REUSE_DISTANCE) + signals.REUSE_DISTANCE.sum_offset - 1
    tokens = {first + 1: 100, first + 2: 300, last: 600}
    (recorder,) = engines.recorders
    for at, n in tokens.items():
        recorder.page.add(at, n)
    recorder.set_gauge(None, slot(signals.LOCAL_CACHE_TOKENS), 5000)
    server = server_row("here", before, engines.scrape(at_s=2))
    assert (server.seen_share, server.local_cache_tokens) == (0.4, 5000)
    assert server.half_within_tokens == pytest.approx(2048 + 2048 / 3)


def test_vllms_numbers_of_requests_are_the_servers() -> None:
    """Of all its engines; requests are as they are now, the time to the first token is that of the period."""
    engines, vllm = Engines("cpu", engines=2), Vllm(engines=2)
    engines.send()
    vllm.send(0, running=7, waiting=9, first_tokens_s=[30.0] * 50)
    before = engines.scrape(at_s=0, vllm=vllm)
    vllm.send(0, running=3, waiting=2, first_tokens_s=[0.015] * 98)
    vllm.send(1, running=4, waiting=0, first_tokens_s=[0.3, 0.3])
    server = server_row("here", before, after := engines.scrape(at_s=2, vllm=vllm))
    assert (server.running, server.waiting) == (7, 2)
    assert 0.01 < (server.ttft_p50_s or 0) < 0.02
    assert 0.25 < (server.ttft_p99_s or 0) < 0.5
    assert 20 < (server_row("here", None, after).ttft_p99_s or 0) < 40


def test_a_restarted_server_has_no_first_tokens_of_before() -> None:
    engines, vllm, again = Engines("cpu"), Vllm(), Engines("cpu")
    engines.send(lambda recorder: count(recorder, 0, signals.LOADS, 3, "async", "ok"))
    vllm.send(first_tokens_s=[0.015] * 9)
    before = engines.scrape(vllm=vllm)
    again.send()
    server = server_row("here", before, again.scrape(at_s=2, vllm=vllm))
    assert 0.01 < (server.ttft_p50_s or 0) < 0.02, "all since its start"
    alone = server_row("here", None, again.scrape())
    assert {alone.running, alone.waiting, alone.ttft_p50_s, alone.ttft_p99_s} == {None}, "as of an exporter"


def test_the_page_has_the_fields_of_json() -> None:
    table = TEXTS["docs/on-call.md"].partition("| field |")[2].partition("\n## ")[0]
    named = re.findall(r"`(?:connectors\[\]\.)?(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)))
    assert sorted(named) == sorted(field.name for row in (Server, ConnectorRow) for field in fields(row))


LABELS = st.dictionaries(
    st.sampled_from(("engine", "connector", "index", "rank", "le", "outcome", "kind", "version")),
    st.sampled_from(("", "0", "1", "hit", "load", "+Inf", "0.5", "-1", "²", "NaN", "x" * 99)),
)

SERIES = [f"{signal.name}{part}" for signal in SIGNALS for part in ("", "_bucket", "_sum", "_count")]
NUMBERS = st.sampled_from(("0", "1", "-5", "1e300", "NaN", "+Inf", "0.25"))


@given(st.lists(st.tuples(st.sampled_from(SERIES), LABELS, NUMBERS), max_size=30))
def test_whatever_a_server_says_makes_rows(lines: list[tuple[str, dict[str, str], str]]) -> None:
    """Of two scrapes, the second has the last line no more."""
    said = [
        f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}} {number}\n"
        for name, labels, number in lines
    ]
    texts = ("".join(said), "".join(said[:-1]))
    try:
        before, after = (Scrape(at, parse(text)) for at, text in enumerate(texts))
    except ValueError:
        return
    server = server_row("here", before, after)
    assert json.dumps(asdict(server), allow_nan=False)
    Console(file=StringIO()).print(Picture([server], 2, "load_p99_s"))
