"""Durations and times are read as people write them."""

from datetime import datetime

import pytest
import typer

from kvobs.cli.times import seconds_of, time_of


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "10 min", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="use a number with s, m, h or d, such as 10m"):
        seconds_of(text, "--for")


def test_times() -> None:
    assert [time_of(text, "--to", 5000.0) for text in ("now", "now-10m", "1234.5")] == [5000, 4400, 1234.5]
    assert time_of("2026-11-28T18:00:00+00:00", "--to", 0) == 1795888800
    assert time_of("2026-11-28T18:00", "--to", 0) == datetime(2026, 11, 28, 18).timestamp()


@pytest.mark.parametrize("text", ["yesterday", "nan", "inf", "-inf", "1e999"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"found '{text}'; use ISO 8601"):
        time_of(text, "--to", 0)
