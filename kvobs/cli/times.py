"""Read durations and times as people write them in options."""

import datetime as dt
import math
import re
from contextlib import suppress

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def seconds_of(text: str, option: str) -> float:
    """Return a duration such as 90s, 10m or 2h in seconds."""
    if (match := _DURATION.fullmatch(text)) is None:
        raise typer.BadParameter(f"found {text!r}; use a number with s, m, h or d, such as 10m", param_hint=option)
    return float(match[1]) * _UNITS[match[2] or "s"]


def time_of(text: str, option: str, now_s: float) -> float:
    """Return a time in Unix seconds: ISO 8601 (of this machine's zone without one), Unix time, now, or now-2h."""
    if text == "now":
        return now_s
    if text.startswith("now-") and (match := _DURATION.fullmatch(text.removeprefix("now-"))) is not None:
        return now_s - float(match[1]) * _UNITS[match[2] or "s"]
    with suppress(ValueError):
        if math.isfinite(seconds := float(text)):
            return seconds
    with suppress(ValueError):
        return dt.datetime.fromisoformat(text).timestamp()
    allowed = "use ISO 8601 such as 2026-11-28T18:00, Unix time, now, or now-2h"
    raise typer.BadParameter(f"found {text!r}; {allowed}", param_hint=option)
