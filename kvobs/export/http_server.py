"""Serve /metrics and /healthz, and nothing else, with prometheus_client's server: a few requests at once."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from kvobs.log import line

AT_ONCE = 8
"""Requests at a time; further connections are closed."""
IDLE_S = 5.0
"""How long a client may take over each part of its request, and in all while others wait."""
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp

Text = Callable[[str], tuple[str, bytes]]
Health = Callable[[], tuple[bool, dict[str, Any]]]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class _Handler(WSGIRequestHandler):
    """Logs nothing, and gives up on a slow client."""

    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of http.server's argument
        """Log nothing."""


class _Server(ThreadingWSGIServer):
    """Serves a few requests at once."""

    request_queue_size = 64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        now = time.monotonic()
        if len(self._open) >= AT_ONCE and not self._close_oldest(now):
            self.shutdown_request(request)
            return
        self._open[request] = now
        super().process_request(request, client_address)

    def _close_oldest(self, now: float) -> bool:
        """Close the oldest connection if it has had its time; return whether there is room now."""
        request, since = next(iter(list(self._open.items())), (None, now))
        if request is None or now - since < IDLE_S:
            return request is None
        self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that goes away."""


def serve(host: str, port: int, app: App) -> _Server:
    """Serve an app in a thread; OSError if the port can't be had."""
    family, address = resolve(host, port)
    server_class = type("_Server", (_Server,), {"address_family": family})
    server: _Server = make_server(address, port, app, server_class, handler_class=_Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 1.0}, name="kvobs-http", daemon=True).start()
    return server


def make_app(metrics: Text, health: Health) -> App:
    """Return the two pages: the metrics in the form that a client accepts, and the state of engine and exporter."""

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path, headers = environ.get("PATH_INFO", ""), [("Content-Type", "text/plain; charset=utf-8")]
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [*headers, ("Allow", "GET, HEAD")])
            return [b"GET only\n"]
        if path in ("/metrics", "/metrics/"):
            content_type, body = metrics(environ.get("HTTP_ACCEPT", ""))
            headers = [("Content-Type", content_type)]
            if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
                headers.append(("Content-Encoding", "gzip"))
                body = gzip.compress(body, 1)
            status = "200 OK"
        elif path == "/healthz":
            is_well, state = health()
            status, headers = "200 OK" if is_well else "503 Service Unavailable", [("Content-Type", "application/json")]
            body = json.dumps(state).encode() + b"\n"
        else:
            status, body = "404 Not Found", b"here are /metrics and /healthz\n"
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return app


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the address to listen on, and its family; OSError or ValueError if the host has none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def holder(port: int) -> str:
    """Return the process that listens on a port, as "pid 1 (command)"; "another process" where that can't be seen."""
    inodes = _listening(port)
    for entry in os.listdir("/proc") if inodes else ():
        if not entry.isdigit():
            continue
        with suppress(OSError):  # of another user, or gone
            if any(_target(link) in inodes for link in Path(f"/proc/{entry}/fd").iterdir()):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"pid {entry} ({line(words.decode(errors='replace').strip())})"
    return "another process"


def _target(link: Path) -> str:
    with suppress(OSError):  # closed since it was listed
        return os.readlink(link)
    return ""


def _listening(port: int) -> set[str]:
    """Return the sockets that listen on a port, as links of file descriptors show them."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = row.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
    return sockets
