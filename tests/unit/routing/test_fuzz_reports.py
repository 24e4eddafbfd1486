"""Whatever workers report, the scheduler goes on: nothing raises, every block comes back, no book keeps anything."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.serial_utils import MsgpackEncoder

from kvobs import faults
from kvobs.routing import isolation
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata
from kvobs.schema.signals import CHILD_WIDTH, PROCESS_WIDTH
from kvobs.state.transfers import Report, ReportKind
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config, counted
from tests.support.scripted import Tally

RANKS = 2
LIVE = ("async", "sync", "saved", "plain")
HEADERS = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
FAR = 2**63 - 1

requests = st.sampled_from([*LIVE, "nobody", "", "x" * 10_000, "line\nbreak"])
times = st.sampled_from([0, 1, -1, -(2**63), FAR]) | st.integers(-(2**63), FAR)
reports = st.builds(
    Report,
    st.integers(0, RANKS - 1),
    st.sampled_from(ReportKind),
    requests,
    st.integers(0, 1),
    times,
    times,
    times,
)


def engine(*, lag: int = 0) -> Rig:
    """Return one with a request of every kind, of which the loads and saves are still open."""
    a, b = Script("a"), Script("b")
    a.offers |= {"async": (BLOCK, True), "sync": (BLOCK, False)}
    b.promises.add("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        rig = Rig("kvobs", a, b, ranks=RANKS, kvobs={"tracing": {"level": "calls"}}, lag=lag)
    for name in LIVE:
        rig.add(name, trace_headers=HEADERS)
    rig.run(2 + lag)
    return rig


def say(rig: Rig, reports: list[Report]) -> None:
    """Let the workers say this beside what they have to say, across vLLM's pickle and aggregator."""
    for report in reports:
        rig.workers[report.rank % RANKS]._side._reports.append(report)
    rig.step()


def end(rig: Rig, a: Script, b: Script) -> None:
    """Let everything end as it would."""
    for rank in range(RANKS):
        a.say(rank, received="async")
        b.say(rank, saved="saved")
    rig.run(3 + rig.lag)
    for name in LIVE:
        rig.abort(name)
    for rank in range(RANKS):  # for what has begun once more
        a.say(rank, received="async")
        b.say(rank, saved="saved")
    rig.run(2 + rig.lag)


@pytest.fixture
def rig() -> Rig:
    return engine()


@pytest.mark.usefixtures("in_production")
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(reports, max_size=8), max_size=3), st.integers(0, 1))
def test_whatever_is_reported_nothing_raises_and_nothing_is_left(steps: list[list[Report]], lag: int) -> None:
    mine = engine(lag=lag)
    scripts = [child.connector.script for child in mine.connector._children]
    for reports in steps:
        say(mine, reports)
    end(mine, *scripts)
    assert_nothing_is_left(mine)
    assert not mine.connector._side.ledger.incomplete
    MsgpackEncoder().encode(mine.stats)  # or vLLM's engine ends
    faults.take()


def test_reports_about_what_nobody_owns_are_counted_named_once_and_kept_nowhere(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(rig.connector._side.ledger)
    kinds = (ReportKind.RECEIVED, ReportKind.FAILED, ReportKind.SAVED)
    for _ in range(3):
        say(rig, [Report(i % RANKS, kinds[i % 3], f"nobody{i}", i % 2, 1) for i in range(3000)])
    assert len(rig.connector._side.ledger) <= before
    for child in (0, 1):
        for kind in ("load", "failure", "save"):
            assert counted(rig, "kvobs_stray_reports_total", child, kind) == 3 * 500
    assert sum("does not own" in line.getMessage() for line in caplog.records) == 6


def test_a_report_that_comes_again_and_again_counts_once(rig: Rig) -> None:
    reports = [
        Report(0, kind, request, 0, 5) for kind in (ReportKind.RECEIVED, ReportKind.HOLED) for request in LIVE
    ] * 500
    for _ in range(3):
        say(rig, reports)
    assert rig.status("async") == "WAITING_FOR_REMOTE_KVS", "the other rank has said nothing"
    load = rig.connector._side.ledger.load("async")
    assert load is not None
    assert (set(load.arrived), load.failed_on) == ({0}, {0})


def test_saves_reported_of_a_live_request_are_forgotten_with_it(rig: Rig) -> None:
    rig.add("long", max_tokens=100)
    rig.step()
    side = rig.connector._side
    for _ in range(3):
        say(rig, [Report(rank, ReportKind.SAVED, "long", child, 1) for rank in range(RANKS) for child in (0, 1)] * 100)
    assert len(side.ledger._entries["long"].saves) <= 2
    rig.abort("long")
    rig.step()
    assert "long" not in side.ledger._entries
    assert counted(rig, "kvobs_stray_reports_total", 0, "save") >= 1


def test_a_kind_that_this_version_does_not_know_does_not_even_arrive() -> None:
    with pytest.raises(ValueError, match="99 is not a valid ReportKind"):
        ReportKind(99)


def meta(parts: int, reports: list[Report] | None = None) -> KVConnectorOutput:
    return KVConnectorOutput(kv_connector_worker_meta=MultiKVConnectorWorkerMetadata((None,) * parts, reports or []))


def test_metadata_of_another_connector_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(TypeError, match="worker metadata of another connector reached kvobs: Tally"):
        rig.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=Tally(1)))


