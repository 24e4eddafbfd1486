"""A connector that hangs or ends a real engine is named everywhere, and no other is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.server import Server
from tests.engine.exported import with_exporter
from tests.engine.hosts import on_two_hosts
from tests.engine.metered import configuration
from tests.engine.serving import ServedEngine, eventually, prompt, total
from tests.incidents.beginning import begin, faulty
from tests.incidents.known import FAULTY, LOOKUP, OTHER_HOST, PAUSES, STOPPED_S, Incident
from tests.incidents.watching import PATIENCE_S, watched

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def engine(
    served_engine: ServedEngine, folder: Path, rank: int | None, *, exporter: bool = True, **options: Any
) -> Iterator[tuple[Server, int]]:
    """Run an engine whose connector `remote` has a fault once there is a file `trigger`; yield the exporter's port.

    With a rank there are two. The options are kvobs's.
    """
    config = configuration(host_memory(), faulty(folder, rank or 0), names=["cpu", "remote"])
    config["kv_connector_extra_config"]["kvobs"] |= options
    port = 0
    if exporter:
        config, port = with_exporter(config)
    with served_engine(config, ranks=1 if rank is None else 2) as server:
        yield server, port


@pytest.mark.parametrize("incident", FAULTY, ids=lambda incident: incident.title)
def test_incident_is_seen(incident: Incident, served_engine: ServedEngine, tmp_path: Path) -> None:
    assert incident.fault
    hook, fault, rank = incident.fault
    with engine(served_engine, tmp_path, rank) as (server, port):
        if "first" not in incident.title:
            server.complete(prompt("warm"), 2)
        with watched(server, port, tmp_path) as watch:
            watch.begin()
            begin(server, tmp_path, hook, fault)
            watch.sees(incident)
            if incident.alert == "KvobsCallHangs":
                where = "scheduler" if rank is None else f"rank {rank}"
                assert watch.exported.health()["processes"][where] == f"{hook} of remote"


def test_nobody_is_named_for_a_process_that_does_not_run(served_engine: ServedEngine, tmp_path: Path) -> None:
    """The connector that is called then is isolated, so that it could go into quarantine."""
    with (
        engine(served_engine, tmp_path, None, best_effort=["remote"]) as (server, port),
        watched(server, port, tmp_path) as watch,
    ):
        server.complete(prompt("warm"), 2)
        for incident in PAUSES:
            assert incident.fault
            assert server.process
            watch.begin()
            begin(server, tmp_path, *incident.fault[:2])
            if incident.log:
                threading.Timer(STOPPED_S, os.killpg, (server.process.pid, signal.SIGCONT)).start()
            watch.sees(incident)
            server.complete(prompt("after", incident.title), 2)
        for process in ("scheduler", "worker"):
            assert (watch.prometheus.value(f'kvobs_gc_pause_seconds_total{{process="{process}"}}') or 0) > 2
        for nothing in ("kvobs_slow_calls_total", "kvobs_quarantined", "kvobs_call_errors_total"):
            assert not watch.prometheus.value(f"sum({nothing})"), nothing


@pytest.mark.parametrize("incident", OTHER_HOST, ids=lambda incident: incident.title)
def test_incident_on_another_host_is_seen_there(incident: Incident, model: Path, tmp_path: Path) -> None:
    assert incident.fault
    hook, fault, rank = incident.fault
    assert rank
    config = configuration(host_memory(), faulty(tmp_path, rank), names=["cpu", "remote"])
    with on_two_hosts(model, tmp_path, config) as (server, other, (first, second)):
        server.complete(prompt("warm"), 2)
        with watched(server, second, tmp_path, first, log=other.log) as watch:
            watch.begin()
            begin(server, tmp_path, hook, fault)
            watch.sees(incident)


def logged(server: Server, words: str) -> bool:
    return words in server.log.read_text(errors="replace")


def test_the_api_server_shows_a_hang_too(served_engine: ServedEngine, tmp_path: Path) -> None:
    with engine(served_engine, tmp_path, None, exporter=False) as (server, _):
        begin(server, tmp_path, LOOKUP, "holds the GIL")
        call = {"connector": "remote", "hook": LOOKUP, "rank": "scheduler"}
        assert eventually(lambda: total(server, "kvobs_call_in_progress_seconds", **call) > 0, PATIENCE_S)
        assert eventually(lambda: logged(server, f"connector 'remote' has been in {LOOKUP} on scheduler"), PATIENCE_S)


def test_the_api_server_logs_an_end_that_left_no_last_words(served_engine: ServedEngine, tmp_path: Path) -> None:
    with engine(served_engine, tmp_path, None, exporter=False) as (server, _):
        begin(server, tmp_path, LOOKUP, "exits")
        line = f"the engine has ended in {LOOKUP} of connector 'remote' on scheduler: "
        assert eventually(lambda: logged(server, line), 60)
