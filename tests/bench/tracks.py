"""Draw a part of a timeline, as ``kvobs timeline`` writes it: ``python -m tests.bench.tracks FILE OUT.png FROM TO``.

For pictures that need no browser; Perfetto shows more. FROM and TO are in milliseconds of the file's own time.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

INK, PALE = "#22303c", "#e3e8ec"
COLOURS = {
    "call": "#5b8db8",
    "step": "#aab7c4",
    "load": "#2f9e77",
    "save": "#c98a2b",
    "lookup": "#8a6fb0",
    "resume": "#b0b86f",
}
ROW, FRAME, WIDTH = 0.26, 1.1, 11.0
LABELLED = 0.06  # of the width: slices that are longer have their name in them
Event = dict[str, Any]


class Row(NamedTuple):
    """One line of the picture: a process, a track, and what it shows."""

    pid: int
    place: tuple[int, str]
    label: str


def draw(events: list[Event], path: Path, begin: float, end: float) -> None:
    """Write the picture of what lies between two times, in microseconds."""
    names = {(e["pid"], e.get("tid"), e["name"]): e["args"]["name"] for e in events if "name" in e.get("args", {})}
    spans = _spans(events)
    bars: dict[Row, list[tuple[float, float, str, str]]] = defaultdict(list)
    for event in (*events, *spans):
        until = event["ts"] + event["dur"] if event["ph"] == "X" else 0
        if event["ph"] != "X" or until < begin or event["ts"] > end:
            continue
        track = names[event["pid"], event["tid"], "thread_name"]
        kind = event.get("cat", "call" if event["tid"] else "step")
        label = track if kind in ("call", "step") else f"{track}: {kind}s"
        row = Row(event["pid"], (event["tid"] if kind in ("call", "step") else 500 + event["tid"], kind), label)
        bars[row].append((max(begin, event["ts"]), min(end, until), event["name"], kind))
    rows = sorted(bars)
    figure = Figure(figsize=(WIDTH, FRAME + ROW * (len(rows) + len({row.pid for row in rows}))))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    heights, at, pid = {}, 0.0, 0
    for row in rows:
        if row.pid != pid:
            pid = row.pid
            axes.text(0, at + 0.15, names[pid, None, "process_name"].partition(",")[0], fontweight="bold", color=INK)
            at += 1
        heights[row] = at
        _draw_row(axes, at, [((a - begin) / 1e3, (b - begin) / 1e3, *more) for a, b, *more in bars[row]], end - begin)
        at += 1
    own = {row.pid: heights[row] for row in rows if row.place[0] == 0}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    for start in (e for e in events if e["ph"] == "s"):
        finish = ends[start["id"]]
        if begin <= start["ts"] and finish["ts"] <= end:
            tail, tip = (((e["ts"] - begin) / 1e3, own[e["pid"]]) for e in (start, finish))
            style = {"arrowstyle": "-|>", "color": COLOURS[start["cat"]], "lw": 1, "shrinkA": 2, "shrinkB": 2}
            axes.annotate("", xy=tip, xytext=tail, arrowprops={**style, "connectionstyle": "arc3,rad=-0.15"}, zorder=5)
    axes.set_yticks([heights[row] for row in rows], [row.label for row in rows], fontsize=8, color=INK)
    axes.set(xlim=(0, (end - begin) / 1e3), ylim=(at - 0.4, -0.9), xlabel="ms")
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="x", color=PALE)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=130)


def _spans(events: list[Event]) -> list[Event]:
    """Return lookups, loads, saves and resumptions as slices."""
    opened = {(e["pid"], e["id2"]["local"]): e for e in events if e["ph"] == "b"}
    ended = [(opened[e["pid"], e["id2"]["local"]], e["ts"]) for e in events if e["ph"] == "e"]
    return [{**begun, "ph": "X", "dur": until - begun["ts"]} for begun, until in ended]


def _draw_row(axes: Any, at: float, bars: list[tuple[Any, ...]], width: float) -> None:
    """Draw a track's bars; those that overlap share its height."""
    lanes: list[float] = []
    placed = []
    for begin, end, name, kind in sorted(bars):
        lane = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[lane:] = [end, *lanes[lane + 1 :]]
        placed.append((begin, end, name, kind, lane))
    height = 0.8 / len(lanes)
    for begin, end, name, kind, lane in placed:
        y = at - 0.4 + (lane + 0.5) * height
        axes.barh(y, end - begin, height * 0.92, left=begin, color=COLOURS[kind], lw=0.7, edgecolor=COLOURS[kind])
        if end - begin > LABELLED * width / 1e3 and len(lanes) == 1:
            axes.text((begin + end) / 2, y, name, ha="center", va="center", fontsize=6.5, color="white", clip_on=True)


def main() -> None:
    source, target, begin, end = sys.argv[1:]
    content = Path(source).read_bytes()
    content = gzip.decompress(content) if source.endswith(".gz") else content
    draw(json.loads(content)["traceEvents"], Path(target), float(begin) * 1e3, float(end) * 1e3)


if __name__ == "__main__":
    main()