@pytest.mark.parametrize(("mine", "other"), [(2, 1), (2, 3), (0, 2)])
def test_ranks_of_other_configurations_are_refused_where_they_meet(mine: int, other: int) -> None:
    words = [MultiKVConnectorWorkerMetadata((None,) * parts) for parts in (mine, other)]
    with pytest.raises(TypeError, match=f"worker metadata of {mine} connectors"):
        words[0].aggregate(words[1])
    with pytest.raises(TypeError, match="the same --kv-transfer-config"):
        words[0].aggregate(Tally(1))


# --- what no worker of this engine can say: refused with a word about it, or without effect


def take_in(rig: Rig, output: KVConnectorOutput) -> None:
    """Let the scheduler's side refuse it, if it says what is wrong."""
    try:
        rig.connector.update_connector_output(output)
    except (TypeError, ValueError) as error:
        assert "report" in str(error) or "connectors" in str(error)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_metadata_of_too_few_or_many_children_is_refused_by_number(rig: Rig, parts: int) -> None:
    """With one rank nothing is aggregated, and nobody has compared."""
    with pytest.raises(TypeError, match=f"{parts} connectors"):
        rig.connector.update_connector_output(meta(parts))


@pytest.mark.parametrize("rank", [RANKS, -1, 10**6])
def test_a_rank_that_does_not_exist_completes_no_load(rig: Rig, rank: int) -> None:
    """Early, a load's blocks are read before they are filled."""
    for reporting in (0, rank):
        take_in(rig, meta(2, [Report(reporting, ReportKind.RECEIVED, "async", 0, 1)]))
    assert rig.connector._side.ledger.load("async") is not None


@pytest.mark.parametrize("kind", [0, 7, None])
def test_what_is_no_kind_of_report_completes_no_load(rig: Rig, kind: Any) -> None:
    take_in(rig, meta(2, [Report(rank, kind, "async", 0, 1) for rank in range(RANKS)]))
    assert rig.connector._side.ledger.load("async") is not None


@pytest.mark.parametrize("child", [-1, 2])
@pytest.mark.parametrize("kind", [ReportKind.RECEIVED, ReportKind.SAVED, ReportKind.SYNC_FAILED])
@pytest.mark.usefixtures("in_production")
def test_a_child_that_does_not_exist_is_no_other_child(
    rig: Rig, kind: ReportKind, child: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = rig.connector._side.collector._recorder
    recorder.take()
    take_in(rig, meta(2, [Report(0, kind, "nobody", child, 1)]))
    assert "ScriptedConnector" not in caplog.text
    assert all(0 <= place < PROCESS_WIDTH + 2 * CHILD_WIDTH for place in recorder._counts)
    assert faults.take() == {}


def test_a_clients_id_is_one_short_line_of_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    take_in(rig, meta(2, [Report(0, ReportKind.RECEIVED, "x\nINFO forged " + "x" * 10**6, 0, 1)]))
    (line,) = (line.getMessage() for line in caplog.records if "does not own" in line.getMessage())
    assert len(line) < 1000
    assert "\n" not in line


# --- isolated children


def isolated() -> tuple[Rig, Script, Script]:
    a, b = Script("a"), Script("b")
    connectors = [child_config(a, "BestEffortConnector"), child_config(b)]
    return Rig("kvobs", connectors=connectors, kvobs={"names": ["a", "b"], "isolate": ["a"]}), a, b


@pytest.mark.parametrize("child", [1, 7, -1])
def test_a_failure_of_a_child_that_is_not_isolated_is_refused_or_without_effect(child: int) -> None:
    mine, _, _ = isolated()
    sent = MultiKVConnectorWorkerMetadata((None, None), [], frozenset({(child, 0)}))
    take_in(mine, KVConnectorOutput(kv_connector_worker_meta=sent))
    assert not mine.connector._side.isolation.is_out(0)


@pytest.mark.parametrize(
    "is_held",
    [
        False,
        True,
    ],
)
def test_a_child_that_failed_comes_back_and_nothing_of_it_piles_up(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sibling holds the blocks of a request that is over when a hook of the step fails."""
    now = [10**18]
    monkeypatch.setattr(isolation, "wall_ns", lambda: now[0])
    mine, a, b = isolated()
    b.promises |= {"first"} if is_held else set()
    mine.add("first")
    mine.run(4)
    assert mine.status("first") == "gone" or is_held
    a.raises["build_connector_meta"] = RuntimeError("no")
    mine.add("second", max_tokens=3)
    mine.step()
    a.raises.clear()
    assert mine.connector._side.isolation.is_out(0)
    b.say(0, saved="first")
    mine.run(6)
    assert len(mine.connector._side.ledger) == 0
    now[0] += 3600 * 10**9
    mine.add("third")
    mine.run(5)
    assert not mine.connector._side.isolation.is_out(0)
    side = mine.connector._side
    assert [len(visibility) for visibility in side.visibility] == [0, 0]
    assert side.isolation._asked == {0: {}}
    assert len(side.open_lookups) == 0
    assert a.called("reset_cache") == []


def test_what_a_child_raises_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    mine, a, _ = isolated()
    a.raises["build_connector_meta"] = RuntimeError("x\nINFO forged " + "x" * 10**6)
    mine.add("first")
    mine.step()
    (line,) = (line.getMessage() for line in caplog.records if "It is in quarantine" in line.getMessage())
    assert len(line) < 1000
    assert "\n" not in line
