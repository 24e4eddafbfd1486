"""Print errors in one line, examples in a help text, and external text without control characters."""

from __future__ import annotations

import typer
from rich.console import Console

from kvobs.log import line


def examples(*commands: str) -> str:
    """Return the end of a command's help, which is not wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def fail(says: str) -> typer.Exit:
    """Print an error in one line; return the exit to raise."""
    Console(stderr=True).print(says, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def warn(says: str) -> None:
    """Print a warning in one line."""
    Console(stderr=True).print(f"warning: {says}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are escaped."""
    return line(text, 10_000)
