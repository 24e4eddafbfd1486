"""Scrape servers in threads, and show their rows live; keys sort and quit."""

import json
import os
import select
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvobs.cli.top.rows import Server, as_dict, server_row
from kvobs.cli.top.scrapes import Scrape, fetch
from kvobs.cli.top.screen import SORTS, picture
from kvobs.cli.web import NoAnswerError

NOT_YET = "no answer yet"
ONLY_ONE = "one answer so far"
STDIN = 0
LOOK_S = 0.5  # between two draws of the screen, on which ages grow
KEYS = "q quit  < > sort"
HUNG_UP = "\x04"  # Ctrl-D, and what is read from a terminal that is gone


@dataclass(frozen=True)
class Reading:
    """A server's last scrape and its rows, or the error and its start."""

    scrape: Scrape | None = None
    since_start: Server | None = None
    lately: Server | None = None  # between the last two scrapes
    error: str | None = None
    error_since_s: float = 0.0


class Watch:
    """Scrapes one server repeatedly; the last result is replaced as a whole."""

    def __init__(self, url: str, interval_s: float, of_vllm: str | None = None) -> None:
        self.url, self._of_vllm = url, of_vllm
        self.address = url.removeprefix("http://").removesuffix("/metrics")
        self.reading = Reading()
        self._interval_s = interval_s

    def scrape(self) -> None:
        """Scrape once; after a failure the next scrape counts as the first."""
        last = self.reading
        try:
            scrape = fetch(self.url, self._of_vllm)
            lately = server_row(self.address, last.scrape, scrape) if last.scrape else None
            self.reading = Reading(scrape, server_row(self.address, None, scrape), lately)
        except NoAnswerError as error:
            since = last.error_since_s if last.error else time.monotonic()
            self.reading = Reading(error=str(error), error_since_s=since)

    def run(self) -> None:
        """Scrape in each interval, for ever."""
        while True:
            begin = time.monotonic()
            self.scrape()
            time.sleep(max(0.0, begin + self._interval_s - time.monotonic()))

    def row(self, reading: Reading, *, since_start: bool) -> Server:
        """Return the server's row."""
        if reading.error is not None:
            seconds = time.monotonic() - reading.error_since_s
            since = f"for {seconds:.0f} s: " if seconds >= 1 else ""
            return Server(self.address, error=f"{since}{reading.error}")
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


@dataclass
class Top:
    """The watched servers, the view, and the console."""

    console: Console
    watches: Sequence[Watch]
    interval_s: float
    by: str | None = None  # the field that connectors are sorted by, the largest first; None: as they are configured

    def once(self, *, as_json: bool) -> bool:
        """Scrape all servers twice, an interval apart, and print the difference; return whether all could be read."""
        scrape_all(self.watches)
        time.sleep(self.interval_s)
        scrape_all(self.watches)
        servers = [watch.row(watch.reading, since_start=False) for watch in self.watches]
        if as_json:
            self.console.file.write(json.dumps(as_dict(servers), allow_nan=False) + "\n")
        else:
            self.console.print(Text("\n").join(picture(servers, self.interval_s, self.console.width)), soft_wrap=True)
        return all(server.error is None for server in servers)

    def run(self) -> None:
        """Show the rows until the user quits; without a terminal, print them in each interval."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._run_on_terminal()
            return
        while True:
            scrape_all(self.watches)
            self.console.print(Text("\n").join([*self._picture(), Text()]), soft_wrap=True)
            time.sleep(self.interval_s)

    def _run_on_terminal(self) -> None:
        for watch in self.watches:
            threading.Thread(target=watch.run, daemon=True).start()
        with keyboard(STDIN) as read, Live(console=self.console, screen=True, auto_refresh=False) as live:
            keys = ""
            while not set(keys) & {"q", "Q", HUNG_UP}:
                for key in keys:
                    step = {"<": -1, ">": 1}.get(key, 0)
                    self.by = SORTS[(SORTS.index(self.by) + step) % len(SORTS)]
                live.update(self._screen(), refresh=True)
                keys = read(LOOK_S)

    def _screen(self) -> Group:
        """Return as many lines as the terminal has, the keys in the last."""
        height = self.console.height
        lines = self._picture(height - 2)
        lines += [*[Text()] * (height - len(lines) - 1), Text(KEYS, style="dim")]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _picture(self, height: int | None = None) -> list[Text]:
        """Return the lines of the last scrapes: since the servers' start until there are two of any server."""
        readings = [watch.reading for watch in self.watches]
        since_start = not any(reading.lately for reading in readings)
        pairs = zip(self.watches, readings, strict=True)
        servers = [watch.row(reading, since_start=since_start) for watch, reading in pairs]
        return picture(servers, self.interval_s, self.console.width, height, self.by)


@contextmanager
def keyboard(fd: int) -> Iterator[Callable[[float], str]]:
    """Take keys without echo inside the ``with`` block: yield a function that waits for some for so many seconds.

    Where ``fd`` is no terminal it only waits. Keys that send an escape sequence have no meaning here.
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
