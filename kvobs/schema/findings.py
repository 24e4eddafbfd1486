"""An error or a warning about a configuration, in parts, and its text: one form for startup and `kvobs check`."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvobs.log import line

_SHOWN_AT_MOST = 80  # characters of a wrong value


class Level(StrEnum):
    """What a finding means for the engine: its start fails, an option has another effect, or nothing is known."""

    MISTAKE = "error"
    WARNING = "warning"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of ``kvobs.schema.kinds``: what is looked at, what is reported, and the fix, with values in braces.

    ``wrong`` is a text with such a finding, ``right`` one without, by default NixlConnector alone. ``elsewhere`` is the
    level where the engine runs in an image, whose vLLM and libraries may be others than those here.
    """

    level: Level
    name: str
    looks_at: str
    says: str
    fix: str
    wrong: str
    right: str = ""
    elsewhere: Level | None = None

    def at(self, path: str, /, allowed: str = "", fix: str | None = None, **values: Any) -> "Finding":
        """Return a finding of this kind; ``fix`` is one that depends on what was found."""
        return Finding(
            path, self.says.format(**values), allowed, self.fix.format(**values) if fix is None else fix, self
        )

    def near(
        self, path: str, key: str, known: Sequence[str], misspelt: "Kind | None" = None, **values: Any
    ) -> "Finding":
        """Return the finding of an unknown name; the fix is the known one that is most like it, if one is.

        That is of the kind ``misspelt``, if it is another one.
        """
        close = difflib.get_close_matches(key, known, 1, cutoff=0.75)
        kind, fix = (misspelt or self, f"use {close[0]!r}") if close else (self, None)
        return kind.at(path, ", ".join(map(repr, known)), fix, **values)


_UNNAMED = Kind(Level.MISTAKE, "", "", "", "", "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning, or what `kvobs check` does not know of a configuration."""

    path: str  # a JSON path, or the names of command line options
    found: str  # what is there, or the problem with it, as a phrase
    allowed: str = ""  # what may be there, if that can be listed
    fix: str = ""  # what to change
    kind: Kind = field(default=_UNNAMED, compare=False, repr=False)  # that of a running server has none

    @property
    def says(self) -> str:
        """Return the problem and the allowed values."""
        return f"{self.found}, allowed: {self.allowed}" if self.allowed else self.found

    def __str__(self) -> str:
        """Return the text that users read, without control characters."""
        fix = f". Fix: {self.fix}." if self.fix else ""
        return line(f"{self.path}: {self.says}{fix}", 10_000)


def show(value: Any) -> str:
    """Return a wrong value as text, shortened."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Return text, shortened."""
    return line(text, _SHOWN_AT_MOST)
