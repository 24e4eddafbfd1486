"""Two pages and nothing else, whatever clients do."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvobs.demo.server import claim_port
from kvobs.export import http_server
from kvobs.export.http_server import AT_ONCE, holder, make_app, serve

pytestmark = pytest.mark.timeout(60)


class Pages:
    """A running server, and what it is asked."""

    def __init__(self, port: int) -> None:
        self.port, self.is_well, self.accepted = port, True, ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.server = serve("127.0.0.1", port, make_app(self.metrics, lambda: (self.is_well, {"engine": "alive"})))

    def metrics(self, accept: str) -> tuple[str, bytes]:
        self.may_answer.wait(20)
        self.accepted = accept
        return "text/x", b"kvobs 1\n"

    def ask(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages(claim_port(0))
    yield pages
    pages.may_answer.set()
    pages.server.shutdown()
    pages.server.server_close()


def test_metrics_are_served_in_the_form_that_the_client_accepts(pages: Pages) -> None:
    status, headers, body = pages.ask(Accept="application/openmetrics-text")
    assert (status, headers["Content-Type"], body, pages.accepted) == (
        200,
        "text/x",
        b"kvobs 1\n",
        "application/openmetrics-text",
    )
    assert pages.ask("/metrics/")[2] == body
    _, headers, packed = pages.ask(**{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == body


def test_health_is_a_status_too(pages: Pages) -> None:
    status, headers, body = pages.ask("/healthz")
    assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", {"engine": "alive"})
    pages.is_well = False
    assert pages.ask("/healthz")[0] == 503


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/favicon.ico", "/../etc/passwd"])
def test_there_is_nothing_else(pages: Pages, path: str) -> None:
    assert pages.ask(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(pages: Pages, method: str) -> None:
    status, headers, _ = pages.ask(method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_clients_that_say_nothing_do_not_keep_others_out_for_long(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    silent = [socket.create_connection(("127.0.0.1", pages.port)) for _ in range(AT_ONCE)]
    try:
        for one in silent:
            one.sendall(b"GET /metrics")
        time.sleep(0.7)
        for _ in range(AT_ONCE + 2):
            assert pages.ask()[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_client_that_drips_is_given_up_while_others_wait(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    dripping = [socket.create_connection(("127.0.0.1", pages.port)) for _ in range(AT_ONCE)]
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.1):
            for one in dripping:
                try:
                    one.sendall(b"x")
                except OSError:
                    continue

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        time.sleep(0.8)
        assert pages.ask()[0] == 200
    finally:
        over.set()
        thread.join()
        for one in dripping:
            one.close()


def test_more_requests_at_once_than_there_is_room_for_are_refused(pages: Pages) -> None:
    pages.may_answer.clear()
    waiting = [socket.create_connection(("127.0.0.1", pages.port)) for _ in range(AT_ONCE + 5)]
    for one in waiting:
        one.settimeout(2)
        one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    refused = 0
    for one in waiting[AT_ONCE:]:
        try:
            refused += one.recv(1) == b""
        except ConnectionResetError:
            refused += 1
    assert refused == 5
    pages.may_answer.set()
    assert waiting[0].recv(4) == b"HTTP"
    for one in waiting:
        one.close()


def test_a_taken_port_is_an_os_error(pages: Pages) -> None:
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1", pages.port, make_app(pages.metrics, lambda: (True, {})))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listening_process_is_named(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError:
            assert family == socket.AF_INET6, "this machine has no IPv6"
            return
        port = listening.getsockname()[1]
        assert holder(port) == "another process", "it does not listen yet"
        listening.listen()
        named = holder(port)
    assert named.startswith(f"pid {os.getpid()} (")
    assert os.path.basename(sys.executable)[:6] in named or "pytest" in named
    assert len(named) < 160


def test_a_free_port_is_held_by_nobody_that_is_seen() -> None:
    assert holder(claim_port(0)) == "another process"
