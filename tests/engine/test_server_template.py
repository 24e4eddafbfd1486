"""A forked server is what a spawned one is, in all that it gets from its starter; with a stand-in for vLLM."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvobs.testing.server import Server, ServerError, group_members
from kvobs.testing.vllm_serve import PARENT
from tests.engine.forked_server import PR_SET_CHILD_SUBREAPER, ROOT, ForkedServer, template
from tests.engine.serving import eventually
from tests.support import standing_in
from tests.support.standing_in import READ_AT_IMPORT, SET_AT_IMPORT

MODULE = standing_in.__name__
WAIT_S = 60.0
KINDS: dict[str, Callable[..., Server]] = {
    "spawned": partial(Server, launch=(sys.executable, "-m", MODULE)),
    "forked": partial(ForkedServer, module=MODULE),
}


@contextmanager
def started(
    folder: Path, *doing: str, kind: str = "forked", **more: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Server]]:
    """Start a stand-in without waiting until it serves."""
    server = KINDS[kind](folder / "no model", folder / "server.log", args=doing, **more)
    server.port = 1
    server.start()
    try:
        assert server.process is not None
        yield server.process, server
    finally:
        server.stop()


@pytest.mark.parametrize("variables", [{}, {"PYTHONDONTWRITEBYTECODE": "1", "OTEL_SERVICE_NAME": "kv"}])
def test_a_forked_server_gets_what_a_spawned_one_gets(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, environment, folders, cores, descriptors, signals: the template has all of them otherwise."""
    template(MODULE)
    ours = os.sched_getaffinity(0)
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {max(ours)})
    reports = {}
    try:
        for kind in KINDS:
            env = {**variables, "PYTHONPATH": f"{tmp_path / 'package'}{os.pathsep}{ROOT}", "OTHER": "1"}
            with started(tmp_path, "report", kind=kind, env=env) as (process, server):
                assert process.wait(WAIT_S) == 0, server.log.read_text()
                report = json.loads(server.log.read_text().replace(str(server.scratch), "SCRATCH"))
                report["environment"].pop(PARENT, None)
                reports[kind] = report
    finally:
        os.sched_setaffinity(0, ours)
    assert reports["forked"] == reports["spawned"]
    assert reports["forked"]["parent"] == os.getpid()
    assert reports["forked"]["environment"][SET_AT_IMPORT] == "nothing read"


@pytest.mark.parametrize(("doing", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_its_exit_status_is_known(tmp_path: Path, doing: str, code: int) -> None:
    with started(tmp_path, doing) as (process, _):
        assert process.wait(WAIT_S) == code
        assert process.poll() == code
        process.terminate()  # nothing happens: its number may be another process's by now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_so_is_the_signal_that_ended_it(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, "sleep") as (process, server):
        assert eventually(lambda: "asleep" in server.log.read_text())
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number


def test_orphans_are_adopted_only_while_a_server_starts(tmp_path: Path) -> None:
    with started(tmp_path, "sleep"):
        adopts = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER + 1, ctypes.byref(adopts))
        assert adopts.value == 0


@pytest.mark.parametrize("how", ["it is killed", "it ends"])
def test_nothing_is_left_when_the_starter_is_gone(tmp_path: Path, how: str) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.engine.forked_server import ForkedServer, template; "
        f"s = ForkedServer(Path('m'), Path({str(tmp_path / 'log')!r}), args=['sleep'], module={MODULE!r}); "
        f"s.start(); print(s.process.pid, template({MODULE!r})._process.pid, flush=True); "
        f"time.sleep({600 if how == 'it is killed' else 0})"
    )
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environ, cwd=ROOT) as starter:
        assert starter.stdout is not None
        groups = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(groups) == 2
        if how == "it is killed":
            assert all(group_members(group) for group in groups)
            starter.kill()
    assert eventually(lambda: not any(group_members(group) for group in groups))


@pytest.mark.parametrize("name", [READ_AT_IMPORT, SET_AT_IMPORT, "PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_a_variable_that_came_too_late_is_refused(tmp_path: Path, name: str) -> None:
    """Read or set by the imports, or read by something before them."""
    wrong = rf"is_spawned=True: the environment variable {name} is read at import or before: found '7', imported with "
    with pytest.raises(ServerError, match=wrong), started(tmp_path, "sleep", env={name: "7"}):
        pass
    with started(tmp_path, "0") as (process, _):  # the template goes on
        assert process.wait(WAIT_S) == 0


def test_a_folder_whose_modules_are_already_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    wrong = rf"{tmp_path} on the PYTHONPATH has modules that are imported already: json"
    with pytest.raises(ServerError, match=wrong), started(tmp_path, "0", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}):
        pass


def test_a_template_that_dies_says_why(tmp_path: Path) -> None:
    server = ForkedServer(tmp_path / "no model", tmp_path / "log", module="tests.engine.no_such_module")
    with pytest.raises(ServerError, match=r"(?s)forked from: .*No module named 'tests.engine.no_such_module'"), server:
        pass
