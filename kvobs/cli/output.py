"""Print errors and examples; write counts and times of day."""

import datetime as dt

import typer
from rich.console import Console


def examples(*commands: str) -> str:
    """Return the end of a command's help, which is not wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def fail(says: str) -> typer.Exit:
    """Print an error in one line; return the exit to raise."""
    Console(stderr=True).print(says, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def warn(says: str) -> None:
    Console(stderr=True).print(f"warning: {says}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def count(number: int, thing: str) -> str:
    """Return a number with the name of what is counted, in the plural unless it is 1."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def clock(ns: int) -> str:
    """Write a time since the epoch in this machine's time zone, to the millisecond."""
    return dt.datetime.fromtimestamp(ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
