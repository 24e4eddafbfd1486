"""A connector that hangs or ends a real engine is named by the log, the metrics, `top` and `check`, and no other is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.demo.server import Server, environment, parse_metrics
from tests.engine.exported import Exported, with_exporter
from tests.engine.metered import configuration
from tests.engine.serving import BOTH_RANKS_ON_ONE_CORE, eventually, importing_tests, of_tests, prompt, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEEN_S = 20
"""So soon it is to be seen after the call began; what follows waits longer, since machines are shared."""
LOOKUP = "get_num_new_matched_tokens"


@contextmanager
def incident(
    model: Path, folder: Path, hook: str, fault: str, rank: int | None, *, exporter: bool = True
) -> Iterator[tuple[Server, Any, str]]:
    """Run an engine with two connectors, and let the fault of `remote` begin by a request: yield who has the metrics.

    With a rank there are two.
    """
    trigger = folder / "trigger"
    remote = of_tests("FaultyChild", hook=hook, fault=fault, trigger=str(trigger), rank=rank or 0)
    remote["kv_connector_module_path"] = "tests.incidents.faulty"
    config = configuration(host_memory(), remote, names=["cpu", "remote"])
    port = 0
    if exporter:
        config, port = with_exporter(config)
    parallel: dict[str, Any] = {} if rank is None else {"tensor_parallel": 2, "env": BOTH_RANKS_ON_ONE_CORE}
    with serve(model, folder, config, timeout=360, **parallel) as server:
        metrics: Any = Exported(server, port) if exporter else server
        server.complete(prompt("warm"), 2)
        if exporter:
            metrics.until_up()
        trigger.touch()

        def ask() -> None:
            with suppress(Exception):
                server.complete(prompt("incident"), 2)

        threading.Thread(target=ask, daemon=True).start()
        yield server, metrics, f"127.0.0.1:{port or server.port}"


def log(folder: Path, *words: str) -> list[str]:
    """Return the lines of the server's log with these words, from kvobs."""
    lines = (folder / "server.log").read_text(errors="replace").splitlines()
    return [line for line in lines if all(word in line for word in words)]


def samples(server: Any, name: str) -> list[tuple[dict[str, str], float]]:
    text = server.request("/metrics").decode()
    return [(s.labels, s.value) for s in parse_metrics(text) if s.name == name]


def kvobs(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "kvobs"), *arguments]
    env = environment() | importing_tests()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    return done.stdout + done.stderr


HANGS = [
    pytest.param(LOOKUP, "hangs", None, id="a lookup that never returns"),
    pytest.param(LOOKUP, "holds the GIL", None, id="the same, holding the GIL"),
    pytest.param("wait_for_save", "hangs", 1, id="a worker's save that never returns"),
    pytest.param("wait_for_save", "holds the GIL", 1, id="the same on a worker, holding the GIL"),
    pytest.param("save_kv_layer", "hangs", 1, id="a layer hook that never returns"),
]


@pytest.mark.parametrize(("hook", "fault", "rank"), HANGS)
def test_a_call_that_never_returns(hook: str, fault: str, rank: int | None, model: Path, tmp_path: Path) -> None:
    with incident(model, tmp_path, hook, fault, rank) as (_, server, address):
        began = time.monotonic()
        assert eventually(lambda: bool(samples(server, "kvobs_call_in_progress_seconds")), SEEN_S)
        ((labels, age),) = samples(server, "kvobs_call_in_progress_seconds")
        place = "scheduler" if rank is None else str(rank)
        assert (labels["connector"], labels["hook"], labels["rank"]) == ("remote", hook, place)
        assert 1 < age < time.monotonic() - began + 5
        where = place if rank is None else f"rank {rank}"
        assert server.health()["processes"][where] == f"{hook} of remote"
        assert eventually(lambda: bool(log(tmp_path, f"connector 'remote' has been in {hook} on {where} for")), SEEN_S)
        (row,) = json.loads(kvobs("top", address, "--once", "--json"))["servers"]
        calls = {one["connector"]: one["call"] for one in row["connectors"]}
        assert calls == {"cpu": None, "remote": f"{hook} on {where}"}
        checked = kvobs("check", "--server", address)
        assert f"connector remote has been in {hook} ({place}) for" in checked
        assert not samples(server, "kvobs_engine_ended")
        assert not log(tmp_path, "connector 'cpu'")


ENDS = [
    pytest.param("update_state_after_alloc", "raises", None, "RuntimeError", id="an exception in the scheduler"),
    pytest.param("start_load_kv", "raises", 1, "RuntimeError", id="an exception on a worker"),
    pytest.param("start_load_kv", "exits", 1, "exit 3", id="os._exit on a worker"),
    pytest.param(LOOKUP, "is killed", None, "SIGKILL", id="kill -9 of EngineCore"),
]


@pytest.mark.parametrize(("hook", "fault", "rank", "reason"), ENDS)
def test_a_call_that_ends_the_engine(  # noqa: PLR0917 - a table's columns, and fixtures
    hook: str, fault: str, rank: int | None, reason: str, model: Path, tmp_path: Path
) -> None:
    with incident(model, tmp_path, hook, fault, rank) as (_, server, address):
        ended: list[tuple[dict[str, str], float]] = []

        def has_ended() -> bool:
            with suppress(OSError):
                ended[:] = samples(server, "kvobs_engine_ended")
            return bool(ended)

        assert eventually(has_ended, 60)
        ((labels, value),) = ended
        assert (labels["connector"], labels["hook"], value) == ("remote", hook, 1)
        # The parent of a process may have read its status first.
        assert labels["reason"] in {reason} | ({"unknown"} if fault != "raises" else set())
        reason = labels["reason"]
        where = "scheduler" if rank is None else f"rank {rank}"
        checked = kvobs("check", "--server", address)
        assert f"its engine has ended in {hook} of connector remote: {reason}" in checked
        # After an exception on rank 1 vLLM waits five minutes for rank 0, which waits for rank 1.
        if fault != "raises" or rank is None:
            assert log(tmp_path, f"the engine has ended in {hook} of connector 'remote' on {where}: {reason}")
        last_words = f"connector 'remote' raised {reason} in {hook} on {where}; this ends the engine"
        assert bool(log(tmp_path, last_words)) is (fault == "raises")
        assert not log(tmp_path, "connector 'cpu'")


def test_the_api_server_shows_a_hang_too(model: Path, tmp_path: Path) -> None:
    with incident(model, tmp_path, LOOKUP, "holds the GIL", None, exporter=False) as (_, server, _address):
        assert eventually(lambda: bool(samples(server, "kvobs_call_in_progress_seconds")), SEEN_S)
        ((labels, _age),) = samples(server, "kvobs_call_in_progress_seconds")
        assert (labels["connector"], labels["hook"], labels["rank"]) == ("remote", LOOKUP, "scheduler")
        assert eventually(lambda: bool(log(tmp_path, f"connector 'remote' has been in {LOOKUP} on scheduler")), SEEN_S)


def test_the_api_server_logs_an_end_that_left_no_last_words(model: Path, tmp_path: Path) -> None:
    with incident(model, tmp_path, LOOKUP, "exits", None, exporter=False):
        line = f"the engine has ended in {LOOKUP} of connector 'remote' on scheduler: "
        assert eventually(lambda: bool(log(tmp_path, line)), 60)
