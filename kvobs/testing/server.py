"""Run a vLLM server in a subprocess: start it, wait until it is ready, send requests, remove everything of it."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from itertools import cycle
from pathlib import Path
from typing import IO, Any, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvobs.testing.model import NAME
from kvobs.testing.vllm_serve import PARENT
from kvobs.vllm_api.proc import stat

HOST = "127.0.0.1"
LOWEST_PORT = 20_000  # above those that Ray gives to its workers
CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable with a core for each rank."""
TAIL = 25
"""Lines of the log's end that an error shows."""


class ServerError(RuntimeError):
    """The server could not start, exited, or answered with an error; the text shows which, and the end of its log."""


@dataclass
class Server:
    """A vLLM server on this machine, up inside the `with` block and gone with all its processes after it.

        with Server(model=make_model(folder / "model"), log=folder / "server.log") as server:
            print(server.complete("Once upon a time", max_tokens=8).text)

    Entering raises `ServerError` when the port is taken, or when the server dies or isn't up after `timeout` seconds.
    """

    model: Path
    log: Path
    """Written anew: everything that the server's processes print."""
    kv_transfer_config: Mapping[str, Any] | None = None
    port: int = 0
    """0 picks a free one; `port` has its number after entering."""
    args: Sequence[str] = ()
    """More arguments of `vllm serve`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Overrides the environment that `environment` returns."""
    dtype: str = "float32"
    tensor_parallel: int = 1
    timeout: float = 240.0
    """Seconds to come up. Twenty are usual; the first start after an installation takes a minute."""
    on_progress: Callable[[float, str], None] = lambda _seconds, _doing: None
    """Called about five times a second during the start, with the elapsed seconds and the newest log message."""
    launch: Sequence[str] = (sys.executable, "-m", "kvobs.testing.vllm_serve")
    """The command that takes the arguments of `vllm serve`."""
    host: str = HOST
    """The address it listens on: this, or 0.0.0.0, all of them."""

    process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    scratch: Path | None = field(default=None, init=False, repr=False)
    """Its folder for temporary files; short, because names of sockets are."""
    ready: bool = field(default=False, init=False, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self.port = claim_port(self.port)
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:  # also Ctrl-C: whatever ends the wait must end the server
            self.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def command(self) -> list[str]:
        """Return the command line of `vllm serve` with this server's settings."""
        # Chunked prefill: ExampleConnector saves only the first chunk of a prompt, and fails when it loads the whole.
        line = [
            *(*self.launch, str(self.model), "--served-model-name", NAME, "--dtype", self.dtype, "--enforce-eager"),
            *("--host", self.host, "--port", str(self.port), "--max-model-len", "2048", "--block-size", "32"),
            "--no-enable-chunked-prefill",
        ]
        if self.tensor_parallel > 1:
            line += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.kv_transfer_config is not None:
            line += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        return [*line, *self.args]

    def start(self) -> None:
        """Start the process, in another process group: a Ctrl-C in the terminal reaches this one only."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="kvobs-"))
        ours = {PARENT: str(os.getpid()), "TMPDIR": str(self.scratch)}
        env = environment(self.tensor_parallel) | dict(self.env) | ours
        with self.log.open("wb") as log:
            self.process = self.launched(log, env)

    def launched(self, log: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            # Not in another session: Linux shares CPU time out between sessions, and ranks that wait for each
            # other on one core were seen to leave none to the processes of other sessions.
            process_group=0,
        )

    def wait_until_ready(self) -> None:
        """Return once `/health` answers 200; raise `ServerError` when the process ends or time is up before."""
        begin = time.monotonic()
        while not self.healthy():
            seconds = time.monotonic() - begin
            self.check_alive()
            if seconds > self.timeout:
                raise self.failure(f"The server on port {self.port} was not ready after {self.timeout:.0f} s.")
            self.on_progress(seconds, newest_message(self.tail(TAIL)))
            time.sleep(0.2)
        self.ready = True

    def healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
        return False

    def check_alive(self) -> None:
        """Raise `ServerError` if the server process has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            when = "while serving" if self.ready else "before it was ready"
            raise self.failure(f"The server exited {when} ({exit_text(code)}).")

    def stop(self) -> None:
        """End the server and every process it started; return when they are gone.

        Asks first, so that shared memory is cleaned up, then kills the whole process group: vLLM 0.32 can hang for ever
        when it is asked to end while its engine starts. A second Ctrl-C in here skips the asking.
        """
        try:
            if self.process is not None:
                end_group(self.process, grace=15 if self.ready else 3)
        finally:
            if self.scratch is not None:
                remove_scratch(self.scratch)
            self.process, self.scratch, self.ready = None, None, False

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of the log, without colours."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 400 * lines))
            return COLOUR.sub("", log.read().decode(errors="replace")).splitlines()[-lines:]
        return []

    def failure(self, what: str) -> ServerError:
        """Return an error with the event, the exception behind it, and the log's last lines."""
        with suppress(OSError):
            if cause := root_cause(self.log.read_text(errors="replace")):
                what += f"\nThe error in its log: {cause}"
        tail = "\n".join(f"  {line}" for line in self.tail(TAIL)) or "  (nothing)"
        return ServerError(f"{what}\nThe end of its log, {self.log}:\n{tail}")

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 16,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        **body: Any,
    ) -> "Completion":
        """Complete a prompt greedily, for exactly `max_tokens` tokens; `body` adds to or overrides the request's JSON.

        Raises `ServerError` for any answer but 200, with the server's text.
        """
        request = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.request("/v1/completions", request | {"return_token_ids": True} | body, headers, timeout)
        return Completion.parse(json.loads(answer))

    def metrics(self) -> list[Sample]:
        return parse_metrics(self.request("/metrics").decode())

    def reset_prefix_cache(self, *, external: bool = False, timeout: float = 30.0) -> None:
        """Empty vLLM's own prefix cache, and with `external` also the caches of the connectors that can.

        Waits for blocks that finished requests still hold, for up to `timeout` seconds, then raises `ServerError`.
        """
        deadline = time.monotonic() + timeout
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
        while not json.loads(self.request(path, {}) or b'{"success": true}')["success"]:
            if time.monotonic() > deadline:
                raise self.failure(f"The server did not reset its prefix cache within {timeout:.0f} s.")
            time.sleep(0.05)

    def request(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> bytes:
        """Send a GET, or a POST if there is a body, and return the answer's bytes; `ServerError` unless it is a 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            said = f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
            is_broken = error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise (self.failure(said) if is_broken else ServerError(said)) from error
        except OSError as error:
            self.check_alive()
            raise self.failure(f"{path} got no answer: {error}.") from error


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: tuple[int, ...]
    """Token ids of the answer; empty where the server doesn't return them."""
    prompt_tokens: int
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Self:
        choice = answer["choices"][0]
        return cls(choice["text"], tuple(choice.get("token_ids") or ()), answer["usage"]["prompt_tokens"], answer)


def environment(tensor_parallel: int = 1) -> dict[str, str]:
    """Return the environment of a quiet, small and repeatable server on a CPU."""
    return {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_SERVER_DEV_MODE": "1",  # opens /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # One thread a rank, each on its core: two threads that spin on one core cost milliseconds a step.
        CORES: "|".join(str(core) for core in cores(tensor_parallel)),
        # With two ranks vLLM compiles one small function, even with --enforce-eager: each rank takes seconds for it
        # at the first request.
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
    }


def cores(count: int) -> list[int]:
    """Return one core for each rank; they repeat where there are too few.

    They are those that vLLM's variable names, if it does, else those that this process may use.
    """
    named = os.environ.get(CORES, "").split("|")
    usable = [int(core) for core in named] if all(map(str.isdecimal, named)) else sorted(os.sched_getaffinity(0))
    return [usable[rank % len(usable)] for rank in range(count)]


def claim_port(port: int) -> int:
    """Return the port if nothing listens on it, or any free one for 0; raise `ServerError` naming a port in use.

    The free one is below those that the kernel gives to connections, which could take it before a server listens, and
    another one each time.
    """
    if not port:
        for candidate in _own_ports():
            with suppress(ServerError):
                return claim_port(candidate)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a server that just ended is free
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"Port {port} on {HOST} can't be used: {error.strerror}. "
                "Stop the process that listens there, or choose another port (0 picks a free one)."
            ) from error
        return port


