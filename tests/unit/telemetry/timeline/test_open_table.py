"""The table holds what has begun and not ended, whatever came before, and never more than there is room for."""

from typing import Any, cast

import hypothesis.strategies as st
from hypothesis import given

from kvobs.cli.timeline.snapshot import rows
from kvobs.telemetry.timeline import open_table
from kvobs.telemetry.timeline.open_table import ROWS, WORDS, OpenTable

keys = st.tuples(st.integers(1, 7), st.integers(0, 2), st.integers(-3, 3))


def table() -> tuple[memoryview, OpenTable]:
    words = memoryview(bytearray((WORDS + 8) * 8)).cast("q")
    return words, OpenTable(words, 5)


def held(words: memoryview) -> list[tuple[int, int, int]]:
    return sorted(rows(words.tolist()[5 : 5 + WORDS]))


@given(st.lists(st.tuples(st.booleans(), keys)))
def test_it_holds_what_has_begun_and_not_ended(events: list[tuple[bool, open_table.Key]]) -> None:
    words, written = table()
    expected = {}
    for start, (is_begin, key) in enumerate(events):
        if is_begin:
            written.begin(key, key[0] << 8 | key[1], start)
            expected[key] = key[0] << 8 | key[1], start, key[2]
        else:
            written.end(key)
            expected.pop(key, None)
        assert held(words) == sorted(expected.values())
    assert words.tolist()[:5] == [0] * 5
    assert words.tolist()[-3:] == [0] * 3, "nothing is written beside it"


def test_a_row_is_free_while_it_is_written() -> None:
    seen: list[list[tuple[int, int, int]]] = []

    class Words(list[int]):
        def __setitem__(self, at: Any, n: Any) -> None:
            super().__setitem__(at, n)
            seen.append(list(rows(self)))

    written = OpenTable(cast("memoryview", Words([0] * WORDS)), 0)
    for start in (5, 6):
        written.begin((3, 0, 7), 3, start)
    assert seen == [[], [], [], [(3, 5, 7)], [], [], [], [(3, 6, 7)]]


def test_what_finds_no_row_is_left_out_and_a_row_that_is_free_again_is_used() -> None:
    words, written = table()
    for request in range(ROWS + 2):
        written.begin((3, 0, request), 3, 1000)
    assert len(held(words)) == ROWS
    written.end((3, 0, ROWS))  # it was left out
    written.end((3, 0, 7))
    written.begin((3, 0, ROWS + 5), 3, 2000)
    found = held(words)
    assert len(found) == ROWS
    assert (3, 2000, ROWS + 5) in found
    assert (3, 1000, 7) not in found


def test_words_beyond_the_last_whole_row_are_not_one() -> None:
    for more in ([], [1], [1, 2]):
        assert list(rows([5, 6, 7, *more])) == [(5, 6, 7)]
