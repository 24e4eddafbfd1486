"""Columns are aligned, cut at the edge of a terminal, and whole in a pipe."""

from __future__ import annotations

import io

from rich.cells import cell_len
from rich.console import Console

from kvobs.cli import table

HEADS = ("name", "n", "of")
ROWS = [("a", "1,000", "x" * 40), ("日本", "5", "é")]


def test_texts_are_to_the_left_and_numbers_to_the_right() -> None:
    lines = table.lines(HEADS, ROWS, texts=("name", "of"))
    assert lines == ["name      n  of", "a     1,000  " + "x" * 40, "日本      5  é"]
    assert cell_len(lines[2]) == len(lines[0]) - 1


def test_without_rows_there_is_no_header() -> None:
    assert table.lines(HEADS, [], texts=()) == []


def shown(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=30, force_terminal=is_terminal, color_system=None)
    table.show(console, table.lines(HEADS, [*ROWS, ("[red]", "[/]", ":smile:")], texts=HEADS))
    return file.getvalue()


def test_a_pipe_gets_whole_lines_and_a_terminal_what_it_has_room_for() -> None:
    assert "x" * 40 in shown(is_terminal=False)
    cut = shown(is_terminal=True).splitlines()
    assert max(map(cell_len, cut)) <= 30
    assert cut[1].endswith("x…")


def test_names_are_no_markup() -> None:
    assert "[red]  [/]    :smile:" in shown(is_terminal=False)
