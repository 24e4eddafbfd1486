"""Parse servers' addresses, and scrape their /metrics repeatedly: those of API servers, or of kvobs's exporters."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvobs.cli.output import printable
from kvobs.cli.top.rows import Server, server_row
from kvobs.cli.top.scrapes import PREFIX, Scrape, parse, parse_vllm
from kvobs.cli.web import TIMEOUT_S, NoAnswerError, get
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.telemetry.payload.scrapes import Values

VLLM_PORT = 8000
PLAIN = "text/plain"
NOT_YET = "no answer yet"
ONLY_ONE = "one answer so far"
NO_METRICS = (
    f"no {PREFIX}* metrics here: where the exporter runs they are at its own port "
    f"({ExporterOptions.model_fields['port'].default} by default); else check that kvobs is enabled"
)


def url_of(text: str, default_port: int = VLLM_PORT) -> str:
    """Return the URL of a server's metrics: ``localhost`` is ``http://localhost:8000/metrics``, at vLLM's port.

    Raises:
        ValueError: not a valid address.
    """
    allowed = "use HOST[:PORT] or http(s)://HOST[:PORT][/PATH]"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port  # a port is checked when it is asked for
    except ValueError as error:
        raise ValueError(f"{text!r} is not a server address ({error}); {allowed}") from None
    plain = text.isprintable() and " " not in text and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not host or host.isdecimal() or not plain:
        raise ValueError(f"{text!r} is not a server address; {allowed}")
    path = parts.path if parts.path.strip("/") else "/metrics"
    netloc = parts.netloc if "://" in text or port is not None else f"{parts.netloc.removesuffix(':')}:{default_port}"
    return parts._replace(netloc=netloc, path=path, fragment="").geturl()


def fetch(url: str, timeout: float = TIMEOUT_S) -> Scrape:
    """Read a server's metrics once; ``NoAnswerError`` if there are none."""
    text = get(url, PLAIN, timeout).text
    return Scrape(time.monotonic(), time.time(), values_of(text), parse_vllm(text))


def values_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any, or with the last ones of an engine."""
    try:
        values = parse(text)
    except ValueError as error:
        raise NoAnswerError(f"its metrics can't be read: {printable(str(error))[:200]}") from None
    if not values:
        raise NoAnswerError(NO_METRICS)
    ends = {signals.ENGINE_UP.name: 0, signals.ENGINE_ENDED.name: 1}
    if any(ends.get(name) == value for (name, _), value in values.items()):
        raise NoAnswerError(
            f"its engine has ended{_end(values)}"
        )  # its exporter shows it; vLLM's server has no such metric
    return values


def _end(values: Values) -> str:
    """Return in which connector's call, and of what."""
    end = next((dict(labels) for name, labels in values if name == signals.ENGINE_ENDED.name), {})
    where = f" in {end.get('hook')} of connector {end['connector']}" if end.get("connector") else ""
    return f"{where}: {end.get('reason')}" if end else ""


@dataclass(frozen=True)
class Reading:
    """A server's last scrape and its rows, or the error and its start."""

    scrape: Scrape | None = None
    since_start: Server | None = None
    lately: Server | None = None
    """Between the last two scrapes."""
    error: str | None = None
    error_since_s: float = 0.0


class Watch:
    """Scrapes one server repeatedly; the last result is replaced as a whole."""

    def __init__(self, url: str, interval_s: float) -> None:
        self.url = url
        self.address = url.removeprefix("http://").removesuffix("/metrics")
        self.reading = Reading()
        self._interval_s = interval_s

    def scrape(self) -> None:
        """Scrape once; after a failure the next scrape counts as the first."""
        last = self.reading
        try:
            scrape = fetch(self.url)
            lately = server_row(self.address, last.scrape, scrape) if last.scrape else None
            self.reading = Reading(scrape, server_row(self.address, None, scrape), lately)
        except NoAnswerError as error:
            since = last.error_since_s if last.error else time.monotonic()
            self.reading = Reading(error=str(error), error_since_s=since)

    def begin(self) -> None:
        """Scrape in a thread until this process ends."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            begin = time.monotonic()
            self.scrape()
            time.sleep(max(0.0, begin + self._interval_s - time.monotonic()))

    def row(self, reading: Reading, *, since_start: bool) -> Server:
        """Return the server's row."""
        if reading.error is not None:
            seconds = time.monotonic() - reading.error_since_s
            again = f", for {seconds:.0f} s" if seconds >= 1 else ""
            return Server(self.address, error=f"{reading.error}{again}")
        if reading.since_start is None:
            return Server(self.address, error=NOT_YET)
        return reading.since_start if since_start else reading.lately or Server(self.address, error=ONLY_ONE)


def scrape_all(watches: Sequence[Watch]) -> None:
    """Scrape all servers once, at the same time."""
    threads = [threading.Thread(target=watch.scrape, daemon=True) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
