"""Two pages and nothing else, whatever clients do."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvobs.demo.server import claim_port
from kvobs.export import http_server
from kvobs.export.http_server import AT_ONCE, make_app, serve

pytestmark = pytest.mark.timeout(60)


class Site:
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
def site() -> Iterator[Site]:
    site = Site(claim_port(0))
    yield site
    site.may_answer.set()
    site.server.shutdown()
    site.server.server_close()


def test_metrics_are_served_in_the_form_that_the_client_accepts(site: Site) -> None:
    status, headers, body = site.ask(Accept="application/openmetrics-text")
    assert (status, headers["Content-Type"], body, site.accepted) == (
        200,
        "text/x",
        b"kvobs 1\n",
        "application/openmetrics-text",
    )
    assert site.ask("/metrics/")[2] == body
    _, headers, packed = site.ask(**{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == body


def test_health_is_a_status_too(site: Site) -> None:
    status, headers, body = site.ask("/healthz")
    assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", {"engine": "alive"})
    site.is_well = False
    assert site.ask("/healthz")[0] == 503


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/favicon.ico", "/../etc/passwd"])
def test_there_is_nothing_else(site: Site, path: str) -> None:
    assert site.ask(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(site: Site, method: str) -> None:
    status, headers, _ = site.ask(method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_clients_that_say_nothing_do_not_keep_others_out_for_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    silent = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(AT_ONCE)]
    try:
        for one in silent:
            one.sendall(b"GET /metrics")
        time.sleep(0.7)
        for _ in range(AT_ONCE + 2):
            assert site.ask()[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_client_that_drips_is_given_up_while_others_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    dripping = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(AT_ONCE)]
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
        assert site.ask()[0] == 200
    finally:
        over.set()
        thread.join()
        for one in dripping:
            one.close()


def test_more_requests_at_once_than_there_is_room_for_are_refused(site: Site) -> None:
    site.may_answer.clear()
    waiting = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(AT_ONCE + 5)]
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
    site.may_answer.set()
    assert waiting[0].recv(4) == b"HTTP"
    for one in waiting:
        one.close()


def test_a_taken_port_is_an_os_error(site: Site) -> None:
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1", site.port, make_app(site.metrics, lambda: (True, {})))
