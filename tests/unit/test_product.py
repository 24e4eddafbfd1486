"""Each metric, span, line of a log and verdict of one life through the built product, as its operator reads them.

Every table has all that is there: what is counted for another connector, rank or engine is found in its place.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vllm
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from typer.testing import CliRunner

from kvobs.cli import commands
from kvobs.cli.scrapes import PLAIN, parse, parse_vllm
from kvobs.cli.web import NoAnswerError, get
from kvobs.export.connector_rows import server_row
from kvobs.export.numbers import Scrape
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.probe.native import choice
from kvobs.schema import __version__, signals
from kvobs.schema.signals import SIGNALS, TIMED, Kind, Signal, hook_label, labelnames
from kvobs.schema.spans import SPANS
from kvobs.testing import BLOCK, Script
from kvobs.testing.collector import Collector
from kvobs.testing.server import claim_port
from kvobs.vllm_api import versions
from tests.support.contexts import no_otel_variables
from tests.support.life import NAMES, Life, life
from tests.support.observed import BYTES_PER_TOKEN, ENGINE, STEP_S, SYNC, Observed
from tests.support.page_files import page_folder, share_folder
from tests.support.top_engines import Vllm, answering
from tests.support.traced import CLIENT_SPAN, CLIENT_TRACE, SAMPLED, attributes, ids
from tests.support.waiting import eventually

about: Any = pytest.approx
BUILT = ["cpu", "flaky", "near", "far"]
PEER = "10.0.3.17:5600"
OWN = "scripted_things_total"


class _More:
    """Equals each number above 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and other > 0

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "more than 0"


MORE: Any = _More()


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    with life(tmp_path_factory.mktemp("life")) as found:
        yield found


# --- metrics

