"""Print tables as plain lines: cut at a terminal's width, whole in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console


def lines(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[str], gap: int = 2) -> list[str]:
    """Return a header and the rows in aligned columns; without rows no header.

    The columns whose head is in ``texts`` are aligned to the left, others to the right.
    """
    cells = [list(heads), *map(list, rows)]
    if len(cells) == 1:
        return []
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return [
        (" " * gap)
        .join(_padded(cell, width, is_text=head in texts) for head, cell, width in zip(heads, row, widths, strict=True))
        .rstrip()
        for row in cells
    ]


def _padded(cell: str, width: int, *, is_text: bool) -> str:
    space = " " * (width - cell_len(cell))
    return cell + space if is_text else space + cell


def show(console: Console, text: Sequence[str], *, style: str = "") -> None:
    """Print lines, the first one bold; nothing wraps."""
    for i, line in enumerate(text):
        shown = Text(line, style=style or ("bold" if i == 0 else ""))
        if console.is_terminal:
            shown.truncate(console.width, overflow="ellipsis")
        console.print(shown, soft_wrap=True)
