"""An error or a warning about a configuration, in parts, and its text: one form for startup and `kvobs check`."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvobs.log import line

_SHOWN_AT_MOST = 80  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning, or what `kvobs check` does not know of a configuration."""

    path: str  # a JSON path, or the names of command line options
    found: str  # what is there, or the problem with it, as a phrase
    allowed: str = ""  # what may be there, if that can be listed
    fix: str = ""  # what to change

    @property
    def says(self) -> str:
        """Return the problem and the allowed values."""
        return f"{self.found}, allowed: {self.allowed}" if self.allowed else self.found

    def __str__(self) -> str:
        """Return the text that users read, without control characters."""
        fix = f". Fix: {self.fix}." if self.fix else ""
        return line(f"{self.path}: {self.says}{fix}", 10_000)


def unknown(kind: str, path: str, key: str, known: Sequence[str], otherwise: str) -> Finding:
    """Return the error of an unknown key; the fix is the most similar known key, if there is one."""
    close = difflib.get_close_matches(key, known, 1, cutoff=0.75)
    return Finding(path, f"unknown {kind}", ", ".join(map(repr, known)), f"use {close[0]!r}" if close else otherwise)


def show(value: Any) -> str:
    """Return a wrong value as text, shortened."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Return text, shortened."""
    return line(text, _SHOWN_AT_MOST)
