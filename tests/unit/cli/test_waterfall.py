"""Lines of a waterfall: times are whole at any width, words have a place, bars lie where their time does."""

import re

import pytest
from rich.console import Console
from rich.text import Text

from kvobs.cli.waterfall import bar, tree
from kvobs.export.load_traces import Part

MS = 10**6
ROWS = [
    Part("request", 1, 0, 10_120_260_000, "cmpl-1"),
    Part("load cpu", 2, 7_350_000, 10_009_110_000, "896 tokens, failed", is_bad=True),
    Part("rank 1", 3, 10_008 * MS, 10_009_250_000, "TimeoutError", is_bad=True),
]


def printed(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tree(Text("a load"), ROWS))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_durations_are_never_cut_and_words_have_a_place() -> None:
    for width in range(24, 121):
        text = printed(width)
        begins = ("7.35", "10.01 s") if width >= 36 else ()
        for time in (*begins, "10.12 s", "10.00 s", "1.25 ms"):
            assert re.search(rf"(^|\s){re.escape(time)}(\s|$)", text, re.MULTILINE), text
        folded = re.sub(r"[\s│├└─]", "", text)
        for word in ("cmpl-1", "failed", "TimeoutError", "rank1"):
            assert word in folded, text
        assert max(map(len, text.splitlines())) <= width


def test_in_a_wide_window_each_has_a_bar() -> None:
    assert (
        printed(80)
        == """\
a load
└── request            0.00  10.12 s  ████████████████  cmpl-1
    └── load cpu       7.35  10.00 s  ████████████████  896 tokens, failed
        └── rank 1  10.01 s  1.25 ms                 █  TimeoutError"""
    )


@pytest.mark.parametrize(
    ("begin", "end", "whole", "expected"),
    [(0, 160, 160, "█" * 16), (0, 80, 160, "█" * 8), (80, 160, 160, " " * 8 + "█" * 8), (0, 0, 160, "█"),
     (160, 160, 160, " " * 15 + "█"), (0, 0, 0, "█")],  # an instant at the end has a place too
)  # fmt: skip
def test_a_bar_lies_where_its_span_does_and_is_never_empty(begin: int, end: int, whole: int, expected: str) -> None:
    assert bar(begin, end, whole) == expected
