"""Complete the address of a server, and read a page over HTTP, limited in time and size."""

import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import typer

from kvobs.export.texts import printable

CaCert = Annotated[str | None, typer.Option(metavar="FILE", help="CA certificate that verifies the server, for https.")]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="Client certificate, for https.")]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="Key of the client certificate.")]
_IS_HERE = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")
VLLM_PORT = 8000
TIMEOUT_S = 10.0
NO_PROMETHEUS = "is not a Prometheus server: its API gave an unexpected answer"
AT_MOST = 64 * 2**20
"""Bytes of an answer: a hundred times the size of vLLM's."""


def url_of(text: str, default_port: int = VLLM_PORT) -> str:
    """Return the URL of a server's metrics: ``localhost`` is ``http://localhost:8000/metrics``; or raise ValueError."""
    allowed = "use HOST[:PORT] or http(s)://HOST[:PORT][/PATH]"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port  # reading an invalid port raises
    except ValueError as error:
        raise ValueError(f"{text!r} is not a server address ({error}); {allowed}") from None
    is_plain = text.isprintable() and " " not in text and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not host or host.isdecimal() or not is_plain:
        raise ValueError(f"{text!r} is not a server address; {allowed}")
    path = parts.path if parts.path.strip("/") else "/metrics"
    netloc = parts.netloc if "://" in text or port is not None else f"{parts.netloc.removesuffix(':')}:{default_port}"
    return parts._replace(netloc=netloc, path=path, fragment="").geturl()


def urls_of(text: str) -> tuple[str, str | None]:
    """Return the URL of a server's metrics and, for an exporter's ``gpu-7:9464+8000``, its vLLM's URL."""
    if (pair := re.fullmatch(r"(.*:\d+)\+(\d+)", text)) is None:
        return url_of(text), None
    url = url_of(pair[1])
    host = urlsplit(url).netloc.rpartition(":")[0]
    return url, url_of(f"{host}:{pair[2]}")


class _Proxy(urllib.request.ProxyHandler):
    """The proxy of the environment, but for this machine."""

    def proxy_open(self, req: Any, proxy: str, type: str) -> Any:  # noqa: A002 - the name of urllib's argument
        return None if _IS_HERE.fullmatch(req.host) else super().proxy_open(req, proxy, type)


def use_certificates(cacert: str | None = None, cert: str | None = None, key: str | None = None) -> None:
    """Ask servers so from now on; ``BadParameter`` if the files can't be used."""
    for name, file in (("--cacert", cacert), ("--cert", cert), ("--key", key)):
        if file is not None and not os.path.isfile(file):
            raise typer.BadParameter(f"file not found: {printable(file)}", param_hint=name)
    try:
        context = ssl.create_default_context(cafile=cacert)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise typer.BadParameter(f"can't be used: {error.strerror}", param_hint="--cacert, --cert, --key") from None
    https = urllib.request.HTTPSHandler(context=context)
    urllib.request.install_opener(urllib.request.build_opener(_Proxy, https))


class NoAnswerError(Exception):
    """A page can't be read, or has another content; the text is the reason, without the address."""


class Page(NamedTuple):
    text: str
    content_type: str


def get(url: str, accept: str = "*/*", timeout: float = TIMEOUT_S) -> Page:
    """Read a page; ``NoAnswerError`` if that can't be done within this time."""
    deadline = time.monotonic() + timeout
    try:
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Page(_read(answer, deadline), answer.headers.get("Content-Type", ""))
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise NoAnswerError(f"answered {error.code} {printable(error.reason)}") from None
    except TimeoutError:
        raise NoAnswerError(f"no answer within {timeout:.0f} s") from None
    except (OSError, HTTPException, ValueError) as error:
        says = _says(url.partition(":")[0], getattr(error, "reason", error))
        raise NoAnswerError(f"no answer{_proxy_of(url)}: {printable(says)}") from None


def query_prometheus(url: str, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus's API; ``NoAnswerError`` if there is none."""
    text, _ = get(f"{url}/api/v1/{path}?{urlencode(query)}", "application/json")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        answer = json.loads(text)
        if answer["status"] == "success":
            return answer["data"]
    raise NoAnswerError(NO_PROMETHEUS)


def _says(scheme: str, error: object) -> str:
    """Return the reason, in the words of the one who can mend it."""
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the server uses http, not https"
    if isinstance(error, (RemoteDisconnected, ConnectionResetError)):
        required = "a client certificate: --cert, --key" if scheme == "https" else "https"
        return f"the connection was closed; the server may require {required}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _proxy_of(url: str) -> str:
    """Name the proxy of the environment that was asked instead of the server."""
    scheme, _, rest = url.partition("://")
    proxy, host = urllib.request.getproxies().get(scheme), rest.partition("/")[0]
    if not proxy or _IS_HERE.fullmatch(host) or urllib.request.proxy_bypass(host):
        return ""
    return f" from the proxy {printable(proxy.rpartition('@')[2])} of {scheme}_proxy"


def _read(answer: HTTPResponse, deadline: float) -> str:
    """Read a complete answer, limited in time and size."""
    content = bytearray()
    while chunk := answer.read1(65536):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(content) > AT_MOST:
            raise NoAnswerError(f"can't be read: more than {AT_MOST >> 20} MiB")
    return content.decode(errors="replace")
