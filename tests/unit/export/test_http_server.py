"""Three pages and nothing else, whatever clients do."""

import gzip
import json
import socket
import ssl
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from kvobs import faults
from kvobs.export import http_server
from kvobs.export.http_server import Server
from kvobs.export.listening import PLACES
from kvobs.export.web_config import context
from tests.support.certificates import CLIENTS, Authority
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


class Pages:
    """A running server, and what it is asked."""

    def __init__(self, tls: str | None = None, status: http_server.Status | None = None) -> None:
        self.is_well, self.accepted = True, ""
        self.server = Server(
            "127.0.0.1",
            0,
            self.metrics,
            lambda: (self.is_well, {"engine": "alive"}),
            partial(context, tls) if tls else None,
            status=status,
        )
        self.port, self.scheme = self.server.port, "http" if tls is None else "https"

    def metrics(self, accept: str) -> tuple[str, bytes]:
        self.accepted = accept
        return "text/x", b"kvobs 1\n"

    def ask(
        self, path: str = "/metrics", method: str = "GET", trust: ssl.SSLContext | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        url = f"{self.scheme}://127.0.0.1:{self.port}{path}"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(url, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def say(self, text: bytes) -> bytes:
        """Send bytes; return all that comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as client:
            client.sendall(text)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    with closing(pages.server):
        yield pages


def test_metrics_are_served_in_the_form_that_the_client_accepts(pages: Pages) -> None:
    status, headers, body = pages.ask(Accept="application/openmetrics-text")
    assert (status, headers["Content-Type"], body) == (200, "text/x", b"kvobs 1\n")
    assert pages.accepted == "application/openmetrics-text"
    assert pages.ask("/metrics/")[2] == body
    _, headers, packed = pages.ask(Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == body


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip;q=0", False), ("deflate, gzip ; q=0.0 , br", False), ("identity", False), ("", False)]
    + [(accepted, True) for accepted in ("gzip", "deflate, gzip;q=0.5, br", "gzip;q=1.0", "x-gzip", "gzip;q=0.01")],
)
def test_only_who_accepts_gzip_gets_it(accepted: str, is_packed: bool, pages: Pages) -> None:
    _, headers, body = pages.ask(Accept_Encoding=accepted)
    assert headers.get("Content-Encoding") == ("gzip" if is_packed else None)
    assert (gzip.decompress(body) if is_packed else body) == b"kvobs 1\n"


class Statuses:
    """What the status page was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, bool]] = []
        self.error: Exception | None = None

    def __call__(self, *, is_local: bool, reloads: bool) -> bytes:
        self.asked.append((is_local, reloads))
        if self.error is not None:
            raise self.error
        return b"<h1>status</h1>"


@pytest.fixture
def status() -> Iterator[tuple[Pages, Statuses]]:
    statuses = Statuses()
    pages = Pages(status=statuses)
    with closing(pages.server):
        yield pages, statuses


