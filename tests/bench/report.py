"""One result type for all of `make bench`: a measured line, its budget, and the table of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table
from rich.text import Text

from docs import pages


class Verdict(StrEnum):
    """What a line says about its budget."""

    NONE = ""
    MET = "ok"
    IN_NOISE = "over, in the noise"
    MISSED = "MISSED"


STYLES = {Verdict.NONE: "dim", Verdict.MET: "green", Verdict.IN_NOISE: "yellow", Verdict.MISSED: "bold red"}


@dataclass(frozen=True)
class Budget:
    """A limit that a median must keep: at most, or at least."""

    limit: float
    at_least: bool = False

    def keeps(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def favourable(self, low: float, high: float) -> float:
        """Return the one of two values that is better."""
        return high if self.at_least else low

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.limit)}"


@dataclass(frozen=True)
class Line:
    """One thing measured, many times over.

    With a baseline the samples are ratios, each of the measured value to the baseline's in the same round; without one
    they are measured values. The budget is about the samples.
    """

    title: str
    unit: str
    """Of `baseline` and `measured`."""
    measured: float
    samples: tuple[float, ...]
    baseline: float | None = None
    budget: Budget | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the lower and the upper quartile of the samples."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def verdict(self) -> Verdict:
        """Judge the median; a budget that even the favourable quartile misses is missed by more than the noise."""
        if self.budget is None:
            return Verdict.NONE
        if self.budget.keeps(self.median):
            return Verdict.MET
        best = self.budget.favourable(*self.quartiles)
        return Verdict.IN_NOISE if self.budget.keeps(best) else Verdict.MISSED

    @property
    def missed(self) -> bool:
        return self.verdict is Verdict.MISSED


@dataclass(frozen=True)
class Part:
    """The lines of one part of the benchmark, and what they have in common."""

    title: str
    lines: Sequence[Line]


def table(parts: Iterable[Part]) -> Table:
    """Show every line, part by part."""
    shown = Table(title="What kvobs costs", title_justify="left", title_style="bold", pad_edge=False)
    shown.add_column("")
    for heading in ("baseline", "measured", "median", "quartiles", "budget"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("verdict")
    for part in parts:
        shown.add_section()
        shown.add_row(Text(part.title, style="bold"))
        for line in part.lines:
            shown.add_row(*row(line))
    return shown


def markdown(parts: Iterable[Part]) -> str:
    """Return the same as Markdown: a table for each part under its title."""
    head = ["", "baseline", "measured", "median", "quartiles", "budget", "verdict"]
    tables = (
        f"**{part.title}**\n\n" + pages.table(head, [[str(cell).strip() for cell in row(line)] for line in part.lines])
        for part in parts
    )
    return "\n\n".join(tables)


def row(line: Line) -> tuple[str | Text, ...]:
    """Return a line's cells. The median and the quartiles are of the samples: ratios where there is a baseline."""
    low, high = line.quartiles
    return (
        f"  {line.title}",
        "" if line.baseline is None else quantity(line.baseline, line.unit),
        quantity(line.measured, line.unit),
        number(line.median),
        f"{number(low)} to {number(high)}",
        "" if line.budget is None else str(line.budget),
        Text(line.verdict, style=STYLES[line.verdict]),
    )


def quantity(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def number(value: float) -> str:
    """Write a number with three digits that count, and never as a power of ten."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
