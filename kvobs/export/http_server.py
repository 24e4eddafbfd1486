"""Serve /metrics, /healthz and the status page, and nothing else, by HTTP or HTTPS: a thread with asyncio and h11."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import logging
import re
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from threading import Thread
from typing import Any, Protocol

import h11

from kvobs import faults
from kvobs.export.listening import PLACES, is_loopback, listen
from kvobs.log import once

HEAD_S = 2.0
"""How long a client may take over the TLS handshake and its complete request."""
ANSWER_S = 5.0
"""How long it may take to read the answer."""
READ = 1 << 14  # bytes
_PLAIN = "text/plain; charset=utf-8"
_OF_STATUS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Of the status page: if a text of it were not escaped, the browser would still run no script and load nothing."""
STILL = "still"
"""The query with which the status page does not reload itself."""
_FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"}
"""Headers of a proxy, whose clients are on other machines."""

Text = Callable[[str], tuple[str, bytes]]
Health = Callable[[], tuple[bool, dict[str, Any]]]


class Status(Protocol):
    """Makes the status page; ``is_local``: only for people on this machine."""

    def __call__(self, *, is_local: bool, reloads: bool) -> bytes: ...


Tls = Callable[[], ssl.SSLContext]
Answer = tuple[HTTPStatus, dict[str, str], bytes]


class Server:
    """Serves its pages until it is closed: the metrics in the form that a client accepts, the health and the status.

    Args:
        host, port: where to listen.
        metrics, health: return the pages.
        tls: returns the TLS settings, for each connection; OSError if they can't be used.
        status: returns the status page; None: there is none.

    Raises:
        OSError: the port is not available, or the TLS settings can't be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Text,
        health: Health,
        tls: Tls | None = None,
        *,
        status: Status | None = None,
    ) -> None:
        self._host, self._metrics, self._health, self._tls, self._status = host, metrics, health, tls, status
        if tls is not None:
            tls()
            SSLProtocol.max_size = READ  # instead of 256 KiB a connection, kept until gc finds it
        self._socket = listen(host, port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[asyncio.Task[None], str] = {}  # with their addresses, the oldest first
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = Thread(target=self._run, name="kvobs-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()

    def _run(self) -> None:
        with self._socket, suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()

    async def _accept(self) -> None:
        try:
            while True:
                await self._accept_one()
                await asyncio.sleep(0)  # accepting does not wait while connections are there
        finally:
            await asyncio.sleep(0)  # the last one has to begin, to close its socket
            for connection in list(self._connections):
                connection.cancel()
            await asyncio.sleep(0.01)  # for them to end

    async def _accept_one(self) -> None:
        await self._has_client()
        try:
            connection, address = self._socket.accept()
        except BlockingIOError:  # the client has left
            return
        except OSError:  # no file descriptor is left
            await asyncio.sleep(1)
            return
        if len(self._connections) >= PLACES:
            busiest = Counter(self._connections.values()).most_common(1)[0][0]
            oldest = next(task for task, owner in self._connections.items() if owner == busiest)
            del self._connections[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(connection))
        self._connections[task] = address[0]
        task.add_done_callback(lambda task: self._connections.pop(task, None))

    async def _has_client(self) -> None:
        """Wait for a client; unlike ``sock_accept`` it loses none when it is cancelled."""
        has_client = asyncio.Event()
        self._loop.add_reader(self._socket, has_client.set)
        try:
            await has_client.wait()
        finally:
            self._loop.remove_reader(self._socket)

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one request; clients that are slow, go away, or do not speak TLS are given up."""
        try:
            tls = None if self._tls is None else self._tls()
        except OSError as error:
            once(
                "tls",
                logging.ERROR,
                "the exporter is rejecting all connections, because it can't load its TLS files: %s",
                error.strerror,
            )
            connection.close()
            return
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                reader = asyncio.StreamReader()
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                answer = await self._answer_to(reader, transport.get_extra_info("sockname")[0])
            async with asyncio.timeout(ANSWER_S):
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except OSError:  # also for what takes too long
            pass
        finally:
            connection.close() if transport is None else transport.abort()

    async def _answer_to(self, reader: asyncio.StreamReader, address: str) -> bytes:
        """Return the answer to a client's request, in bytes; empty if it sends none."""
        http, is_head = h11.Connection(h11.SERVER), False
        try:
            while (request := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(READ))
            if not isinstance(request, h11.Request):
                return b""
            is_head = request.method == b"HEAD"
            status, headers, body = self._answer(request, address)
        except h11.RemoteProtocolError as error:
            status, headers, body = HTTPStatus(error.error_status_hint), {"Content-Type": _PLAIN}, b"malformed\n"
        headers |= {"Content-Length": str(len(body)), "Connection": "close"}
        head = h11.Response(status_code=status, headers=list(headers.items()), reason=status.phrase.encode())
        return (http.send(head) or b"") + (b"" if is_head else body)

    def _answer(self, request: h11.Request, address: str) -> Answer:
        headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        path, _, query = request.target.decode().partition("?")
        if request.method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, {"Content-Type": _PLAIN, "Allow": "GET, HEAD"}, b"GET only\n"
        if is_loopback(address) and not self._is_ours(headers.get("host", "")):
            # A web page in a browser of this machine, whose name was made to point here.
            says = b"this name may be another site's: use localhost or an IP address\n"
            return HTTPStatus.FORBIDDEN, {"Content-Type": _PLAIN}, says
        try:
            if path == "/" and self._status is not None:
                is_local = is_loopback(address) and not _FORWARDED & headers.keys()
                page = self._status(is_local=is_local, reloads=query != STILL)
                return _packed(_OF_STATUS, page, headers.get("accept-encoding", ""))
            return self._page(path, headers.get("accept", ""), headers.get("accept-encoding", ""))
        except Exception:
            faults.contain("read")
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"Content-Type": _PLAIN}, b"see the engine's log\n"

    def _page(self, path: str, accept: str, encodings: str) -> Answer:
        if path in ("/metrics", "/metrics/"):
            content_type, body = self._metrics(accept)
            return _packed({"Content-Type": content_type}, body, encodings)
        if path == "/healthz":
            is_well, state = self._health()
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            return status, {"Content-Type": "application/json"}, json.dumps(state).encode() + b"\n"
        here = b"here are /metrics and /healthz\n" if self._status is None else b"here are /, /metrics and /healthz\n"
        return HTTPStatus.NOT_FOUND, {"Content-Type": _PLAIN}, here

    def _is_ours(self, host: str) -> bool:
        """Return whether the name in a request's header ``Host`` can't be one of somebody else's domain."""
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return (
            "." not in name or name.endswith(".localhost") or name in (self._host.lower(), socket.gethostname().lower())
        )


def _packed(headers: dict[str, str], body: bytes, encodings: str) -> Answer:
    """Return an answer, compressed for clients that accept it."""
    if not re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", encodings):
        return HTTPStatus.OK, dict(headers), body
    return HTTPStatus.OK, headers | {"Content-Encoding": "gzip"}, gzip.compress(body, 1)
