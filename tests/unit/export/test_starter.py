"""What keeps an exporter running: once it is needed, again when it has ended, and for as long as the engine runs."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvobs
from kvobs import faults
from kvobs.export import starter
from kvobs.export.process import lock_of
from kvobs.export.starter import Starter, of_scheduler, of_worker
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.page.layout import STEPS
from kvobs.schema.config import EXPORTER_VARIABLE
from kvobs.schema.options import ExporterOptions
from kvobs.testing import Rig, Script, cache_config, engine_config, transfer_config
from tests.support import watched
from tests.support.contexts import no_otel_variables
from tests.support.exporting import Page, end, has_ended, state_of, writing
from tests.support.page_files import share_folder
from tests.support.rig import entry_for
from tests.support.waiting import eventually
from tests.support.written import Pages

pytestmark = pytest.mark.timeout(300)
ON = ExporterOptions(port=9470)
NEVER = "no vLLM API server exposes them"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    no_otel_variables(monkeypatch)
    caplog.set_level(logging.INFO)
    monkeypatch.delenv(EXPORTER_VARIABLE, raising=False)
    monkeypatch.setattr(starter, "LOOK_S", 0.02)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, ExporterOptions]]]:
    """Return what is started instead of exporters."""
    gc.collect()
    for left in (thing for thing in gc.get_objects() if type(thing) is Starter):
        left.close()  # of engines of other tests in this process
    started: list[tuple[str, ExporterOptions]] = []
    monkeypatch.setattr(starter, "start", lambda *of: started.append(of))
    yield started
    gc.collect()  # starters that a failed test has left


def config(name: str, number: int = 0, **parallel: Any) -> Any:
    """Return the configuration of an engine, or of one of its workers."""
    made = watched.config(f"{name}_dp{number}" if number else name)
    given = {"distributed_executor_backend": "mp", "node_rank_within_dp": 0, "local_world_size": 2, **parallel}
    made.parallel_config = SimpleNamespace(**given)
    return made


def server_of(made: Any) -> str:
    return Identity.of(made).server


# When it is started


@pytest.mark.parametrize("held", [False, True])
def test_options_start_it_at_once_as_the_configuration_shows(
    held: bool, begun: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where an API server shows the metrics: that one does not, with these options."""
    made = config(f"at once {held}")
    lock = files.Lock(files.folder(), f"{server_of(made)}-0{files.COLLECTOR}") if held else None
    running = of_scheduler(ON, made)
    assert eventually(lambda: begun)
    assert {*begun} == {(server_of(made), ON)}
    assert caplog.text == ""
    running.close()
    if lock is not None:
        lock.release()


def test_it_starts_if_no_api_server_shows_them_and_logs_it_once(
    begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.5)
    monkeypatch.setattr(starter, "BACK_OFF_S", (0.05, 0.05))
    made, before = config("auto"), time.monotonic()
    running = of_scheduler("auto", made)
    assert eventually(lambda: len(begun) > 3)
    assert time.monotonic() - before >= 0.5
    assert {*begun} == {(server_of(made), ExporterOptions())}
    running.close()
    text = f"kvobs's exporter serves the metrics at http://127.0.0.1:9464/metrics, because {NEVER}. To reach them from"
    assert caplog.text.count(text) == 1
    assert caplog.text.count(f"or {EXPORTER_VARIABLE}=0.0.0.0:9464 in the environment") == 1


@pytest.mark.parametrize("number", [0, 1])
def test_where_an_api_server_shows_them_nothing_starts(
    number: int, begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.3)
    made = config(f"shown {number}", number)
    others = files.Lock(files.folder(), f"{server_of(made)}-{1 - number}{files.COLLECTOR}")
    lock = files.Lock(files.folder(), f"{server_of(made)}-{number}{files.COLLECTOR}")
    running = of_scheduler("auto", made)
    assert eventually(running._is_over.is_set), "that is not asked again"
    assert (begun, caplog.text) == ([], "")
    lock.release()
    running.tend()
    assert begun == []
    again = of_scheduler("auto", made)
    assert eventually(lambda: begun), "that of another engine is none of this one's"
    again.close()
    others.release()


@pytest.mark.parametrize("lock", [files.COLLECTOR, files.EXPORTER, None])
def test_without_the_option_hidden_metrics_are_a_warning(
    lock: str | None, begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.3)
    made = config(f"null {lock}")
    name = f"{server_of(made)}{'-0' if lock == files.COLLECTOR else ''}{lock}"
    held = files.Lock(files.folder(), name) if lock is not None else None
    running = of_scheduler(None, made)
    assert eventually(running._is_over.is_set)
    assert begun == []
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    text = f"kvobs's metrics and spans are not exported: {NEVER}, and kvobs.exporter is null"
    assert lines == ([] if lock else [(logging.WARNING, text)])
    if held is not None:
        held.release()