def test_the_status_page_runs_no_script_and_loads_nothing(status: tuple[Pages, Statuses]) -> None:
    pages, statuses = status
    code, headers, body = pages.ask("/")
    assert (code, headers["Content-Type"], body) == (200, "text/html; charset=utf-8", b"<h1>status</h1>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "script" not in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert pages.ask("/?still")[0] == 200
    assert gzip.decompress(pages.ask("/", Accept_Encoding="gzip")[2]) == body
    assert statuses.asked == [(True, True), (True, False), (True, True)]
    whole, head = pages.say(b"GET / HTTP/1.0\r\n\r\n"), pages.say(b"HEAD / HTTP/1.0\r\n\r\n")
    assert whole == head + body
    assert pages.ask("/", "POST")[0] == 405
    assert pages.ask("/index.html")[::2] == (404, b"here are /, /metrics and /healthz\n")


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP", "X-Forwarded-Host"])
def test_a_client_behind_a_proxy_on_this_machine_is_elsewhere(header: str, status: tuple[Pages, Statuses]) -> None:
    pages, statuses = status
    assert pages.ask("/", "GET", None, **{header.replace("-", "_"): "10.1.2.3"})[0] == 200
    assert statuses.asked == [(False, True)]


def test_a_client_at_another_address_is_elsewhere(
    status: tuple[Pages, Statuses], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, statuses = status
    monkeypatch.setattr(http_server, "is_loopback", lambda address: False)
    assert pages.ask("/")[0] == 200
    assert statuses.asked == [(False, True)]


def test_a_failing_status_page_is_counted_and_the_metrics_stay(
    status: tuple[Pages, Statuses], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, statuses = status
    contained: list[str] = []  # a thread of an earlier test's engine may take the counts
    monkeypatch.setattr(faults, "contain", contained.append)
    statuses.error = ValueError("broken")
    assert [pages.ask("/")[::2] for _ in range(2)] == [(500, b"see the engine's log\n")] * 2
    assert contained == ["read", "read"]
    assert pages.ask()[0] == 200


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


def test_head_has_no_body_and_nobody_is_told_the_software(pages: Pages) -> None:
    whole, head = pages.say(b"GET /metrics HTTP/1.0\r\n\r\n"), pages.say(b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert whole == head + b"kvobs 1\n"
    assert b"\r\nContent-Length: 8\r\n" in head
    assert b"server:" not in head.lower()
    assert b"python" not in head.lower()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nothing\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),  # without Host
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\n\n", b"400"),  # TLS
    ],
)
def test_malformed_requests_are_refused(pages: Pages, sent: bytes, status: bytes) -> None:
    assert pages.say(sent).split()[1] == status


@contextmanager
def dripping(port: int, clients: int) -> Iterator[None]:
    """Let clients send a byte each 0.3 s, and come back whenever they are closed."""
    over = threading.Event()

    def drip() -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                while not over.wait(0.3):
                    client.sendall(b"x")

    threads = [threading.Thread(target=drip) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("clients", [24, PLACES + 6])
def test_clients_that_drip_and_return_keep_nobody_out(pages: Pages, clients: int) -> None:
    with dripping(pages.port, clients):
        time.sleep(0.5)
        assert [pages.ask()[0] for _ in range(40)] == [200] * 40


def test_a_client_has_limited_time_for_its_request(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.5)
    with socket.create_connection(("127.0.0.1", pages.port), 20) as client, suppress(ConnectionError):
        for _ in range(200):
            client.sendall(b"x")
            client.settimeout(0.1)
            with suppress(TimeoutError):
                assert client.recv(100) == b""
                return
        raise AssertionError("it drips for ever")


def test_the_address_with_the_most_connections_loses_its_oldest(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 30)
    with ExitStack() as stack:

        def connect(address: str) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", pages.port), 10, source_address=(address, 0))
            client.sendall(b"GET /metrics HTTP/1.0\r\n")
            return stack.enter_context(client)

        quiet = connect("127.0.0.2")
        crowd = [connect("127.0.0.3") for _ in range(PLACES + 3)]
        for closed in crowd[:4]:
            with suppress(ConnectionResetError):
                assert closed.recv(1) == b""
        for client in (quiet, crowd[4], crowd[-1]):
            client.sendall(b"\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"


HOSTS = {
    "localhost": 200, "LOCALHOST:9464": 200, "127.0.0.1:9464": 200, "10.1.2.3": 200, "[::1]:9464": 200,
    "kvobs.localhost": 200, "gpu-7:9464": 200, socket.gethostname(): 200, "": 200,
    "evil.example": 403, "evil.example:9464": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example": 403,
    "1.2.3.4.5": 403, "evil.example:x": 403,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_another_sites_name_is_refused_on_loopback(pages: Pages, host: str) -> None:
    """DNS rebinding: a page in a browser of this machine, whose name was made to point here, reads nothing."""
    assert pages.ask(Host=host)[0] == HOSTS[host]


# TLS


def test_metrics_are_served_to_those_with_a_certificate_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pages = Pages(authority.web_config(**CLIENTS))
    (tmp_path / "other").mkdir()
    stranger = ssl.create_default_context(cafile=str(authority.ca))
    stranger.load_cert_chain(*Authority(tmp_path / "other").certificate("client"))
    with closing(pages.server):
        assert pages.ask(trust=authority.trust("client"))[2] == b"kvobs 1\n"
        for refused in (authority.trust(), stranger):
            with pytest.raises(OSError, match="ALERT|alert|EOF|reset|closed"):
                pages.ask(trust=refused)
        with suppress(ConnectionResetError):
            assert b"kvobs" not in pages.say(b"GET /metrics HTTP/1.0\r\n\r\n")


def test_certificates_rotate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = Authority(tmp_path)
    config = Path(old.web_config())
    pages = Pages(str(config))
    with closing(pages.server):
        assert pages.ask(trust=old.trust())[0] == 200
        new = Authority(tmp_path)
        new.certificate("server")
        assert pages.ask(trust=new.trust())[0] == 200
        config.write_text("tls_server_config: {}")
        with pytest.raises(OSError, match="EOF|reset|closed"):
            pages.ask(trust=new.trust())
        assert (
            f"the exporter is rejecting all connections, because it can't load its TLS files: {config}: Object "
            "missing required field `cert_file`"
        ) in caplog.text
        new.web_config()
        assert pages.ask(trust=new.trust())[0] == 200


def test_connections_take_little_memory(tmp_path: Path) -> None:
    pages = Pages(Authority(tmp_path).web_config())
    with closing(pages.server), ExitStack() as clients:
        tracemalloc.start()
        clients.callback(tracemalloc.stop)
        for _ in range(20):
            clients.enter_context(socket.create_connection(("127.0.0.1", pages.port), 10))
        assert eventually(lambda: len(pages.server._connections) == 20)
        time.sleep(0.1)
        assert tracemalloc.get_traced_memory()[0] < 20 << 16


def test_a_taken_port_is_an_os_error(pages: Pages) -> None:
    with pytest.raises(OSError, match="in use"):
        Server("127.0.0.1", pages.port, pages.metrics, lambda: (True, {}))
