"""Draw what memory a soak took, over the requests it served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from tests.soak.memory import MIB, Sample, warm
from tests.soak.report import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, PANEL, FRAME = 10.0, 2.4, 0.6
INK, PALE = "#22303c", "#e3e8ec"
COLOURS = ("#2a7fb8", "#d98a1f", "#5b9a5b", "#8a5fb0")


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the picture as a PNG: resident memory of each part, and Python's objects where they are known."""
    panels: list[tuple[str, str, Mapping[str, Sequence[Sample]], Callable[[Sample], float]]] = []
    for result in results:
        panels.append((f"{result.title}: resident memory", "MiB", result.memory, lambda s: s.resident / MIB))
        if any(s.objects for samples in result.memory.values() for s in samples):
            panels.append((f"{result.title}: Python objects", "thousands", result.memory, lambda s: s.objects / 1000))
    figure = Figure(figsize=(WIDTH, PANEL * len(panels) + FRAME))
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1)
    figure.suptitle("Memory under soak", x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    for axes, (title, unit, memory, value) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_panel(axes, memory, value)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)
        axes.set_ylabel(unit, fontsize=9, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")


def _draw_panel(axes: Axes, memory: Mapping[str, Sequence[Sample]], value: Callable[[Sample], float]) -> None:
    for i, (who, samples) in enumerate(memory.items()):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot([s.requests for s in samples], [value(s) for s in samples], color=colour, linewidth=1, alpha=0.35)
        flat = warm(samples)
        axes.plot([s.requests for s in flat], [value(s) for s in flat], color=colour, linewidth=2, label=who)
    axes.set_ylim(0, 1.15 * max(value(s) for samples in memory.values() for s in samples))
    axes.set_xlabel("requests; pale: warming up", fontsize=9, color=INK)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, labelcolor=INK)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
