"""A page is read whole, or the reason is named within the time; nothing of a server steers the terminal."""

import socketserver
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import typer

from kvobs.cli import web
from kvobs.cli.web import NoAnswerError, get, url_of, urls_of, use_certificates
from kvobs.export.http_server import Server
from kvobs.export.web_config import context
from tests.support.certificates import CLIENTS, Authority
from tests.support.top_engines import answering, exporting


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "AT_MOST", 2**20)
    with answering(200, "x" * 2**21) as url, pytest.raises(NoAnswerError, match="can't be read: more than 1 MiB"):
        get(url)


@contextmanager
def saying(text: bytes, *, again: bool = False) -> Iterator[str]:
    """Answer each connection with these bytes, again and again or once; never close it."""
    over = threading.Event()

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.sendall(text)
                while not over.wait(0.05):
                    self.request.sendall(text[-1:] if again else b"")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            over.set()
            server.shutdown()


@pytest.mark.parametrize(
    ("text", "again"), [(b"", False), (b"HTTP/1.1 200 OK\r\n\r\nx", False), (b"HTTP/1.1 200 OK\r\n\r\nx", True)]
)
def test_a_server_that_hangs_or_drips_is_not_waited_for(text: bytes, again: bool) -> None:
    with saying(text, again=again) as url, pytest.raises(NoAnswerError, match="no answer within 0 s"):
        get(url, timeout=0.3)


def test_a_server_without_http_is_named() -> None:
    with saying(b"SSH-2.0-OpenSSH \x1b[31m\r\n") as url, pytest.raises(NoAnswerError, match="no answer: ") as error:
        get(url)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("wanted", ["text/plain", "application/openmetrics-text"])
def test_a_page_comes_in_the_form_that_is_accepted(wanted: str) -> None:
    with exporting(lambda _recorder: None, {}, [], ("cpu",)) as address:
        page = get(f"http://{address}/metrics", wanted)
    assert page.content_type.startswith(wanted)
    assert page.text.endswith("# EOF\n") is (wanted != "text/plain")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "http://no-such-host.invalid/", "http://[::1/"])
def test_where_nobody_answers_the_reason_is_named(url: str) -> None:
    with pytest.raises(NoAnswerError, match="^no answer: ."):
        get(url)


ADDRESSES = {
    "localhost:8000": "http://localhost:8000/metrics",
    "localhost": "http://localhost:8000/metrics",
    "gpu-7/metrics/": "http://gpu-7:8000/metrics/",
    "[::1]": "http://[::1]:8000/metrics",
    "http://gpu-7": "http://gpu-7/metrics",
    "https://vllm.example/prefill/metrics": "https://vllm.example/prefill/metrics",
    "[::1]:8000": "http://[::1]:8000/metrics",
    "http://gpu-7/metrics?name=x#there": "http://gpu-7/metrics?name=x",
}


def test_addresses_are_completed() -> None:
    assert {address: url_of(address) for address in ADDRESSES} == ADDRESSES


@pytest.mark.parametrize(
    "given",
    [
        "", ":8000", "8000", "http://", "ftp://gpu-7:8000", "file:///etc/passwd", "gpu-7:port", "gpu-7:99999",
        "http://[::1", "a b:8000", "gpu-7:8000\n", "\x1b[2J:8000", "user:secret@gpu-7:8000",
    ],
)  # fmt: skip
def test_malformed_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"is not a server address.*; use HOST\[:PORT\] or ") as refused:
        url_of(given)
    assert str(refused.value).isprintable()


PAIRS = {
    "gpu-7:9464+8000": ("http://gpu-7:9464/metrics", "http://gpu-7:8000/metrics"),
    "https://gpu-7:9464+8000": ("https://gpu-7:9464/metrics", "http://gpu-7:8000/metrics"),
    "[::1]:9464+8001": ("http://[::1]:9464/metrics", "http://[::1]:8001/metrics"),
    "gpu-7": ("http://gpu-7:8000/metrics", None),
}


def test_an_exporter_can_be_given_with_its_vllm() -> None:
    assert {text: urls_of(text) for text in PAIRS} == PAIRS
    with pytest.raises(ValueError, match="is not a server address"):
        urls_of("gpu-7:9464+99999")


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    urllib.request.install_opener(None)  # as it is at the start


@pytest.mark.usefixtures("_restored")
def test_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, "of the proxy") as proxy, answering(200, "direct") as server:
        monkeypatch.setenv("http_proxy", proxy.removesuffix("/metrics"))
        use_certificates()
        assert [get(server.replace("127.0.0.1", name)).text for name in ("127.0.0.1", "localhost")] == ["direct"] * 2
        assert get("http://gpu-7.invalid/metrics").text == "of the proxy"
        assert get("http://localhost.invalid/metrics").text == "of the proxy"


@pytest.mark.usefixtures("_restored")
def test_an_exporter_with_tls_is_asked_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = partial(context, authority.web_config(**CLIENTS))
    server = Server("127.0.0.1", 0, lambda _: ("text/plain", b"kvobs 1"), lambda: (True, {}), tls)
    with closing(server):
        url = f"https://127.0.0.1:{server.port}/metrics"
        with pytest.raises(NoAnswerError, match="certificate verify failed"):
            get(url)
        use_certificates(str(authority.ca))
        with pytest.raises(NoAnswerError, match="the server may require a client certificate: --cert, --key$"):
            get(url)
        use_certificates(str(authority.ca), *authority.certificate("client"))
        assert get(url).text == "kvobs 1"
    with pytest.raises(typer.BadParameter, match="file not found: .*no.pem"):
        use_certificates(str(tmp_path / "no.pem"))
    (tmp_path / "no.pem").write_text("no certificate")
    with pytest.raises(typer.BadParameter, match="can't be used: "):
        use_certificates(str(tmp_path / "no.pem"))


def test_the_other_scheme_is_named(tmp_path: Path) -> None:
    tls = partial(context, Authority(tmp_path).web_config())
    server = Server("127.0.0.1", 0, lambda _: ("text/plain", b"kvobs 1"), lambda: (True, {}), tls)
    with (
        closing(server),
        pytest.raises(NoAnswerError, match="^no answer: the connection was closed; the server may require https$"),
    ):
        get(f"http://127.0.0.1:{server.port}/metrics")
    with (
        answering(200, "plain") as url,
        pytest.raises(NoAnswerError, match="^no answer: the server uses http, not https$"),
    ):
        get(url.replace("http:", "https:"))


@pytest.mark.usefixtures("_restored")
def test_a_silent_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:1")
    use_certificates()
    with pytest.raises(NoAnswerError) as error:
        get("http://gpu-7.invalid/metrics")
    assert str(error.value) == "no answer from the proxy 127.0.0.1:1 of http_proxy: Connection refused"
    with pytest.raises(NoAnswerError, match="^no answer: Connection refused$"):
        get("http://127.0.0.1:1/metrics")
