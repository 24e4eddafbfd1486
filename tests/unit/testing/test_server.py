"""The demo's server: ports, texts, life and death beside stand-ins; tests/engine/test_demo.py has the real one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from kvobs.demo.run import folder
from kvobs.testing.server import (
    CORES,
    LOWEST_PORT,
    Server,
    ServerError,
    _own_ports,
    claim_port,
    cores,
    end_group,
    environment,
    exit_text,
    group_members,
    newest_message,
    root_cause,
)
from tests.support.waiting import eventually


def test_port_0_gives_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [claim_port(0) for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))
        listener.listen()
        own = iter(ports[:2])
        monkeypatch.setattr("kvobs.testing.server._own_ports", lambda: own)
        assert claim_port(0) == ports[1], "one that others use is passed over"


def test_port_0_gives_one_where_connections_may_take_all_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    _own_ports.cache_clear()
    with monkeypatch.context() as tuned:
        tuned.setattr("kvobs.testing.server.Path", lambda _: SimpleNamespace(read_text=lambda: "1024\t65535\n"))
        assert claim_port(0) >= LOWEST_PORT
    _own_ports.cache_clear()


def test_a_port_in_use_is_named_and_a_closed_one_is_reusable() -> None:
    """Connections of the last server that linger in TIME_WAIT are no obstacle."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0] as accepted:
            accepted.close()
        with pytest.raises(ServerError, match=rf"Port {port} on 127\.0\.0\.1 can't be used: Address already in use\."):
            claim_port(port)
    assert claim_port(port) == port


def test_the_command_line_carries_every_setting() -> None:
    """The user's own arguments come last, so that they win."""
    m = Path("m")
    line = Server(m, m, {"kv_connector": "X"}, 8000, ["--seed", "1"], tensor_parallel=2, host="0.0.0.0").command()
    for option, value in [("--port", "8000"), ("--host", "0.0.0.0"), ("--tensor-parallel-size", "2"),
                          ("--dtype", "float32"), ("--kv-transfer-config", '{"kv_connector": "X"}')]:  # fmt: skip
        assert line[line.index(option) + 1] == value
    assert line[-2:] == ["--seed", "1"]
    assert "--kv-transfer-config" not in Server(m, m).command()


def test_each_rank_gets_a_core_that_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers side by side have those that vLLM's variable names."""
    ours = sorted(os.sched_getaffinity(0))
    for unnamed in ("", "auto", "nobind", "0-3|4-7"):
        monkeypatch.setenv(CORES, unnamed)
        assert cores(len(ours) + 1) == [*ours, ours[0]]
    monkeypatch.setenv(CORES, "3|1")
    assert cores(3) == [3, 1, 3]
    assert environment(2)[CORES] == "3|1"


LOG = """\
(APIServer pid=1) INFO 11-20 14:04:31 [core.py:144] Starting
(EngineCore pid=2) \x1b[31mERROR\x1b[0m 11-20 14:04:49 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-20 14:04:49 [core.py:1510] ValueError: No common block size for 16 (CPU_ATTN: 32).
(EngineCore pid=2) ERROR 11-20 14:04:49 [core.py:1510] vllm.v1.engine.exceptions.EngineDeadError: EngineCore is gone.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(EngineCore pid=2) INFO 11-20 14:04:50 [core.py:1]  \tGoodbye\x20
/usr/lib/python3.11/resource_tracker.py:254: UserWarning: There appear to be 1 leaked shared_memory objects
"""
ERROR = "INFO 11-20 14:04:31 [a.py:1] An Error: not an exception\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (LOG, "ValueError: No common block size for 16 (CPU_ATTN: 32)."),
        *((text, "") for text in ("", "all is well\n", ERROR)),
        ("Traceback\nModuleNotFoundError: No module named 'x'\n", "ModuleNotFoundError: No module named 'x'"),
        ("(Worker pid=3) torch.OutOfMemoryError: no memory\n", "torch.OutOfMemoryError: no memory"),
        ("ValueError: a\n\nThe above exception was the direct cause of:\n\nKeyError: b\n", "ValueError: a"),
        ("ValueError: a\nKeyError: b\n", "KeyError: b"),
    ],
)
def test_the_cause_is_the_last_exception_that_is_no_consequence(log: str, cause: str) -> None:
    assert root_cause(log) == cause
    assert newest_message(log.splitlines()) == {LOG: "Goodbye", ERROR: "An Error: not an exception"}.get(log, "")


