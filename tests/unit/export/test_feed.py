"""EngineCore's side of the exporter: nothing waits for it or is lost with it; it ends with its engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvobs.demo.server import claim_port, parse_metrics
from kvobs.export import feed as module
from kvobs.export.feed import Feed, describe_engine, with_exporter
from kvobs.probe.increments import Increments
from kvobs.schema.options import ExporterOptions, Options
from kvobs.schema.signals import LOOKUPS, place, slot
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import Rig, Script, engine_config, transfer_config
from tests.support.contexts import no_otel_variables, record
from tests.support.payloads import CONNECTORS, engine

pytestmark = pytest.mark.timeout(120)

HIT = place(0, slot(LOOKUPS, "hit"))
HITS = ("kvobs_lookups_total", "connector", "one", "outcome", "hit")
CHILDREN = dict.fromkeys(CONNECTORS, "m:C")
WAIT_S = 30.0


def payload(n: int = 1, spans: int = 0) -> KvobsStats:
    return KvobsStats.of(CHILDREN, Increments({HIT: n}, [], {}, [[record()] for _ in range(spans)]))


def eventually(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (OSError, HTTPException):
            pass
        time.sleep(0.05)
    return condition()


def value_in(page: str, name: str, *labels: str) -> float:
    wanted = dict(zip(labels[::2], labels[1::2], strict=True)).items()
    return sum(s.value for s in parse_metrics(page) if s.name == name and wanted <= s.labels.items())


class Fed:
    """An engine without vLLM: a feed, and a look at what its exporter serves."""

    def __init__(self, **more: Any) -> None:
        self.port = claim_port(0)
        self.feed = Feed(engine(port=self.port, pid=os.getpid(), **more))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return answer.read().decode()

    def value(self, name: str, *labels: str) -> float:
        return value_in(self.get("/metrics"), name, *labels)

    def hits(self) -> float:
        return self.value(*HITS)

    def sees_the_end(self) -> bool:
        """Return whether the exporter has read to the end of its engine; no scrape is spent on that."""
        try:
            self.get("/healthz")
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == HTTPStatus.SERVICE_UNAVAILABLE
        return False

    @property
    def pid(self) -> int:
        def known() -> int | None:
            return self.feed._exporter.pid if self.feed._exporter is not None else None

        found: int = eventually(known)
        assert found
        return found

    def counts(self, hits: float) -> bool:
        return bool(eventually(lambda: self.hits() == hits))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fed]:
    no_otel_variables(monkeypatch)
    made = Fed(linger_s=0)
    yield made
    made.feed.close()


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_payloads_add_up_and_the_engine_is_alive(fed: Fed) -> None:
    for _ in range(10):
        fed.feed.put(payload())
    assert fed.counts(10)
    state = json.loads(fed.get("/healthz"))
    assert (state["engine"], state["engine_pid"]) == ("alive", os.getpid())
    assert fed.value("kvobs_engine_up") == 1
    last_s = fed.value("kvobs_last_payload_timestamp_seconds")
    assert time.time() - 60 < last_s <= time.time()
    assert fed.value("kvobs_spans_queued") == 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fed.get("/")
    spent_s = ("kvobs_self_seconds_total", "where", "apply")
    applied_s = eventually(lambda: fed.value(*spent_s))
    time.sleep(2.5)  # what the exporter counts itself comes back as a line, and is no news of the engine
    assert (fed.value("kvobs_last_payload_timestamp_seconds"), fed.value(*spent_s)) == (last_s, applied_s)


def test_the_exporter_keeps_no_file_of_the_engine_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of the engine would stay taken for as long as the last numbers are served."""
    no_otel_variables(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        made = Fed(linger_s=0)
        try:
            files, ours = Path(f"/proc/{made.pid}/fd"), f"socket:[{os.fstat(server.fileno()).st_ino}]"
            # It opens and closes others meanwhile.
            assert eventually(lambda: ours not in {os.readlink(file) for file in files.iterdir()})
        finally:
            made.feed.close()


@pytest.mark.parametrize("unit", [1, 2**60])
def test_an_exporter_that_is_killed_comes_back_and_no_counter_falls(
    fed: Fed, unit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nanoseconds of a hundred loads in flight are above 2**53, where floats are no longer exact, after 25 hours."""
    fed.feed.put(payload(5 * unit))
    assert fed.counts(5 * unit)
    first = fed.pid
    os.kill(first, signal.SIGKILL)
    fed.feed.put(payload(2 * unit))
    assert eventually(lambda: fed.pid != first)
    fed.feed.put(payload(unit))
    seen: list[float] = []

    def all_are_there() -> bool:
        seen.append(fed.hits())
        return seen[-1] == 8 * unit

    assert eventually(all_are_there)
    assert min(seen) >= 5 * unit
    assert f"kvobs's exporter (pid {first}) has ended: SIGKILL. It is started again" in caplog.text


def test_a_scrape_at_once_after_a_restart_has_all_that_was_counted_before(fed: Fed) -> None:
    fed.feed.put(payload(5))
    assert fed.counts(5)
    pid = fed.pid
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: is_gone(pid))
    fed.feed.put(payload(2))
    page = eventually(lambda: fed.get("/metrics"))
    assert value_in(page, *HITS) == 7


def test_nothing_waits_for_a_stopped_exporter_and_nothing_is_lost_but_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setattr(module, "SPANS_WAITING", 50)
    fed = Fed(linger_s=0)
    try:
        fed.feed.put(payload())
        assert fed.counts(1)
        os.kill(fed.pid, signal.SIGSTOP)
        for _ in range(5_000):
            fed.feed.put(payload(1, spans=1))
        assert eventually(fed.feed._queue.empty), "the thread goes on taking payloads in"
        os.kill(fed.pid, signal.SIGCONT)
        assert fed.counts(5_001)
        assert eventually(lambda: fed.value("kvobs_spans_dropped_total", "where", "queue") > 0)
    finally:
        fed.feed.close()


def test_after_a_regular_end_the_last_numbers_are_served_to_one_more_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    fed = Fed(linger_s=60)
    fed.feed.put(payload())
    assert eventually(lambda: fed.get("/healthz"))
    assert fed.value("kvobs_engine_up") == 1
    pid = fed.pid
    fed.feed.put(payload())
    fed.feed.close()
    time.sleep(1.0)
    assert not is_gone(pid), "nobody has scraped since"
    assert (fed.value("kvobs_engine_up"), fed.hits()) == (0, 2)
    assert eventually(lambda: is_gone(pid))


ENGINE = """
import os, time
from kvobs.export.feed import Feed, with_exporter
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.probe.recorder import Recorder
from kvobs.probe.increments import Increments
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import Rig, Script, engine_config, transfer_config
from tests.support.payloads import engine
from tests.unit.export.test_feed import payload
feed = Feed(engine(port={port}, pid=os.getpid(), linger_s=3.0))
feed.put(payload(7))
while feed._exporter is None or feed._exporter.pid is None:
    time.sleep(0.01)
print(feed._exporter.pid, flush=True)
if {forks} and (child := os.fork()):
    print(child, flush=True)
time.sleep(600)
"""


def test_killed_engines_last_numbers_are_served_though_a_forked_child_keeps_its_socket() -> None:
    fed = object.__new__(Fed)
    fed.port = claim_port(0)
    script = ENGINE.format(port=fed.port, forks=True)
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout is not None
        exporter, child = (int(killed.stdout.readline()) for _ in range(2))
        assert fed.counts(7)
    finally:
        killed.kill()
        killed.wait()
    try:
        assert eventually(lambda: fed.value("kvobs_engine_up") == 0, 10)
        assert fed.hits() == 7
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fed.get("/healthz")
        assert eventually(lambda: is_gone(exporter), 15), "a new engine needs its port"
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
        killed.communicate()


def test_a_full_disk_costs_log_lines_only() -> None:
    """What the exporter logs goes to the engine's stderr, which may be a file that can't grow any more."""
    fed = object.__new__(Fed)
    fed.port = claim_port(0)
    with socket.socket() as taken, open("/dev/full", "w") as full:
        taken.bind(("127.0.0.1", fed.port))
        taken.listen()
        script = ENGINE.format(port=fed.port, forks=False)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True)
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(1.0)  # it logs that the port is taken
    try:
        assert fed.counts(7)
    finally:
        process.kill()
        process.communicate()


def test_exporters_self_counts_outlive_it(fed: Fed) -> None:
    fed.feed.put(payload())
    assert fed.counts(1)

    def applied() -> float:
        fed.feed.put(payload())
        return fed.value("kvobs_self_seconds_total", "where", "apply")

    before = eventually(applied)
    assert before > 0
    os.kill(fed.pid, signal.SIGKILL)
    assert eventually(lambda: fed.value("kvobs_self_seconds_total", "where", "apply") >= before)


def test_an_exporter_that_can_not_start_costs_nothing_but_the_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(module, "BACK_OFF_S", (0.05, 0.1))
    fed = Fed()
    fed.feed.put(payload())
    assert eventually(lambda: "exporter can't be started" in caplog.text)
    assert eventually(lambda: fed.feed._starts > 4)
    assert caplog.text.count("exporter can't be started") == 2, "it does not fill the log"
    fed.feed.close()
    assert not fed.feed._thread.is_alive()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Feed:
    monkeypatch.setattr(Feed, "_run", lambda _: None)
    return Feed(engine())


def test_groups_of_spans_beyond_the_limit_are_lost_and_counted(still: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPANS_WAITING", 2)
    for n in (1, 2, 3):
        still.put(KvobsStats.of(CHILDREN, Increments({HIT: 1}, [], {}, [[record()] * n])))
    still._take_in()
    assert ([*map(len, still._spans)], still._waiting) == ([1, 2], Increments({HIT: 3, module._DROPPED: 3}, [], {}))


@pytest.mark.parametrize(("ran_s", "pid", "starts"), [(110, None, 4), (130, 7, 1)])
def test_after_an_exporter_that_ran_well_back_offs_begin_again(
    ran_s: float, pid: int | None, starts: int, still: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    before_s = time.monotonic()
    still._starts, ended = 4, Mock(pid=pid, status=pid and 9, has_ended=True, started=before_s - ran_s)
    ended.read.return_value, still._exporter = [Increments({HIT: 1}, [], {})], ended
    still._keep_running()
    assert [still._exporter, still._starts, still._waiting.counts] == [None, starts, {HIT: 1}]
    assert before_s <= still._start_at - {4: 8, 1: 1}[starts] <= time.monotonic()
    named = f"{' (pid 7) has ended: SIGKILL' if pid else ' has ended'}. It is started again in {'1' if pid else '8'} s"
    assert f"kvobs's exporter{named}, and no count is lost" in caplog.text
    ended.kill.assert_called_once_with()


def test_why_it_can_not_start_is_said(still: Feed, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_RunningExporter", Mock(side_effect=OSError("no more processes.")))
    still._start(0.0)
    assert "exporter can't be started: no more processes. It is started again in 1 s, and" in caplog.text


def test_counts_after_the_last_flush_are_sent_when_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setattr("kvobs.routing.scheduler.wall_ns", lambda: 10**18)
    fed = object.__new__(Fed)
    fed.port = claim_port(0)
    rig = Rig("kvobs", a, b, kvobs={"names": list(CONNECTORS), "exporter": {"port": fed.port}})
    lookups = ("kvobs_lookups_total", "connector", CONNECTORS[0])
    try:
        rig.add("flushed")
        rig.step()
        rig.step()
        assert eventually(lambda: fed.get("/healthz"))
        assert fed.value(*lookups) <= 1, "one scrape, so that it waits for another one"
        for i in range(5):
            rig.add(f"late-{i}")
        rig.step()
        assert not a.called("shutdown")
    finally:
        rig.connector.shutdown()
    assert eventually(fed.sees_the_end)
    page = fed.get("/metrics")
    assert value_in(page, *lookups) == 6
    calls = value_in(page, "kvobs_call_duration_seconds_count", *lookups[1:], "hook", "other")
    assert calls >= len(a.called("shutdown")) > 0, "the end is counted, too"


def test_the_exporter_finds_kvobs_and_pythons_own_modules_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert module._environment(Path("/src/kvobs"))["PYTHONPATH"] == "/src:/theirs"
    assert module._environment(Path("/usr/lib/python3/dist-packages/kvobs"))["PYTHONPATH"] == "/theirs"
    monkeypatch.delenv("PYTHONPATH")
    assert module._environment(Path("/src/kvobs"))["PYTHONPATH"] == "/src"
    assert "PYTHONPATH" not in module._environment(Path("/venv/lib/site-packages/kvobs"))


def test_the_exporter_is_no_child_of_the_engine(fed: Fed) -> None:
    """vLLM kills the children of an engine that it ends."""
    with open(f"/proc/{fed.pid}/stat") as file:
        assert int(file.read().rpartition(")")[2].split()[1]) != os.getpid()


@pytest.mark.parametrize(("port", "otlp_metrics"), [(9000, False), (9000, True), (None, True)])
@pytest.mark.parametrize("tracing", [TracingSettings(False, False, 1, 1, endpoint="http://collector:4317"), None])
def test_an_exporter_is_told_its_address_and_where_to_send(
    port: int | None, tracing: TracingSettings | None, otlp_metrics: bool
) -> None:
    """Each engine of a data-parallel group on one host has the next port."""
    config = engine_config(transfer_config("kvobs", [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]))
    config.parallel_config.data_parallel_index, config.parallel_config.data_parallel_rank_local = 3, 1
    config.parallel_config.world_size = 2
    info = describe_engine(config, (), Options(), os.getpid())
    assert (info.index, info.ranks, info.pid) == (3, (0, 1), os.getpid())
    assert (info.load_policy, info.connectors) == ("first", ())
    assert 0 <= time.time_ns() - info.began_ns < 60 * 10**9
    exporter = ExporterOptions(host="h", port=port, web_config="/w" if port else None, otlp_metrics=otlp_metrics)
    info = with_exporter(engine(), config, exporter, tracing)
    assert (info.host, info.port, info.otlp_metrics) == ("h", None if port is None else port + 1, otlp_metrics)
    assert info.web_config == exporter.web_config
    assert (info.has_spans, info.endpoint) == ((True, "http://collector:4317") if tracing else (False, None))