@cache
def _own_ports() -> Iterator[int]:
    """Return the ports below those that the kernel gives to connections, or all, in any order, for ever."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(LOWEST_PORT, kernels) or range(LOWEST_PORT, 1 << 16)
    return cycle(random.sample(ports, len(ports)))


def parse_metrics(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def remove_scratch(scratch: Path) -> None:
    """Remove a server's temporary files, and the shared memory that vLLM names after one of them and leaves behind."""
    for rendezvous in scratch.glob("vllm_dist_*"):
        for leak in Path("/dev/shm").glob(f"{rendezvous.name}*"):
            leak.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


# Process groups


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    members = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it has ended
            state, _parent, its_group = stat(int(entry))[1][:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(entry))
    return members


def end_group(process: subprocess.Popen[bytes], grace: float) -> None:
    """Terminate the leader of a process group, and kill the rest of the group after `grace` seconds."""
    try:
        process.terminate()
        deadline = time.monotonic() + grace
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(group: int) -> None:
    """Kill every process of a process group that we made, and wait up to five seconds until all have ended."""
    kill_all(lambda: group_members(group), limit_s=5, pause_s=0.02)


def kill_all(find: Callable[[], Iterable[int]], *, limit_s: float, pause_s: float) -> None:
    """Kill the processes that `find` returns, until it returns no process or the time is over."""
    deadline = time.monotonic() + limit_s
    while (left := list(find())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause_s)


def exit_text(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


# vLLM's log

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINE = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:INFO|WARNING|ERROR) \S+ \S+ \[[^]]*\] (?P<message>.*\S)")
"""vLLM's own log lines: `(EngineCore pid=7) INFO 11-20 14:04:31 [core.py:144] message`."""
PROCESS = re.compile(r"^\([^)]*pid=\d+\) ")
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .*\S")
CONSEQUENCE = re.compile(r"[Ss]ee (?:root cause|stack trace)|EngineDead")


def newest_message(lines: Sequence[str]) -> str:
    """Return the message of the newest log line that is one, without process, time and file."""
    matches = (LINE.match(line) for line in reversed(lines))
    return next((match["message"].strip() for match in matches if match), "")


def root_cause(log: str) -> str:
    """Return the last exception in a log that isn't merely the consequence of another, or nothing.

    The end of vLLM's log rarely shows it: each process up the tree repeats that the one below it failed.
    """
    cause, is_chained = "", False
    for line in COLOUR.sub("", log).splitlines():
        match = LINE.match(line)
        message = match["message"] if match else PROCESS.sub("", line)
        if message.startswith("The above exception was the direct cause"):
            is_chained = True
        elif EXCEPTION.match(message) and not CONSEQUENCE.search(message):
            cause = cause if is_chained else message.rstrip()
            is_chained = False
    return cause
