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

SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|)")
ARROWS = {"\x1b[C": ">", "\x1bOC": ">", "\x1b[D": "<", "\x1bOD": "<"}
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

    def read(self, seconds: float) -> str:
        """Return the keys pressed within this time, as soon as there are any; right and left arrow are > and <."""
        if not self._is_terminal:
            time.sleep(seconds)
            return ""
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._fd, 64).decode(errors="replace") or HUNG_UP
        # Any other sequence that begins with Escape is a key without a meaning here.
        return SEQUENCE.sub(lambda found: ARROWS.get(found[0], ""), pressed)
