"""One result type for all of `make bench`: a measured line, its budget, and the table of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.limit)}"


@dataclass(frozen=True)
class Line:
    """One thing measured, many times over; the budget is about the samples."""

    title: str
    unit: str
    """Of values and baselines."""
    values: Sequence[float]
    baselines: Sequence[float] = ()
    """Of the same rounds."""
    budget: Budget | None = None

    @property
    def samples(self) -> Sequence[float]:
        """Return each round's ratio of the value to the baseline; the values themselves where there is no baseline."""
        if not self.baselines:
            return self.values
        return [value / baseline for value, baseline in zip(self.values, self.baselines, strict=True)]

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
        favourable = self.quartiles[self.budget.at_least]
        return Verdict.IN_NOISE if self.budget.keeps(favourable) else Verdict.MISSED


def against_stock(
    title: str, unit: str, timed: Mapping[str, Callable[[], float]], rounds: int, budget: Budget | None = None
) -> Line:
    """Time "kvobs" and "stock" in turns: what disturbs the machine disturbs both. The first round is for warming up."""
    times: dict[str, list[float]] = {router: [] for router in timed}
    for turn in range(-1, rounds):
        for router in sorted(timed, reverse=bool(turn % 2)):
            spent = timed[router]()
            if turn >= 0:
                times[router].append(spent)
    return Line(title, unit, times["kvobs"], times["stock"], budget)


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


def merged(published: str, parts: Iterable[Part]) -> str:
    """Return what is published with the parts of a later run in the place of those with the same titles."""
    tables = {text.partition("\n")[0]: text for text in re.split(r"(?m)^(?=\*\*)", published) if text.strip()}
    tables |= {f"**{part.title}**": markdown([part]) for part in parts}
    return "\n\n".join(text.strip() for text in tables.values())


def row(line: Line) -> tuple[str | Text, ...]:
    """Return a line's cells. The median and the quartiles are of the samples: ratios where there is a baseline."""
    low, high = line.quartiles
    return (
        f"  {line.title}",
        quantity(line.baselines, line.unit) if line.baselines else "",
        quantity(line.values, line.unit),
        number(line.median),
        f"{number(low)} to {number(high)}",
        "" if line.budget is None else str(line.budget),
        Text(line.verdict, style=STYLES[line.verdict]),
    )


def quantity(values: Sequence[float], unit: str) -> str:
    return f"{number(statistics.median(values))} {unit}".rstrip()


def number(value: float) -> str:
    """Write a number with three digits that count, ratios just above 1 with four, and never as a power of ten."""
    if value == 0:
        return "0"
    decimals = 3 if 1 <= value < 1.1 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