def test_no_address_is_logged_of_an_exporter_that_another_serves(
    begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was started by hand, as a sidecar."""
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.0)
    by_hand = lock_of(server_of(config("by hand")))
    running = of_scheduler("auto", config("by hand"))
    assert eventually(lambda: running._ran_s), "it has seen the other one"
    assert (begun, caplog.text) == ([], "")
    running.close()
    by_hand.release()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_of_a_test_starts_none(ranks: int, begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.0)
    rig = Rig("kvobs", Script("rigged"), ranks=ranks)
    assert eventually(rig.connector._telemetry._starter._is_over.is_set)
    assert begun == []
    rig.connector.shutdown()


@pytest.mark.parametrize("option", [{"exporter": None}, {"exporter": {"port": 9471}}, {}])
def test_the_connector_of_the_scheduler_has_one(
    option: dict[str, Any], begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.3)
    made = engine_config(transfer_config("kvobs", [entry_for(Script("a"))], option))
    connector = kvobs.MultiConnector(made, KVConnectorRole.SCHEDULER, cache_config())
    expected = {"port": 9464} | (option.get("exporter") or {})
    telemetry: Any = connector._telemetry
    if option == {"exporter": None}:
        assert eventually(telemetry._starter._is_over.is_set)
        assert begun == []
    else:
        assert eventually(lambda: begun)
        assert {*begun} == {(Identity.of(made).server, ExporterOptions(**expected))}
        assert not telemetry._starter._is_over.is_set()
    connector.shutdown()
    assert eventually(telemetry._starter._is_over.is_set)


# On a host without EngineCore

RANKS, ON_HOST = 4, 2


def worker(name: str, rank: int, option: Any = "auto", **parallel: Any) -> tuple[Starter | None, Any]:
    pages = Pages(rank)
    made = config(name, node_rank_within_dp=rank // ON_HOST, local_world_size=ON_HOST, **parallel)
    return of_worker(option, made, pages.writers[0]), pages


def test_without_the_scheduler_a_hosts_first_rank_starts_it(begun: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    made = [worker("two hosts", rank) for rank in range(RANKS)]
    assert [running is not None for running, _ in made] == [False, False, True, False]
    assert eventually(lambda: begun)
    assert caplog.text.count("at http://127.0.0.1:9464/metrics, because EngineCore is on another host") == 1
    (running,) = [running for running, _ in made if running is not None]
    running.close()


@pytest.mark.parametrize("backend", ["mp", "uni", "external_launcher"])
def test_nothing_runs_beside_the_scheduler(backend: str, begun: list[Any]) -> None:
    running, pages = worker(f"beside {backend}", 0, distributed_executor_backend=backend)
    pages.writers[0].words[STEPS] = 1
    assert (running, begun) == (None, [])


@pytest.mark.parametrize("is_served", [False, True])
def test_without_the_option_a_host_of_ranks_has_a_warning(
    is_served: bool, begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.3)
    lock = lock_of(server_of(config(f"warned {is_served}"))) if is_served else None
    running, _pages = worker(f"warned {is_served}", 2, None)
    assert running is not None
    assert eventually(running._is_over.is_set)
    assert begun == []
    text = "kvobs's metrics and spans are not exported: EngineCore is on another host, and kvobs.exporter is null"
    assert caplog.text.count(text) == (not is_served)
    if lock is not None:
        lock.release()


@pytest.mark.parametrize(("here", "starts"), [((1, 3), True), ((0, 1), False), ((1, None), False), ((3, 1, 2), True)])
def test_under_ray_a_hosts_pages_decide_after_the_first_step(
    here: tuple[int | None, ...], starts: bool, begun: list[Any]
) -> None:
    pages, other = Pages(*here), Pages(None, 0)
    made = pages.config
    made.parallel_config = SimpleNamespace(distributed_executor_backend="ray", local_world_size=4)
    (page,) = [page for page in pages.writers if page.rank == 1]
    running = of_worker("auto", made, page)
    assert running is not None
    running.tend()
    assert begun == [], "not all have begun yet"
    assert not running._is_over.is_set()
    page.words[STEPS] = 1
    if starts:
        assert eventually(lambda: begun)
        assert {*begun} == {(pages.server, ExporterOptions())}
    else:
        assert eventually(running._is_over.is_set), "that is not asked again"
        assert begun == []
    running.close()
    del other


# How it is kept running


@pytest.fixture
def tended(monkeypatch: pytest.MonkeyPatch) -> Starter:
    """Return one whose thread does nothing."""
    monkeypatch.setattr(starter, "_run", lambda *_: None)
    return Starter("nobody", ON, lambda: True, "because")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(starter, "time", clock)
    return clock


def test_it_restarts_with_growing_delays_until_it_has_run_well(
    tended: Starter, clock: Any, begun: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_held = Mock(return_value=False)
    monkeypatch.setattr(files, "is_held", is_held)
    starts = list[float]()
    for _ in range(400):
        before = len(begun)
        tended.tend()
        if len(begun) > before:
            starts.append(clock.now - 1000)
        clock.now += 1
    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303, 363]
    caplog.clear()
    is_held.return_value = True
    for _ in range(130):
        tended.tend()
        clock.now += 1
    is_held.return_value = False
    before = len(begun)
    tended.tend()
    assert len(begun) == before + 1, "at once"
    assert caplog.text.count("kvobs's exporter has exited and is being restarted. No count is lost") == 1
    tended.tend()
    assert len(begun) == before + 1
    clock.now += 1
    tended.tend()
    assert len(begun) == before + 2, "the delays begin again"


def test_one_that_cannot_start_costs_only_metrics_and_some_lines(
    clock: Any, tended: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Mock(side_effect=[OSError("no more processes"), *[subprocess.CalledProcessError(2, "python")] * 99])
    monkeypatch.setattr(starter, "start", failing)
    for _ in range(400):
        tended.tend()
        clock.now += 1
    assert failing.call_count == 12
    assert "kvobs's exporter can't be started: no more processes. Retrying in 1 s" in caplog.text
    assert caplog.text.count("can't be started") == len(starter.BACK_OFF_S), "it does not fill the log"
    assert "serves the metrics" not in caplog.text
    failing.side_effect = None
    clock.now += 60
    tended.tend()
    assert caplog.text.count("kvobs's exporter serves the metrics") == 1


@pytest.mark.usefixtures("in_production")
def test_one_that_does_not_know_whether_it_is_needed_is_not(begun: list[Any]) -> None:
    running = Starter("nobody", ON, lambda: bool(1 / 0))
    assert eventually(running._is_over.is_set)
    assert (begun, faults.take()) == ([], {"export": 1})


def test_it_ends_with_what_forgets_it(begun: list[Any]) -> None:
    before = {*threading.enumerate()}
    running = Starter("forgotten", ON, lambda: None)
    (thread,) = {*threading.enumerate()} - before
    del running
    assert eventually(lambda: not thread.is_alive())


def test_a_killed_exporter_comes_back_and_ends_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real processes, as an engine starts them."""
    share_folder(monkeypatch, tmp_path)
    monkeypatch.setattr(starter, "BACK_OFF_S", (1.0,))
    page = Page()
    with writing() as engine:
        running = Starter(engine.server, ExporterOptions(port=page.port), lambda: True)
        first = eventually(lambda: state_of(engine.server).get("pid"))
        seen = eventually(page.hits)
        assert eventually(lambda: running._ran_s), "its end is only seen if it was seen"
        os.kill(first, signal.SIGKILL)
        second = eventually(lambda: (pid := state_of(engine.server).get("pid")) != first and pid)
        assert eventually(page.hits) >= seen
        assert "kvobs's exporter has exited and is being restarted. No count is lost" in caplog.text
        with open(f"/proc/{second}/stat") as file:
            parent, _, session = file.read().rpartition(")")[2].split()[1:4]
        assert os.getpid() not in (int(parent), int(session)), "not its child process, and not in its session"
        running.close()
        page.get()
        end(engine.pid, signal.SIGTERM)
        assert eventually(lambda: not Path(f"/proc/{second}").exists(), 30)
        assert has_ended(engine.pid)


def test_it_has_the_cores_that_the_model_does_not_take(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore's process may be bound to the model's cores."""
    bound = Mock()
    monkeypatch.setattr(os, "sched_setaffinity", bound)
    running = Starter("bound", ON, lambda: None)
    assert eventually(lambda: bound.called)
    assert bound.call_args.args[1] == os.sched_getaffinity(os.getppid())
    running.close()


def test_the_exporter_finds_kvobs_and_pythons_own_modules_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert starter._environment(Path("/src/kvobs"))["PYTHONPATH"] == "/src:/theirs"
    assert starter._environment(Path("/usr/lib/python3/dist-packages/kvobs"))["PYTHONPATH"] == "/theirs"
    monkeypatch.delenv("PYTHONPATH")
    assert starter._environment(Path("/src/kvobs"))["PYTHONPATH"] == "/src"
    assert "PYTHONPATH" not in starter._environment(Path("/venv/lib/site-packages/kvobs"))


def test_it_has_the_options_and_no_open_files_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Mock()
    monkeypatch.setattr(subprocess, "run", run)
    starter.start("server", ExporterOptions(host="::1", port=1, web_config="/w", otlp_metrics=True, runbook="http://w"))
    (command,) = run.call_args.args
    options = (
        '{"server": "server", "port": 1, "host": "::1", "web_config": "/w", "otlp_metrics": true, '
        '"request_ids": false, "runbook": "http://w"}'
    )
    assert command == [sys.executable, "-P", "-m", "kvobs.export", options]
    assert {name: run.call_args.kwargs[name] for name in ("close_fds", "start_new_session", "check")} == {
        "close_fds": False,
        "start_new_session": True,
        "check": True,
    }