STAND_IN = """
import http.server, json, os, signal, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
if mode == "dies":
    print("\\n".join(f"line {i}" for i in range(100)), flush=True)
    print("RuntimeError: out of luck", flush=True)
    sys.exit(3)
if mode == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("INFO 11-20 14:04:31 [a.py:1] still thinking", flush=True)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", deaf, sys.argv[2]])
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    resets = 0

    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, b"x_total 1.0\\n")

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path.startswith("/reset"):
            Handler.resets += 1
            return self.answer(200, json.dumps({"success": Handler.resets > 2 or "external" in self.path}).encode())
        request = json.loads(raw)
        if request["prompt"] == "bad":
            return self.answer(400, b"bad prompt")
        if request["prompt"] == "crash":
            print("RuntimeError: the engine is broken", flush=True)
            return self.answer(500, b"EngineCore encountered an issue")
        if request["prompt"] == "die":
            os._exit(5)
        self.answer(200, json.dumps({
            "choices": [{"text": self.headers.get("x-tag", "") + json.dumps(request), "token_ids": [1, 2]}],
            "usage": {"prompt_tokens": 7}}).encode())

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(tmp_path: Path, mode: str, **settings: Any) -> Server:
    return Server(tmp_path / "model", tmp_path / "log", launch=(sys.executable, "-c", STAND_IN, mode), **settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with stand_in(tmp_path, "serves") as up:
        yield up


def test_a_server_that_dies_at_once_shows_why_and_its_logs_end(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as error, stand_in(tmp_path, "dies"):
        pass
    lines = str(error.value).splitlines()
    assert lines[0] == "The server exited before it was ready (exit status 3)."
    assert exit_text(0) == "exit status 0"
    assert lines[1] == "The error in its log: RuntimeError: out of luck"
    assert lines[2] == f"The end of its log, {tmp_path / 'log'}:"
    assert lines[3:] == [f"  line {i}" for i in range(76, 100)] + ["  RuntimeError: out of luck"]


def test_a_hanging_server_is_given_up_and_killed_with_connectors(tmp_path: Path) -> None:
    """On Ctrl-C, too."""
    progress: list[str] = []

    def note(_seconds: float, doing: str) -> None:
        progress.append(doing)
        hanging.timeout = 0 if doing else 300

    hanging = stand_in(tmp_path, "hangs", timeout=300, on_progress=note)
    with pytest.raises(ServerError, match=r"(?s)was not ready after 0 s\..*still thinking"), hanging:
        pass
    assert progress[-1] == "still thinking"
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), stand_in(tmp_path, "hangs", on_progress=interrupt):
        pass
    assert processes_naming(str(tmp_path)) == []


def test_any_exception_in_the_block_ends_all_of_the_server(tmp_path: Path) -> None:
    rendezvous = f"vllm_dist_kvobs_test_{os.getpid()}"
    leak = Path(f"/dev/shm/{rendezvous}-tp:0-[0-1]-cpushm_0")
    with pytest.raises(KeyboardInterrupt), stand_in(tmp_path, "serves") as server:  # noqa: PT012
        group, scratch = cast("Any", server.process).pid, cast("Path", server.scratch)
        assert group_members(group)
        for path in (scratch / rendezvous, leak):
            path.touch()
        raise KeyboardInterrupt
    assert group_members(group) == []
    assert not server.scratch
    assert not scratch.exists()
    assert not leak.exists()


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "hangs")
    server.start()
    process: Any = server.process
    assert eventually(lambda: "still thinking" in server.log.read_text())
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        end_group(process, grace=10_000)
    assert group_members(process.pid) == []
    server.stop()


def test_a_killed_server_differs_from_one_that_was_never_ready(server: Server) -> None:
    process: Any = server.process
    process.kill()
    process.wait()
    with pytest.raises(ServerError, match=r"The server exited while serving \(killed by SIGKILL\)\."):
        server.complete("hello")


def test_a_server_that_dies_under_a_request_is_an_error(server: Server) -> None:
    with pytest.raises(ServerError, match=r"(?s)(exited while serving|got no answer).*The end of its log"):
        server.complete("die")


def test_no_server_is_left_when_its_starter_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvobs.testing.server import Server; p = Path(sys.argv[1]); "
        "Server(p / 'no-model', p / 'log').__enter__()"
    )
    environ = os.environ | {"TMPDIR": str(tmp_path)}  # no one is left to remove what it puts there
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environ) as starter:
        assert eventually(lambda: len(processes_naming(str(tmp_path))) > 1)
        starter.kill()
    assert eventually(lambda: processes_naming(str(tmp_path)) == [], 4)  # less than it takes to find no model there


def test_requests_carry_their_settings_and_headers(server: Server) -> None:
    answer = server.complete([1, 2, 3], 5, headers={"x-tag": "T"}, temperature=0.5, kv_transfer_params={"a": 1})
    assert answer.text.startswith("T")
    assert (answer.tokens, answer.prompt_tokens) == ((1, 2), 7)
    sent = json.loads(answer.text[1:])
    assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ([1, 2, 3], 5, 0.5)
    assert (sent["ignore_eos"], sent["kv_transfer_params"]) == (True, {"a": 1})


def test_an_error_shows_the_log_only_if_the_engine_is_broken(server: Server) -> None:
    with pytest.raises(ServerError, match="^/v1/completions answered 400: bad prompt$"):
        server.complete("bad")
    cause = "The error in its log: RuntimeError: the engine is broken"
    with pytest.raises(ServerError, match=f"(?s)answered 500: EngineCore encountered an issue.*{cause}"):
        server.complete("crash")


def test_a_cache_reset_is_repeated_until_it_succeeds(server: Server) -> None:
    """vLLM refuses while a block is still held; the stand-in refuses twice."""
    with pytest.raises(ServerError, match="did not reset its prefix cache within 0 s"):
        server.reset_prefix_cache(timeout=0)
    server.reset_prefix_cache()
    server.reset_prefix_cache(external=True)
    assert [(sample.name, sample.labels, sample.value) for sample in server.metrics()] == [("x_total", {}, 1.0)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("error", [None, ServerError("dead")])
@pytest.mark.parametrize("has_log", [False, True])
def test_the_folder_goes_unless_wanted_or_its_server_died(keep: bool, error: ServerError | None, has_log: bool) -> None:
    with suppress(ServerError), folder(keep=keep) as path:
        if has_log:
            (path / "server.log").touch()
        if error is not None:
            raise error
    assert path.exists() is (keep or (has_log and error is not None))
    shutil.rmtree(path, ignore_errors=True)


def processes_naming(text: str) -> list[int]:
    """Return the running processes with this text in their command line, but for this one."""
    pids = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError):  # it ended while we looked
            if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != os.getpid():
                pids.append(pid)
    return pids
