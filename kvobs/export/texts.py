"""Write external text safely, and numbers and times in a few characters."""

from kvobs.log import line

LONG_NS = 10 * 10**9


def printable(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are escaped."""
    return line(text, 10_000)


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


def time_of(ns: int) -> str:
    """Return a time in milliseconds, with enough digits to distinguish short calls; from 10 s on in seconds."""
    return f"{ns / 1e9:,.2f} s" if ns >= LONG_NS else f"{ns / 1e6:,.2f}"


def took(ns: int) -> str:
    """Return the same with its unit."""
    return time_of(ns) if ns >= LONG_NS else f"{time_of(ns)} ms"
