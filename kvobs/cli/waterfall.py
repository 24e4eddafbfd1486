"""Lines of a waterfall in the terminal: each has a start, a duration and a bar, whose times are never cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvobs.export.load_traces import Part
from kvobs.export.texts import time_of, took

BAR = 16
"""Characters that stand for the whole, where a window has room for them."""
BAR_AT_LEAST = 4
WORDS = 20
"""Characters that a line's words need next to the times."""
TITLE_AT_LEAST = 4
"""Characters of a title that is in one line with its times."""
GUIDE = 4
"""Characters by which rich indents each level of a tree."""


def tree(heading: Text, rows: Sequence[Part]) -> Tree:
    """Return a tree of parts, each followed by the parts under it; bad ones are red."""
    out = Tree(heading, guide_style="dim")
    branches = [out]
    for row, line in zip(rows, lines(rows), strict=True):
        del branches[1 + row.depth :]
        branches.append(branches[-1].add(line))
    return out


def lines(rows: Sequence[Part]) -> Iterator["Line"]:
    """Yield each row as a line whose columns align with the row before, however deep each is."""
    if not rows:
        return
    begin, end = min(row.start_ns for row in rows), max(row.end_ns for row in rows)
    width = max(GUIDE * row.depth + cell_len(row.title) for row in rows)
    times = [(time_of(row.start_ns - begin), took(row.end_ns - row.start_ns)) for row in rows]
    widths = max(len(start) for start, _ in times), max(len(whole) for _, whole in times)
    for row, both in zip(rows, times, strict=True):
        ends = row.start_ns - begin, row.end_ns - begin, end - begin
        yield Line(row, width - GUIDE * row.depth, both, widths, ends)


@dataclass(frozen=True)
class Line:
    """A line of the tree. Its times are never cut: in a narrow window the bar goes first, then its words go below."""

    row: Part
    title_width: int
    times: tuple[str, str]
    widths: tuple[int, int]
    ends: tuple[int, int, int]
    """Start and end of the row, and of the whole, in ns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fixed, words = sum(self.widths) + 2 * len(self.widths), self.row.words
        style = "red" if self.row.is_bad else ""
        if options.max_width < fixed + TITLE_AT_LEAST:
            yield Text(self.row.title, style, overflow="fold")
            yield Text(self.times[1], style)
            yield Text(words, style, overflow="fold")
            return
        title_width = max(1, min(self.title_width, options.max_width - fixed))
        room = options.max_width - fixed - title_width - 2
        bar_width = min(BAR, room - 2 - WORDS)
        if bar_width < BAR_AT_LEAST:
            bar_width = 0
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=title_width, overflow="fold")
        line.add_column(width=self.widths[0], justify="right", no_wrap=True, style="dim")
        line.add_column(width=self.widths[1], justify="right", no_wrap=True)
        cells: list[RenderableType] = [Text(self.row.title), *self.times]
        if bar_width:
            line.add_column(width=bar_width, no_wrap=True, style="" if style else "cyan")
            cells.append(bar(*self.ends, bar_width))
        if room >= WORDS:
            line.add_column(overflow="fold")
            cells.append(Text(words))
        line.add_row(*cells, style=style)
        yield line
        if words and room < WORDS:
            yield Padding(Text(words, style), (0, 0, 0, 2))


def bar(begin: int, end: int, whole: int, width: int = BAR) -> str:
    """Return a bar from begin to end in a line that stands for the whole; never empty."""
    scale = width / (whole or 1)
    first = min(int(begin * scale), width - 1)
    last = max(first + 1, round(end * scale))
    return " " * first + "█" * (last - first)
