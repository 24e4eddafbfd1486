"""The servers of real stores, as child processes: started, killed, started again at the same address, held still."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvobs.demo.run import entry
from kvobs.testing.server import HOST, claim_port, end_group, kill_group, parse_metrics
from tests.connectors.packages import importing
from tests.engine.serving import THE_CORE, eventually, listens
from tests.support.affinity import keeping_off

CHUNK = 32
"""Tokens that LMCache keeps under one key: a block of the engine's."""
HEARTBEAT_S = 2.0
"""Between LMCache's pings of its server; its default is 10. Twice that may pass until a dead server is noticed."""
MQ_TIMEOUT_S = 3.0
"""How long LMCache's calls wait for an answer; its default is 300, as long as vLLM waits for a worker until it gives
the engine up: a server that dies while a block is copied then ends the engine, with or without kvobs."""
CLIENT_TTL_S = 120
"""How long Mooncake's master keeps the keys of a client that it has not had a sign of, as while it is held still."""
SEGMENT = 256 * 1024 * 1024
BUFFER = 64 * 1024 * 1024


@dataclass
class Store:
    """A store's server process, at ports that stay the same when it is started again."""

    name: str
    command: list[str]
    log: Path
    port: int
    http_port: int
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it listens; AssertionError with its log's end if it does not.

        It is kept off the core of the engine, which asks for its dead server all the time: on Linux 6.18 a server
        that was put there had printed nothing after 120 s.
        """
        env = os.environ | self.env | {"PYTHONFAULTHANDLER": "1"}
        with self.log.open("ab") as log, keeping_off(THE_CORE):
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=env, process_group=0)
        if not eventually(self.is_up, 120):
            self.process.send_signal(signal.SIGABRT)  # Python then prints where each thread is
            self.process.wait(10)
            raise AssertionError(f"{self.name} did not start:\n{self.tail()}")

    def is_up(self) -> bool:
        """Say whether it listens on both ports; AssertionError if it has ended."""
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended by itself:\n{self.tail()}"
        return all(listens(port) for port in (self.port, self.http_port))

    def kill(self) -> None:
        assert self.process is not None
        kill_group(self.process.pid)
        self.process.wait()

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """Let it do nothing inside the ``with`` block: its connections stay open and nobody answers."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGCONT)
            end_group(self.process, grace=5)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.http_port}/metrics", timeout=10) as answer:
            return sum(s.value for s in parse_metrics(answer.read().decode()) if s.name == name)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextmanager
def running(store: Store) -> Iterator[Store]:
    """Run a store's server inside the ``with`` block; a test that fails prints the end of its log."""
    try:
        store.start()
        yield store
    except BaseException:
        print(f"{time.strftime('%H:%M:%S')}, {store.name}:", store.tail(), sep="\n")
        raise
    finally:
        store.stop()


def lmcache_server(folder: Path, *more: str) -> Store:
    """Return LMCache's server for engines that copy blocks themselves, as they do on a CPU."""
    port, http_port = claim_port(0), claim_port(0)
    (place,) = importing("lmcache")
    options = {
        "host": HOST, "port": port, "http-host": HOST, "http-port": http_port, "prometheus-port": claim_port(0),
        "chunk-size": CHUNK, "l1-size-gb": 1, "l1-init-size-gb": 1, "max-workers": 1, "eviction-policy": "LRU",
        "supported-transfer-mode": "engine_driven",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, f"{place}/bin/lmcache", "server", *words, "--l1-use-lazy", *more]
    env = {"PYTHONPATH": place, "LMCACHE_DISABLE_BANNER": "1", "OMP_NUM_THREADS": "1"}
    return Store("lmcache server", command, folder / "lmcache.log", port, http_port, env)


def lmcache_entry(store: Store, **extra: Any) -> dict[str, Any]:
    """Return LMCache MP as a connector that talks to this server."""
    options = {"host": f"tcp://{HOST}", "port": store.port, "heartbeat_interval": HEARTBEAT_S, **extra}
    options.setdefault("mq_timeout", MQ_TIMEOUT_S)
    return entry("LMCacheMPConnector", **{f"lmcache.mp.{name}": value for name, value in options.items()})


def mooncake_master(folder: Path) -> Store:
    """Return Mooncake's master, which knows the keys; the engines' workers hold the bytes."""
    port, http_port = claim_port(0), claim_port(0)
    (place,) = importing("mooncake")
    options = {"rpc_port": port, "metrics_port": http_port, "client_ttl": CLIENT_TTL_S, "logtostderr": "true"}
    command = [sys.executable, "-m", "mooncake.cli", *(f"--{name}={value}" for name, value in options.items())]
    return Store("mooncake_master", command, folder / "mooncake.log", port, http_port, {"PYTHONPATH": place})


def mooncake_store_env(store: Store, folder: Path) -> dict[str, str]:
    """Return an engine's settings for MooncakeStoreConnector: the master's address, and what it may give."""
    config = folder / "mooncake.json"
    settings = {
        "local_hostname": HOST, "metadata_server": "P2PHANDSHAKE", "global_segment_size": SEGMENT,
        "local_buffer_size": BUFFER, "protocol": "tcp", "device_name": "",
        "master_server_address": f"{HOST}:{store.port}",
    }  # fmt: skip
    config.write_text(json.dumps(settings))
    return {"MOONCAKE_CONFIG_PATH": str(config)}


def mooncake_store_entry(store: Store, cls: str = "MooncakeStoreConnector", **extra: Any) -> dict[str, Any]:
    """Return MooncakeStoreConnector as a connector; the master's port makes its socket's name unlike any other's."""
    return mooncake_entry(cls, lookup_rpc_port=store.port, **extra)


def mooncake_entry(cls: str, **extra: Any) -> dict[str, Any]:
    """Return one of Mooncake's connectors, made to run on a CPU, as a connector."""
    return {**entry(cls, **extra), "kv_connector_module_path": "tests.connectors.servers.mooncake_cpu"}


KEYS = "master_key_count"
"""Mooncake's own count of the keys in its store."""
