"""Draw what `make bench` measured: a row for each line, all its samples, and its budget."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from tests.bench.report import Line, Part, Verdict, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 10.0
ROW = 0.36
FRAME = 1.0
LEGEND = 0.8
"""Inches: of the picture, of a row, of a panel's title and axis, of the picture's title and legend."""

LOG_FROM = 5.0
"""Spread, largest to smallest, from which a panel has a logarithmic axis."""

FENCE = 3.0
"""Distances between the quartiles that a sample may be off them; farther ones stand at the edge, as arrows."""

COLOURS = {
    Verdict.NONE: "#8793a0",
    Verdict.MET: "#2a7fb8",
    Verdict.IN_NOISE: "#d98a1f",
    Verdict.MISSED: "#c8372d",
}
INK, PALE = "#22303c", "#e3e8ec"

OF_BASELINE, OF_BUDGET = "times the baseline", "times the budget"


class Panel(NamedTuple):
    """Lines of one part on one axis."""

    title: str
    axis: str
    lines: Sequence[Line]


def draw(parts: Iterable[Part], path: Path) -> None:
    """Write the picture as a PNG."""
    panels = [panel for part in parts for panel in panels_of(part)]
    heights = [FRAME + ROW * len(panel.lines) for panel in panels]
    # Not by way of pyplot: without it nothing asks for a screen, and the backend is the one that writes the file.
    figure = Figure(figsize=(WIDTH, sum(heights) + LEGEND))
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1)
    figure.suptitle("What kvobs costs", x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.legend(handles=legend(panels), loc="outside lower left", ncols=7, frameon=False, fontsize=9, labelcolor=INK)
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        draw_panel(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")


def panels_of(part: Part) -> Iterator[Panel]:
    """Put lines together that one axis can show: ratios, values against their budgets, values of one unit."""
    by_axis: dict[str, list[Line]] = {}
    for line in part.lines:
        by_axis.setdefault(axis_of(line), []).append(line)
    for axis, lines in by_axis.items():
        yield Panel(part.title, axis, lines)


def axis_of(line: Line) -> str:
    if line.baseline is not None:
        return OF_BASELINE
    return line.unit if line.budget is None else OF_BUDGET


def scale_of(line: Line) -> float:
    """Return what a line's samples are divided by to be on its axis."""
    return line.budget.limit if line.budget and axis_of(line) == OF_BUDGET else 1.0


def draw_panel(axes: Axes, panel: Panel) -> None:
    left, right = range_of(panel)
    ticks = axes.xaxis
    if left > 0 and right / left > LOG_FROM:
        axes.set_xscale("log")
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(lambda x, _: f"{x:g}")
    if panel.axis == OF_BASELINE:
        axes.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
    for y, line in enumerate(panel.lines):
        draw_line(axes, y, line, left, right)
    axes.set_yticks(range(len(panel.lines)), [line.title for line in panel.lines])
    axes.set_ylim(len(panel.lines) - 0.4, -0.6)
    axes.set_xlabel(panel.axis, fontsize=9, color=INK)
    axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def range_of(panel: Panel) -> tuple[float, float]:
    """Return the smallest and the largest number to show: a single disturbed round must not squeeze all others."""
    shown = [line.budget.limit / scale_of(line) for line in panel.lines if line.budget]
    for line in panel.lines:
        low, high = line.quartiles
        reach = FENCE * (high - low)
        shown += [x / scale_of(line) for x in line.samples if low - reach <= x <= high + reach]
    return min(shown), max(shown)


def draw_line(axes: Axes, y: int, line: Line, left: float, right: float) -> None:
    """Draw the samples, the quartiles as a bar with the median in it, the budget, and the median in figures."""
    colour, scale = COLOURS[line.verdict], scale_of(line)
    jitter = random.Random(line.title)
    for sample in line.samples:
        x = min(max(sample / scale, left), right)
        mark, size = ("o", 3) if x == sample / scale else ("<" if x == left else ">", 5)
        axes.plot([x], [y + jitter.uniform(-0.25, 0.25)], mark, color=colour, alpha=0.4, markersize=size, mew=0)
    low, high = line.quartiles
    axes.plot([low / scale, high / scale], [y, y], color=colour, linewidth=5, solid_capstyle="butt")
    axes.plot([line.median / scale], [y], "o", color=colour, markerfacecolor="white", markersize=5.5, markeredgewidth=2)
    if line.budget:
        limit, allowed = line.budget.limit / scale, ">" if line.budget.at_least else "<"
        axes.plot([limit, limit], [y - 0.32, y + 0.32], color=INK, linewidth=1.6)
        axes.plot([limit], [y - 0.32], allowed, color=INK, markersize=4.5)
    text = f"{quantity(line.median, '' if line.baseline else line.unit)}  {line.verdict}"
    axes.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=colour)


def legend(panels: Iterable[Panel]) -> list[Line2D]:
    """Explain the marks, and the colours that are in the picture."""
    seen = {line.verdict for panel in panels for line in panel.lines}
    return [
        Line2D([], [], color=INK, alpha=0.4, linewidth=0, marker="o", markersize=3, label="a round"),
        Line2D([], [], color=INK, linewidth=5, marker="o", markerfacecolor="white", label="median, quartiles"),
        Line2D([], [], color=INK, linewidth=0, marker="|", markersize=11, mew=1.6, label="budget, flag: better"),
        *(
            Line2D([], [], color=COLOURS[verdict], linewidth=5, label=verdict or "no budget")
            for verdict in Verdict
            if verdict in seen
        ),
    ]
