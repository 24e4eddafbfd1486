"""The command ``kvobs top``: read servers in threads, and show their rows live, once or as JSON."""

import json
import os
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from kvobs.cli.here import running
from kvobs.cli.output import examples, fail
from kvobs.cli.scrapes import fetch
from kvobs.cli.top.screen import SORTS, Picture, legend
from kvobs.cli.web import CaCert, Cert, Key, NoAnswerError, urls_of, use_certificates
from kvobs.export.connector_rows import Server, server_row
from kvobs.export.numbers import Scrape
from kvobs.page import files

STDIN = 0
LOOK_S = 0.5  # between two draws of the screen
KEYS = "q quit  < > sort  ? help"
HUNG_UP = "\x04"  # Ctrl-D, and what is read from a terminal that is gone

EXAMPLES = examples(
    "kvobs top                            the engines on this host",
    "kvobs top localhost                  a vLLM server at its port 8000",
    "kvobs top gpu-1:9464+8000            an exporter, and its vLLM's port",
    "kvobs top localhost --once --json    for scripts",
)


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL...]",
            help="Address of a vLLM server, e.g. localhost:8000, or of its exporter, e.g. localhost:9464, or both as "
            "localhost:9464+8000. Without an address: the engines of this user on this host.",
        ),
    ] = None,
    *,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between scrapes.")] = 4.0,
    once: Annotated[bool, typer.Option("--once", help="Scrape twice, print the difference, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; requires --once.")] = False,
    cacert: CaCert = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Show each connector of running servers live: hits, loads, waits, errors, and the cost of telemetry."""
    use_certificates(cacert, cert, key)
    if as_json and not once:
        raise typer.BadParameter("requires --once", param_hint="--json")
    try:
        watches = [
            Watch(url, partial(fetch, url, of_vllm), interval)
            for url, of_vllm in dict.fromkeys(map(urls_of, urls or ()))
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    if not watches and not (watches := [Watch(name, read, interval) for name, read in running().items()]):
        raise fail(
            f"found no running engine in {files.folder()}: run this as the engine's user, on its machine, and in "
            "its container; or give the address of a server"
        )
    # SIGTERM must restore the terminal as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = Top(Console(highlight=False), watches, interval)
    try:
        if not once:
            view.run()
        elif not view.once(as_json=as_json):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        raise typer.Exit(130 if once else 0) from None


class Watch:
    """Reads the metrics of one server repeatedly, into a row since its start, and one since the last time."""

    def __init__(self, url: str, read: Callable[[], Scrape], interval_s: float) -> None:
        self._read, self._interval_s = read, interval_s
        self.address = url.removeprefix("http://").removesuffix("/metrics")
        self.since_start = self.lately = Server(self.address, error="no answer yet")
        self.last: Scrape | None = None  # if it could be read
        self._failing_since_s: float | None = None

    def scrape(self) -> None:
        """Scrape once; after a failure the next scrape counts as the first."""
        try:
            scrape = self._read()
        except NoAnswerError as error:
            now, self.last = time.monotonic(), None
            self._failing_since_s = self._failing_since_s or now
            seconds = now - self._failing_since_s
            since = f"for {seconds:.0f} s: " if seconds >= 1 else ""
            self.since_start = self.lately = Server(self.address, error=f"{since}{error}")
            return
        only_one = Server(self.address, error="one answer so far")
        self.lately = server_row(self.address, self.last, scrape) if self.last else only_one
        self.since_start = server_row(self.address, None, scrape)
        self.last, self._failing_since_s = scrape, None

    def run(self) -> None:
        """Scrape in each interval, for ever."""
        while True:
            begin = time.monotonic()
            self.scrape()
            time.sleep(max(0.0, begin + self._interval_s - time.monotonic()))


def scrape_all(watches: Sequence[Watch]) -> None:
    """Scrape all servers once, at the same time."""
    threads = [threading.Thread(target=watch.scrape, daemon=True) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass
class Top:
    """The watched servers, the view, and the console."""

    console: Console
    watches: Sequence[Watch]
    interval_s: float
    by: str | None = None  # the field that connectors are sorted by, the largest first; None: as they are configured

    def once(self, *, as_json: bool) -> bool:
        """Scrape all servers twice, an interval apart, and print the difference; return whether all could be read.

        A server that does not answer at first is not waited for again.
        """
        scrape_all(self.watches)
        if answering := [watch for watch in self.watches if watch.last]:
            time.sleep(self.interval_s)
            scrape_all(answering)
        servers = [watch.lately for watch in self.watches]
        if as_json:
            document = {"servers": [asdict(server) for server in servers]}
            self.console.file.write(json.dumps(document, allow_nan=False) + "\n")
        else:
            self.console.print(Picture(servers, self.interval_s))
        return all(server.error is None for server in servers)

    def run(self) -> None:
        """Show the rows until the user quits; without a terminal, print them in each interval."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._run_on_terminal()
            return
        while True:
            scrape_all(self.watches)
            self.console.print(self._picture(), "")
            time.sleep(self.interval_s)

    def _run_on_terminal(self) -> None:
        for watch in self.watches:
            threading.Thread(target=watch.run, daemon=True).start()
        screen = Layout()
        screen.split_column(Layout(self._picture(), name="picture"), Layout(Text(KEYS, "dim"), size=1))
        with keyboard(STDIN) as read, Live(screen, console=self.console, screen=True, auto_refresh=False) as live:
            keys, has_legend = "", False
            while not set(keys) & {"q", "Q", HUNG_UP}:
                for key in keys:
                    step = {"<": -1, ">": 1}.get(key, 0)
                    self.by = SORTS[(SORTS.index(self.by) + step) % len(SORTS)]
                    has_legend ^= key == "?"
                screen["picture"].update(legend() if has_legend else self._picture())
                live.refresh()
                keys = read(LOOK_S)

    def _picture(self) -> Picture:
        """Return the last scrapes: since the servers' start until there are two of any server."""
        lately = [watch.lately for watch in self.watches]
        is_early = all(server.error is not None for server in lately)
        servers = [watch.since_start for watch in self.watches] if is_early else lately
        return Picture(servers, self.interval_s, self.by)


@contextmanager
def keyboard(fd: int) -> Iterator[Callable[[float], str]]:
    """Take keys without echo inside the ``with`` block: yield a function that waits for some, for this many seconds.

    If ``fd`` is not a terminal, it only waits. Keys that send an escape sequence have no meaning here.
    """
    before = termios.tcgetattr(fd) if os.isatty(fd) else None

    def read(seconds: float) -> str:
        if not select.select([fd] if before else [], [], [], seconds)[0]:
            return ""
        pressed = os.read(fd, 64).decode(errors="replace") or HUNG_UP
        return "" if pressed.startswith("\x1b") else pressed

    try:
        if before:
            tty.setcbreak(fd)
        yield read
    finally:
        if before:
            termios.tcsetattr(fd, termios.TCSANOW, before)
