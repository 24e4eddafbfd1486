"""Print errors and examples; write external text safely, and numbers in a few characters."""

import datetime as dt

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
    Console(stderr=True).print(f"warning: {says}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are escaped."""
    return line(text, 10_000)


def count(number: int, thing: str) -> str:
    """Return a number with the name of what is counted, in the plural unless it is 1."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


NONE = "-"
SMALLEST = 0.01
MICROSECOND = 1e-6


def amount(number: float | None) -> str:
    """Write a number in at most six characters."""
    if number is None:
        return NONE
    if 0 < number < SMALLEST:
        return f"<{SMALLEST}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.{_digits(number / size)}f}{suffix}"
    return f"{number:.{_digits(number)}f}"


def signed_amount(number: float | None) -> str:
    """Write a number that may be negative in at most seven characters."""
    return amount(number) if number is None or number >= 0 else f"-{amount(-number)}"


def integer(number: int | None) -> str:
    """Write a whole number in at most five characters."""
    return amount(number) if number is None or number >= 10**4 else str(number)


def _digits(number: float) -> int:
    """Return how many decimals are worth writing."""
    if number == 0 or number >= 9.95:  # noqa: PLR2004
        return 0
    return 1 if number >= 0.995 else 2  # noqa: PLR2004


# From how many seconds on which unit is used: seconds up to ten minutes, minutes up to a hundred.
_UNITS = ((172800, 86400, "d"), (5940, 3600, "h"), (599.5, 60, "min"), (0.9995, 1, "s"), (9.995e-4, 1e-3, "ms"))


def duration(seconds: float | None) -> str:
    """Write a duration in at most six characters."""
    if seconds is None:
        return NONE
    for least, size, unit in _UNITS:
        if seconds >= least:
            return f"{seconds / size:.{0 if unit == 'min' else _digits(seconds / size)}f} {unit}"
    if 0 < seconds < MICROSECOND:
        return "<1 us"
    return f"{seconds / MICROSECOND:.0f} us" if seconds else "0"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def clock(ns: int) -> str:
    """Write a time since the epoch in this machine's time zone, to the millisecond."""
    return dt.datetime.fromtimestamp(ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
