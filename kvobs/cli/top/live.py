"""The live view: servers are scraped in threads; keys sort, scroll, filter, pause and quit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvobs.cli.top.columns import SORTS
from kvobs.cli.top.keys import HUNG_UP, Keyboard
from kvobs.cli.top.rows import Server, as_dict
from kvobs.cli.top.screen import View, picture, visible
from kvobs.cli.top.servers import Reading, Watch, scrape_all

STDIN = 0
LOOK_S = 0.5
"""Seconds between two draws of the screen, on which ages grow."""
KEYS = "q quit  arrows scroll  / filter  < > sort  r reverse  t since start  p pause"
TYPING = "Enter keeps it, Esc shows all"


_SORTS = {">": 1, "right": 1, "<": -1, "left": -1}
_SCROLLS = {
    **dict.fromkeys(("down", "j"), (1, "row")),
    **dict.fromkeys(("up", "k"), (-1, "row")),
    "page down": (1, "page"),
    "page up": (-1, "page"),
    "end": (1, "all"),
    "home": (-1, "all"),
}
"""Key -> direction, and how far."""


@dataclass
class Top:
    """The watched servers, the view, and the console."""

    console: Console
    watches: Sequence[Watch]
    interval_s: float
    view: View = field(default_factory=View)
    paused: Sequence[Reading] | None = None
    """The rows shown while paused; scrapes continue."""
    is_typing: bool = False
    """Whether keys are the text of the filter."""

    # --- once

    def once(self, *, as_json: bool) -> bool:
        """Scrape all servers twice, an interval apart, and print the difference; return whether all could be read."""
        scrape_all(self.watches)
        time.sleep(self.interval_s)
        scrape_all(self.watches)
        servers = self.rows(since_start=False)
        if as_json:
            self.console.file.write(json.dumps(as_dict(servers), allow_nan=False) + "\n")
        else:
            self.print(servers, since_start=False)
        return all(server.seconds is not None for server in servers)

    def rows(self, *, since_start: bool) -> list[Server]:
        """Return the servers' rows of the last scrapes, or of the pause."""
        pairs = zip(self.watches, self.readings, strict=True)
        return [watch.row(reading, since_start=since_start) for watch, reading in pairs]

    @property
    def readings(self) -> Sequence[Reading]:
        """The scrapes that the rows are computed from."""
        return self.paused or [watch.reading for watch in self.watches]

    def print(self, servers: Sequence[Server], *, since_start: bool) -> None:
        """Print the rows, one time."""
        view = replace(self.view, since_start=since_start, over=self._over(since_start=since_start))
        for line in picture(servers, view, self.console.width):
            self.console.print(line, soft_wrap=True)

    def _over(self, *, since_start: bool) -> str:
        return "since the servers' start" if since_start else f"the last {self.interval_s:g} s"

    # --- continuously

    def run(self) -> None:
        """Show the rows until the user quits; without a terminal, print them in each interval."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._run_on_terminal()
            return
        while True:
            scrape_all(self.watches)
            self.print(self.rows(since_start=self._is_first()), since_start=self._is_first())
            self.console.print()
            time.sleep(self.interval_s)

    def _is_first(self) -> bool:
        """Return whether there are no two scrapes of any server yet."""
        return not any(reading.lately for reading in self.readings)

    def _run_on_terminal(self) -> None:
        for watch in self.watches:
            watch.begin()
        keyboard = Keyboard(STDIN)
        live = Live(console=self.console, screen=True, auto_refresh=False)
        suspension = Suspension()
        with suspension, keyboard, live:
            while True:
                live.update(self.screen(), refresh=True)
                for key in keyboard.read(LOOK_S):
                    if key == HUNG_UP or (key in "qQ" and not self.is_typing):
                        return
                    self.press(key)
                if suspension.is_asked:
                    live.stop()
                    keyboard.release()
                    suspension.wait()
                    keyboard.take()
                    live.start()

    def press(self, key: str) -> None:
        """Handle a key; most do nothing."""
        view = self.view
        if self.is_typing:
            self._type(key)
        elif key == "/":
            self.is_typing = True
        elif key in _SCROLLS:
            self._scroll(key)
        elif key in _SORTS:
            step = _SORTS[key]
            self.view = replace(view, by=SORTS[(SORTS.index(view.by) + step) % len(SORTS)])
        elif key == "r":
            self.view = replace(view, ascending=not view.ascending)
        elif key == "t":
            self.view = replace(view, since_start=not view.since_start)
        elif key == "p":
            self.paused = None if self.paused else self.readings

    def _type(self, key: str) -> None:
        """Handle a key of the filter's text."""
        only = self.view.only
        if key in ("enter", "escape"):
            self.is_typing = False
        if key == "escape":
            only = ""
        elif key == "backspace":
            only = only[:-1]
        elif len(key) == 1 and key.isprintable():
            only += key
        self.view = replace(self.view, only=only, first=0)

    def _scroll(self, key: str) -> None:
        """Move the first row, by a row, a page, or to an end."""
        since_start, size = self._is_since_start, self.console.size
        shown, rows = visible(
            self.rows(since_start=since_start), replace(self.view, since_start=since_start), size.width, size.height - 2
        )
        step = {"row": 1, "page": max(1, len(shown)), "all": rows}[_SCROLLS[key][1]]
        # From the row that is shown: it may be another than the one asked for, once servers are gone.
        self.view = replace(self.view, first=max(0, min(rows - 1, shown.start + _SCROLLS[key][0] * step)))

    @property
    def _is_since_start(self) -> bool:
        return self.view.since_start or self._is_first()

    def screen(self) -> Group:
        """Return the lines to show."""
        since_start = self._is_since_start
        over = self._over(since_start=since_start) + ("   PAUSED" if self.paused else "")
        size = self.console.size
        view = replace(self.view, since_start=since_start, over=over)
        lines = picture(self.rows(since_start=since_start), view, size.width, size.height - 2)
        lines += [Text()] * (size.height - len(lines) - 1)
        if self.is_typing:
            lines.append(Text.assemble(f"/{self.view.only}", ("_", "blink"), (f"   {TYPING}", "dim")))
        else:
            lines.append(Text(KEYS, style="dim"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


class Suspension:
    """Lets Ctrl-Z wait until the terminal is as it was before; inside the ``with`` block."""

    def __init__(self) -> None:
        self.is_asked = False

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_asked = True

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTSTP, self._ask)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, self._before)

    def wait(self) -> None:
        """Stop this process, and return when it is continued."""
        self.is_asked = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._ask)
