"""Draw the published figures of a decode step: ``python -m tests.bench.picture``."""

import json
import re
from pathlib import Path

import matplotlib as mpl

from docs import pages
from tests.bench.calls import PURE
from tests.bench.steps import CASES, FIGURES, FLOOR

PAGE = pages.FOLDER / "performance.md"
PICTURE = pages.ROOT / "dashboards/pictures/steps.png"
COLORS = {"kvobs": "#3274d9", "kvobs, exporter": "#8ab8ff", PURE: "#f2cc0c", FLOOR: "#b0b0b0"}
_ROW = r"\| {} \| ([\d.]+) ms \| ([\d.]+) ms \|"


def figures() -> dict[str, dict[str, list[float]]]:
    """Return what is added to a step, in per cent: case -> router -> by the order of ``FIGURES``."""
    page = PAGE.read_text(encoding="utf-8")
    table = page[pages.measured(page, "bench")]
    added: dict[str, dict[str, list[float]]] = {}
    for case in CASES:
        for router in case.routers[1:]:
            rows = [re.search(_ROW.format(re.escape(f"{case.title}, {figure}, {router}")), table) for figure in FIGURES]
            pairs = [(float(row[1]), float(row[2])) for row in rows if row is not None]
            added.setdefault(case.title, {})[router] = [round(100 * (ours / stock - 1), 1) for stock, ours in pairs]
    return added


def describe() -> bytes:
    """Return the figures as they are kept in the picture."""
    return json.dumps(figures()).encode()


def draw(to: Path = PICTURE) -> None:
    """Draw a group of bars for each figure of each case."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(CASES), figsize=(13, 3.4), sharey=True, layout="constrained")
    for axis, case, routers in zip(axes, CASES, figures().values(), strict=True):
        width = 0.8 / len(COLORS)
        for router, added in routers.items():
            i = list(COLORS).index(router)
            at = [group + i * width for group in range(len(added))]
            axis.bar(at, added, width, color=COLORS[router], label=router if axis is axes[2] else None)
        for group, name in enumerate(FIGURES):
            if name in case.budgets:
                limit = 100 * (case.budgets[name] - 1)
                axis.plot([group - width / 2, group + 0.8 - width / 2], [limit, limit], color="#e02f44", linewidth=1.5)
        axis.set_title(case.title, fontsize=10)
        axis.set_xticks([group + width for group in range(len(FIGURES))], FIGURES)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("added to a step of 5 ms, %")
    figure.legend(loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(to, dpi=130, metadata={"Description": describe().decode()})


if __name__ == "__main__":
    draw()