COLD = [20 + 7 * i % 90 for i in range(40)]
OTHERS = 13  # requests, whose prompts have four full blocks and one token
ROWS: dict[Signal, dict[tuple[str, ...], Any]] = {
    # Metric -> connector, and the values of the other labels -> number, or count and sum of a histogram.
    signals.CALL_ERRORS: {
        ("flaky", "wait_for_save", "TimeoutError"): 1,
        ("cpu", "build_connector_meta", "RuntimeError"): 1,
    },
    signals.SLOW_CALLS: {(name, "other"): 1 for name in NAMES},
    signals.LOOKUPS: {
        ("cpu", "hit"): 4,
        ("cpu", "miss"): 40 + OTHERS - 4 + 1,  # and after the failed load
        ("cpu", "pending"): 1,
        ("flaky", "hit"): 1,
        ("flaky", "miss"): 40 + OTHERS - 1,
        **{(name, outcome): n for name in ("near", "far") for outcome, n in (("hit", 2), ("miss", 40 + OTHERS - 2))},
    },
    signals.LOOKUP_DELAY: {("cpu",): (1, about(2 * STEP_S))},
    signals.OFFERED_TOKENS: {("cpu",): 7 * BLOCK, ("flaky",): 2 * BLOCK, ("near",): 5 * BLOCK, ("far",): 5 * BLOCK},
    signals.ADMITTED_TOKENS: {("cpu",): 6 * BLOCK, ("near",): 5 * BLOCK, ("far",): 5 * BLOCK},
    signals.HIT_TOKENS: {
        (name, "unspecified"): n * BLOCK
        for name, n in (("cpu", 6), ("near", 5), ("far", 5))
        if "get_external_cache_hit_sources" in versions.hooks()
    },
    signals.UNUSED_HIT_TOKENS: {
        ("cpu", "below_minimum"): BLOCK,
        ("flaky", "declined"): 2 * BLOCK,
        ("near", "other_chosen"): BLOCK,
        ("near", "aborted"): 2 * BLOCK,
    },
    signals.UNUSED_OFFERS: {("cpu",): 1, ("flaky",): 1, ("near",): 1},
    signals.LOADS: {
        ("cpu", "sync", "ok"): 2,
        ("cpu", "async", "failed"): 1,
        ("near", "async", "aborted"): 1,
        ("far", "async", "ok"): 2,
    },
    signals.LOAD_DURATION: {("cpu", "sync"): (2, MORE), ("far", "async"): (2, about((4 + 7) * STEP_S))},
    signals.PEER_LOADS: {("far", PEER, "ok"): 2, ("near", signals.UNKNOWN_VALUE, "aborted"): 1},
    signals.PEER_LOAD_SECONDS: {("far", PEER): about((4 + 7) * STEP_S)},
    signals.LOAD_RESUME_DELAY: {("far",): (2, about(2 * STEP_S))},
    signals.LOAD_TOKENS: {("cpu",): 4 * BLOCK, ("near",): 2 * BLOCK, ("far",): 5 * BLOCK},
    signals.LOAD_BYTES: {(name,): n * BLOCK * BYTES_PER_TOKEN * 2 for name, n in (("cpu", 4), ("near", 2), ("far", 5))},
    signals.PREFILL_SAVED: {("cpu",): MORE, ("far",): MORE},
    signals.LOAD_WAITED: {("cpu",): MORE, ("far",): about((5 + 8) * STEP_S)},
    signals.ESTIMATED_LOADS: {("cpu",): 3, ("far",): 2},
    signals.LOADS_SLOWER: {("cpu",): about(1.5, abs=0.5), ("far",): 2},  # the synchronous ones may be
    signals.LOAD_STALL: {(name,): (MORE, MORE) for name in BUILT},
    signals.RECOMPUTED_TOKENS: {("cpu",): 2 * BLOCK},
    signals.SAVES: {("near", "ok"): 1},
    signals.SAVE_HOLD: {("near",): (1, about(3 * STEP_S))},
    signals.SAVE_STALL: {(name,): (MORE, MORE) for name in BUILT},
    signals.IN_FLIGHT: {
        ("cpu", "lookup"): 0,
        ("far", "awaiting_schedule"): 0,
        ("cpu", "load"): 0,
        ("near", "save"): 0,
        ("far", "load"): 0,
        ("near", "load"): 1,
    },
    signals.OLDEST_IN_FLIGHT: {
        ("cpu", "lookup"): 0,
        ("far", "awaiting_schedule"): 0,
        ("cpu", "load"): 0,
        ("near", "save"): 0,
        ("far", "load"): 0,
        ("near", "load"): about(29.6, abs=STEP_S),
    },
    signals.HELD_TOKENS: {
        **dict.fromkeys([("cpu", "load"), ("near", "save"), ("far", "load"), ("far", "awaiting_schedule")], 0),
        ("near", "load"): 3 * BLOCK,
    },
    signals.RANK_SKEW: {
        ("near", "save"): (1, about(2 * STEP_S)),
        ("cpu", "load"): (2, about(0, abs=60)),
        ("far", "load"): (2, about((2 + 5) * STEP_S)),
    },
    signals.SLOWEST_RANK: {("near", "1"): 1, ("far", "1"): 2},
    signals.STUCK_TRANSFERS: {("far", "1"): 1},
    signals.UNEXPECTED_REPORTS: {("near", "load"): 1},
    signals.VERIFIED_BLOCKS: {
        ("cpu", "match"): 2 * 2 + 3,
        ("cpu", "mismatch"): 1,
        ("cpu", "unknown"): 2,  # on the rank that did not fail
        ("near", "unknown"): 2 * 2,
        ("far", "unknown"): 5 * 2,
    },
    signals.CORRUPT_BLOCKS: {("cpu", "1"): 1},
    signals.QUARANTINED: {("absent",): 1, ("flaky",): 0},  # enabled again by the last step
    signals.QUARANTINES: {("absent",): 1, ("flaky",): 1},
    signals.KV_EVENTS: {("near", "stored", "cpu"): 1, **{("near", "removed", of): 1 for of in ("cpu", "storage")}},
    signals.SAVE_TOKENS: {("near", "cpu"): 2 * BLOCK},
    signals.EVICTED_TOKENS: {("near", "cpu"): BLOCK},
    signals.STORED_TOKENS: {("near", "cpu"): BLOCK},
    signals.BLOCK_COPY_DURATION: {("far", "d2h"): (1, MORE)},
    signals.BLOCK_COPY_BYTES: {("far", "d2h"): 2 * 4 * 4},
    signals.CONNECTOR_INFO: {
        (name, str(i), cls, role, "first", "recompute"): 1
        for i, (name, cls, role) in enumerate(
            (
                ("cpu", "ScriptedConnector", "kv_both"),
                ("absent", "BestEffortConnector", "kv_both"),
                ("flaky", "BestEffortConnector", "kv_both"),
                ("near", "PeerConnector", "kv_both"),
                ("far", "PeerConnector", "kv_consumer"),
            )
        )
    },
    signals.LINK_SPEED: {("far",): 50e9},
    signals.CAPACITY_TOKENS: {("cpu",): 500},
    signals.STEP_SECONDS: {(): MORE},
    signals.ESTIMATE_PREFILLS: {(): len(COLD)},
    signals.REUSE_DISTANCE: {(): (sum((n - 1) // BLOCK * BLOCK for n in COLD) + 4 * BLOCK * OTHERS, 0)},
    signals.LOADABLE_TOKENS: {(): 2 * 4 * BLOCK},
    signals.PROMPT_TAIL_TOKENS: {(): sum((n - 1) % BLOCK + 1 for n in COLD) + OTHERS},
    signals.LOCAL_CACHE_TOKENS: {(): 64 * BLOCK},
    signals.BUILD_INFO: {(__version__, vllm.__version__, str(choice().is_native).lower()): 1},
    signals.START_TIME: {(): MORE},
    signals.INTERNAL_ERRORS: {("record",): 1},
    signals.OVERHEAD_SECONDS: {(where,): MORE for where in ("record", "export")},
    signals.SPANS_DROPPED: {("rate",): 1},
    signals.MALFORMED_CONTEXTS: {("headers",): 1},
    signals.REQUEST_LOG_DROPPED: {(): 1},
    signals.ENGINE_ENDED: {("cpu", "build_connector_meta", "RuntimeError"): 1},
}
ELSEWHERE = {
    signals.GC_PAUSES: "pauses",
    signals.CALL_DURATION: "calls",
    signals.CALL_IN_PROGRESS: "a call in progress",
    **dict.fromkeys((signals.ENGINE_UP, signals.SPANS_QUEUED), "the exporter"),
    **dict.fromkeys(
        (signals.FAILED_SYNC_LOADS, signals.MISSED_TOKENS, signals.FOLLOWED_EVICTIONS, signals.REUSED_EVICTIONS),
        "test_observed_loads",
    ),
}
"""Metrics with a test of their own."""


@cache
def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def series(text: str, signal: Signal, engine: int = ENGINE) -> dict[tuple[str, ...], Any]:
    """Return an engine's series of a metric in the text of /metrics."""
    parts = ("_count", "_sum") if signal.kind is Kind.HISTOGRAM else ("",)
    found: dict[tuple[str, ...], Any] = {}
    for sample in samples(text):
        if sample.name in [signal.name + part for part in parts] and sample.labels["engine"] == str(engine):
            labels = tuple(sample.labels[name] for name in labelnames(signal)[2:])
            found[labels] = (*found[labels], sample.value) if labels in found else (sample.value,)
    return {labels: values if len(parts) > 1 else values[0] for labels, values in found.items()}


@pytest.mark.parametrize("signal", ROWS, ids=[signal.name for signal in ROWS])
def test_each_metric_has_its_series_and_no_other(signal: Signal, lived: Life) -> None:
    found = series(lived.ended, signal)
    if signal is signals.SLOWEST_RANK:  # of synchronous loads either may be
        assert sum(found.pop(("cpu", rank), 0) for rank in "01") == 2
    assert found == ROWS[signal]


def test_every_metric_has_a_row() -> None:
    assert [signal.name for signal in SIGNALS if signal not in ROWS and signal not in ELSEWHERE] == []


def test_calls_are_counted_as_the_connectors_saw_them(lived: Life) -> None:
    """Every call of every hook that a script notes."""
    found = series(lived.late, signals.CALL_DURATION)
    for name in BUILT:
        noted = {hook: n for hook, n in lived.calls[name].items() if hook in TIMED and hook_label(hook) == hook}
        assert len(noted) > 12
        assert {hook: found[name, hook] for hook in noted} == {hook: (n, MORE) for hook, n in noted.items()}
    assert {labels[0] for labels in found} <= set(NAMES)


def test_pauses_are_counted_by_the_process_that_has_them(lived: Life) -> None:
    """Here all are one process."""
    found = series(lived.ended, signals.GC_PAUSES)
    assert {labels for (labels,) in found} <= {"scheduler", "worker"}
    assert sum(found.values()) > 0


def test_a_call_in_progress_is_that_of_its_rank(lived: Life) -> None:
    assert series(lived.during, signals.CALL_IN_PROGRESS) == {("far", "start_load_kv", "1"): MORE}


def test_a_connectors_own_metrics_have_its_name(lived: Life) -> None:
    found = {(s.labels["engine"], s.labels["connector"]): s.value for s in samples(lived.ended) if s.name == OWN}
    assert found == {(str(ENGINE), "far"): 3 + 4}


def test_the_groups_other_engine_has_only_its_configuration(lived: Life) -> None:
    known = {signals.BUILD_INFO, signals.CONNECTOR_INFO, signals.LINK_SPEED, signals.START_TIME}
    assert {signal for signal in SIGNALS if series(lived.ended, signal, engine=0)} == known


# --- spans

TIMES = ("queued", "stall", "waited", "saved", "layers_duration", "slowest_layer_duration")
OF_ALL = {"engine", "request.id", "sampling.reason", *TIMES}
OFF = {"lookups": 1, "local_tokens": 0, "prompt_tokens": 65}


def hit(connector: str, tokens: int, **more: int) -> dict[str, Any]:
    offered = {f"offered_tokens.{name}": more.get(name, 0) for name in BUILT} | {f"offered_tokens.{connector}": tokens}
    rate = {"outcome": "hit", "connector": connector, "tokens": tokens, "hit_rate": tokens / 65}
    return {**OFF, **offered, **rate, "lookups": more.get("lookups", 1)}


def loaded(connector: str, mode: str, tokens: int, outcome: str = "ok", **more: Any) -> dict[str, Any]:
    size = tokens * BYTES_PER_TOKEN * 2
    return {"connector": connector, "mode": mode, "outcome": outcome, "tokens": tokens, "bytes": size, **more}


def late(steps: int) -> dict[str, Any]:
    return {"remote.host": "10.0.3.17", "slowest_rank": 1, "rank_skew": about(steps * STEP_S)}


SPAN_ROWS: list[tuple[str, str, str, list[dict[str, Any]]]] = [
    # Name, request, why it is exported, attributes of each one.
    ("kv.lookup", "peer", "parent", [hit("far", 48, lookups=3)]),
    ("kv.lookup", "right", "parent", [hit("cpu", 32)]),
    ("kv.load", "right", "parent", [loaded("cpu", "sync", 32)]),
    ("kv.load", "peer", "parent", [loaded("far", "async", 48, **late(2))]),
    ("kv.load", "failed", "error", [loaded("cpu", "async", 32, "failed", recomputed_tokens=32, slowest_rank=0,
                                           rank_skew=0, **{"error.type": "load_failed"})]),
    ("kv.load", "aborted", "level", [loaded("near", "async", 32, "aborted", slowest_rank=0, rank_skew=0)]),
    ("kv.load", "stuck", "slow", [loaded("far", "async", 32, **late(5))]),
    ("kv.load.rank", "peer", "parent", [{"connector": "far", "mode": "async", "rank": rank} for rank in (0, 1)]),
    ("kv.load.rank", "failed", "error", [
        {"connector": "cpu", "mode": "async", "rank": 0},
        {"connector": "cpu", "mode": "async", "rank": 1, "error.type": "load_failed"},
    ]),
    ("kv.load.wrong", "wrong", "error", [{"connector": "cpu", "wrong_blocks": 1, "error.type": "wrong_bytes"}]),
    ("kv.save", "computed", "parent", [{"connector": "near", "outcome": "ok", "slowest_rank": 1,
                                        "rank_skew": about(2 * STEP_S)}]),
    ("kv.save.rank", "computed", "parent", [{"connector": "near", "rank": rank} for rank in (0, 1)]),
    ("kv.call", "", "slow", [{"connector": name, "hook": "reset_cache"} for name in NAMES]),
    ("kv.call", "", "error", [
        {"connector": "flaky", "hook": "wait_for_save", "rank": 1, "error.type": "TimeoutError"},
        {"connector": "cpu", "hook": "build_connector_meta", "error.type": "RuntimeError"},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "request_id", "reason", "rows"), SPAN_ROWS, ids=[" ".join(r[:3]) for r in SPAN_ROWS])
def test_each_span_has_its_attributes(
    name: str, request_id: str, reason: str, rows: list[dict[str, Any]], lived: Life
) -> None:
    found = []
    for span in lived.spans:
        has = {**attributes(span), **{k: v for k, v in (span.attributes or {}).items() if k == "error.type"}}
        title = f"{name} {has.get('hook') or has.get('connector')}" if SPANS[name].subject else name
        if (span.name, has.get("request.id", ""), has["sampling.reason"]) == (title, request_id, reason):
            found.append({key: value for key, value in has.items() if key not in OF_ALL})
            if reason == "parent":
                assert (ids(span)[0], ids(span)[2] == CLIENT_SPAN) == (CLIENT_TRACE, "rank" not in name)
    if found and rows[0].get("mode") == "sync":  # either rank may be the slowest
        assert found[0].pop("slowest_rank") in (0, 1)
        assert found[0].pop("rank_skew") >= 0
    assert found == rows


def test_every_span_has_a_row_and_is_of_its_engine(lived: Life) -> None:
    assert {row[0] for row in SPAN_ROWS} == SPANS.keys()
    assert {attributes(span)["engine"] for span in lived.spans} == {ENGINE}


# --- logs

LOG_ROWS = [
    *[r"best-effort connector 'absent' can't be built \(OSError: no disk\)\. .* without it until a restart"] * 3,
    r"connector 'absent' failed to be built\. It is in quarantine: .* without it until a restart .*",
    r"kvobs \S+ routes to cpu \(ScriptedConnector\), absent \(BestEffortConnector\), flaky \(BestEffortConnector\), "
    r"near \(PeerConnector\), far \(PeerConnector\); load_policy first; metrics go to /metrics of vLLM's API server, "
    r"or to kvobs's exporter if .*; spans go to http://127\.0\.0\.1:1, from vLLM's API server",
    r"calls are counted .*",
    r"best-effort connectors: flaky, absent\. A connector that fails goes into quarantine\. .*",
    r"kv_connector_extra_config\.kvobs\.best_effort: found 'absent', whose synchronous loads, .*",
    r"kv_connector_extra_config\.kvobs\.best_effort: found 'flaky', whose synchronous loads, .*",
    r"spans are sent to the endpoint in OTEL_EXPORTER_OTLP_ENDPOINT, but without --otlp-traces-endpoint .*",
    r"connector 'cpu' loaded wrong bytes on rank 1: 1 of 2 verified blocks of request wrong .* first at token 0\. .*",
    r"best-effort connector 'flaky' offers a synchronous load. The load is not used: .*",
    r"connector 'near': load of 1 request \(failed\) in progress for 1 s \(48 tokens\), waiting for rank 0, 1",
    r"connector 'far': load of 1 request \(stuck\) is stuck: 0\.5 s .* no report from rank 1\. .*",
    r"connector 'far' took 1\.4 s to load 32 tokens of request stuck, longer than slow_load_ms; .*",
    *[rf"connector '{name}': reset_cache took \d+ ms, more than slow_call_ms .*" for name in NAMES],
    r"internal error in kvobs's telemetry \(record\)\. Serving is not affected, .*",
    r"best-effort connector 'flaky' failed in wait_for_save: TimeoutError: no answer",
    r"connector 'flaky' failed on a worker\. It is in quarantine: new requests are served without it for 1 s .*",
    r"connector 'near' reported the end of a load of request nobody, which it was not chosen to load\. .*",
    r"connector 'flaky' left quarantine and is on probation: it receives the requests that arrive from now on",
    r"connector 'cpu' raised RuntimeError in build_connector_meta on scheduler; this crashes the engine",
]


def test_the_log_names_connectors_ranks_and_requests(lived: Life) -> None:
    for row, line in zip(LOG_ROWS, lived.log, strict=True):
        assert re.fullmatch(row, line)


REQUEST_ROWS: dict[str, tuple[str, dict[str, int], list[str], list[tuple[Any, ...]]]] = {
    # Request -> how it finished, tokens offered, saves, and of each load connector, mode, outcome, wrong blocks.
    "computed": ("length", {}, ["near"], []),
    "right": ("length", {"cpu": 32}, [], [("cpu", "sync", "ok", None)]),
    "wrong": ("length", {"cpu": 32}, [], [("cpu", "sync", "ok", 1)]),
    "peer": ("length", {"far": 48}, [], [("far", "async", "ok", None)]),
    "little": ("length", {"cpu": 16, "flaky": 32}, [], []),
    "aborted": ("abort", {"near": 32}, [], [("near", "async", "aborted", None)]),
    "stuck": ("length", {"far": 32}, [], [("far", "async", "ok", None)]),
}


@pytest.mark.parametrize("request_id", REQUEST_ROWS)
def test_a_request_has_a_line_with_its_connectors(request_id: str, lived: Life) -> None:
    line = lived.requests[request_id]
    loads = [(*(load[key] for key in ("connector", "mode", "outcome")), load.get("wrong_blocks"))
             for load in line["loads"]]  # fmt: skip
    offered = {name: n for name, n in line["offered_tokens"].items() if n}
    assert (line["finish_reason"], offered, line["saves"], loads) == REQUEST_ROWS[request_id]
    assert line["engine"] == ENGINE


# --- verdicts

VERDICTS = {
    **{("0", name): "Idle" for name in NAMES},
    ("1", "cpu"): "Corrupt",
    ("1", "absent"): "Quarantined",
    ("1", "flaky"): "Quarantined",
    ("1", "near"): "Hangs",
    ("1", "far"): "Slow",
}


@pytest.fixture
def served(lived: Life) -> str:
    """Return the text of /metrics while requests run on the second engine."""
    of_vllm = Vllm(engines=2)
    of_vllm.send(ENGINE, running=3)
    return lived.late + of_vllm.text


def test_each_connector_of_each_engine_has_its_verdict(served: str) -> None:
    """An engine that has nothing to do is not busy because another one of its group is."""
    rows = server_row("here", None, Scrape(0.0, parse(served), parse_vllm(served))).connectors
    assert {(row.engine, row.connector): row.state for row in rows} == VERDICTS
    shown = {(row.engine, row.connector): row.slowest_rank for row in rows}
    assert (shown["1", "far"], shown["0", "far"]) == ("1", None)


PROBLEMS = [
    "problem: {}: connector cpu loaded 1 blocks with wrong bytes since the engine's start.",
    "problem: {}: connector absent is in quarantine: new requests are served without it.",
    "problem: {}: connector flaky is in quarantine: new requests are served without it.",
    "problem: {}: connector near hangs: load for 29 s.",
]


def test_the_check_of_a_server_finds_what_is_wrong_and_no_more(served: str) -> None:
    with answering(200, served) as url:
        shown = CliRunner().invoke(commands.app, ["check", "--server", url]).stdout
    found = [line for line in shown.splitlines() if line.startswith("problem: ")]
    assert len(found) == len(PROBLEMS)
    for line, begin in zip(found, PROBLEMS, strict=True):
        assert line.startswith(begin.format(url)), line


def test_a_check_of_a_server_names_the_call_its_engine_died_in(lived: Life) -> None:
    only = "".join(line for line in lived.ended.splitlines(keepends=True) if 'engine="0"' not in line)
    with answering(200, only) as url:
        shown = CliRunner().invoke(commands.app, ["check", "--server", url]).stdout
    assert "its engine has ended in build_connector_meta of connector cpu: RuntimeError" in shown


# --- the exporter


@contextmanager
def exported(observed: Observed, port: int) -> Iterator[Callable[[], str]]:
    """Yield what reads the metrics of an engine's exporter; end it."""

    def text() -> str:
        with suppress(NoAnswerError):
            return get(f"http://127.0.0.1:{port}/metrics", PLAIN).text
        return ""

    try:
        yield text
    finally:
        observed.rig.connector.shutdown()
        server = Identity.of(observed.rig.scheduler.vllm_config).server
        with suppress(FileNotFoundError, ValueError):  # it has not begun
            os.kill(json.loads((files.folder() / f"{server}{files.EXPORTER}").read_bytes())["pid"], signal.SIGKILL)


def test_an_exporter_serves_the_numbers_of_the_second_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, a: Script, b: Script
) -> None:
    """The engine starts it, as its options say."""
    b.offers["r"] = SYNC
    with page_folder(), Collector() as collector:
        share_folder(monkeypatch, tmp_path)
        no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=collector.endpoint, **collector.env)
        observed = Observed(monkeypatch, a, b, exporter={"port": (port := claim_port(0))})
        observed.rig.add("r", max_tokens=1, trace_headers=SAMPLED)
        observed.step(3)
        with exported(observed, port) as text:
            assert eventually(lambda: series(text(), signals.LOADS) == {("two", "sync", "ok"): 1})
            assert eventually(lambda: {"kv.lookup", "kv.load two"} <= {span.name for span in collector.spans})
            found = text()
        assert series(found, signals.ENGINE_UP) == {(): 1}
        assert series(found, signals.SPANS_QUEUED).keys() == {()}
        assert {sample.labels["engine"] for sample in samples(found)} == {str(ENGINE)}
        assert {span.attributes["kv_transfer.engine"] for span in collector.spans} == {ENGINE}
        assert observed.rig.stats == [], "the API server gets none of it"
