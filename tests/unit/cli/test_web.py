"""A page is read whole, or the reason is named within the time; nothing of a server steers the terminal."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvobs.cli import web
from kvobs.cli.web import NoAnswerError, get, url_of
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
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"is not a server address.*; use HOST\[:PORT\] or ") as refused:
        url_of(given)
    assert str(refused.value).isprintable()
