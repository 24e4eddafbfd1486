"""Read single keys from a terminal, and always restore its settings."""

from __future__ import annotations

import os
import re
import select
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self

KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
NAMES = {
    **{f"\x1b{form}{letter}": name for form in "[O" for letter, name in
       {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}.items()},
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[1~": "home", "\x1b[4~": "end", "\x1b": "escape",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip
HUNG_UP = "\x04"
"""The key read from a terminal that is gone: Ctrl-D."""


class Keyboard:
    """Takes keys as they are pressed, without echo, inside the ``with`` block; none where ``fd`` is no terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_terminal = os.isatty(fd)
        self._settings: Any = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self) -> None:
        """Take the terminal."""
        if self._is_terminal:
            self._settings = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)

    def release(self) -> None:
        """Restore the terminal's settings."""
        if self._is_terminal:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._settings)

    def read(self, seconds: float) -> list[str]:
        """Return the keys pressed within this time, as soon as there are any: characters, or names as in ``NAMES``."""
        if not self._is_terminal:
            time.sleep(seconds)
            return []
        if not select.select([self._fd], [], [], seconds)[0]:
            return []
        pressed = os.read(self._fd, 64).decode(errors="replace") or HUNG_UP
        keys = [NAMES.get(key, key) for key in KEY.findall(pressed)]
        # Any other sequence that begins with Escape is a key without a meaning here.
        return [key for key in keys if not key.startswith("\x1b")]
