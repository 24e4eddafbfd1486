"""Open series are rows of a page: bounded, readable while they are written, whatever their values are."""

import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from kvobs.page.layout import ROW, ROW_COUNT, ROW_KEY, ROW_LENGTH, ROW_TEXT, ROWS, TEXT, Layout
from kvobs.page.rows import Key, RowReader, Rows
from kvobs.schema.signals import (
    CALL_ERRORS,
    CORRUPT_BLOCKS,
    DYNAMIC_COUNTERS,
    OTHER_VALUE,
    PEER_LOADS,
    SERIES_AT_MOST,
    SLOWEST_RANK,
)

CONNECTORS = 2


class Both:
    """The rows of a page, with their reader."""

    def __init__(self) -> None:
        self.at = Layout(CONNECTORS)
        self.words = memoryview(bytearray(8 * self.at.words)).cast("q")
        self.rows = Rows(self.words, self.at)
        self.add = self.rows.add

    @property
    def array(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        return np.frombuffer(self.words, np.int64, self.at.row_count * ROW, 8 * self.at.rows).reshape(-1, ROW)

    def read(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for key, n in RowReader(self.array, CONNECTORS).read():
            found[key] = found.get(key, 0) + n
        return found


values = st.text(max_size=8)
added = st.tuples(
    st.sampled_from(DYNAMIC_COUNTERS),
    st.integers(0, CONNECTORS - 1),
    st.lists(values, min_size=3, max_size=3),
    st.integers(1, 9),
)


@given(st.lists(added, max_size=20))
@example([(CALL_ERRORS, 0, ["", "", ""], 1)])
@example([(CALL_ERRORS, 1, ["wait_for_save", "\0", ""], 1), (CALL_ERRORS, 1, ["wait_for_save", "", ""], 2)])
@example([(CALL_ERRORS, 1, ["Ключ", "错误\udcff", ""], 1)])
def test_what_is_added_is_read(events: list[tuple[object, int, list[str], int]]) -> None:
    both, expected = Both(), dict[Key, int]()
    for signal, index, texts, n in events:
        labels = tuple(texts[: len(signal.labels)])  # type: ignore[attr-defined]
        both.add(signal, index, labels, n)  # type: ignore[arg-type]
        shown = tuple(text.replace("\0", "").encode(errors="replace").decode() for text in labels)
        key: Key = signal, index, shown  # type: ignore[assignment]
        expected[key] = expected.get(key, 0) + n
    assert both.read() == expected


@given(st.tuples(*[st.integers(0, 400)] * 2), st.sampled_from("aé错🙂"))
def test_values_that_are_too_long_are_cut_and_none_is_lost(lengths: tuple[int, int], letter: str) -> None:
    both, texts = Both(), tuple(letter * n for n in lengths)
    both.add(PEER_LOADS, 0, texts, 3)
    (((_, _, shown), n),) = both.read().items()
    assert n == 3
    room = TEXT - 1 if sum(len(text.encode()) for text in texts) < TEXT else TEXT // 2 - 1
    for text, found in zip(texts, shown, strict=True):
        assert text.startswith(found)
        assert len(found.encode()) >= min(len(text.encode()), room - 3)


def test_a_signals_series_of_a_connector_are_bounded() -> None:
    both = Both()
    for i in range(SERIES_AT_MOST + 5):
        both.add(CALL_ERRORS, 0, ("wait_for_save", f"Error{i}"), 1)
        both.add(CALL_ERRORS, 0, ("wait_for_save", "Error0"), 1)
    both.add(CALL_ERRORS, 1, ("wait_for_save", "Late"), 1)
    found = both.read()
    assert found.pop((CALL_ERRORS, 1, ("wait_for_save", "Late"))) == 1, "another connector has its own"
    assert found.pop((CALL_ERRORS, 0, (OTHER_VALUE, OTHER_VALUE))) == 5
    assert found.pop((CALL_ERRORS, 0, ("wait_for_save", "Error0"))) == SERIES_AT_MOST + 6
    assert len(found) == SERIES_AT_MOST - 1
    assert set(found.values()) == {1}
    assert both.rows.known(CALL_ERRORS) == SERIES_AT_MOST + 2


def test_a_full_table_has_a_row_for_further_values_per_connector() -> None:
    both, n = Both(), 0
    for signal in (PEER_LOADS, CALL_ERRORS, CORRUPT_BLOCKS):
        for index in range(CONNECTORS):
            for i in range(SERIES_AT_MOST):
                both.add(signal, index, (f"v{i}",) * len(signal.labels), 1)
                n += 1
    for index in range(CONNECTORS):
        both.add(SLOWEST_RANK, index, ("7",), index + 1)
    found = both.read()
    assert n > ROWS
    assert sum(found.values()) == n + 3, "none is lost"
    assert [found[SLOWEST_RANK, index, (OTHER_VALUE,)] for index in range(CONNECTORS)] == [1, 2]
    assert len(both.rows._at) < n, "values that go to _OTHER take no memory"


@pytest.mark.usefixtures("hasty_threads")
def test_threads_that_add_the_same_new_series_begin_one_row() -> None:
    both, names, n = Both(), [f"peer{i}" for i in range(20)], 200
    start = threading.Barrier(5)

    def add() -> None:
        start.wait()
        for _ in range(n):
            for name in names:
                both.add(PEER_LOADS, 1, (name, "ok"), 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        both.read()
    assert both.read() == {(PEER_LOADS, 1, (name, "ok")): 4 * n for name in names}
    assert (both.array[:, ROW_LENGTH] > 0).sum() == len(names)


def test_a_row_that_is_half_written_is_not_read() -> None:
    both = Both()
    both.add(CALL_ERRORS, 1, ("wait_for_save", "OSError"), 4)
    (at,) = np.flatnonzero(both.array[:, ROW_LENGTH])
    whole = both.array[at].copy()
    for missing in (ROW_LENGTH, ROW_COUNT):
        both.words[both.at.rows + int(at) * ROW + missing] = 0
        assert both.read() == {}
        both.words[both.at.rows + int(at) * ROW + missing] = int(whole[missing])
    assert list(both.read().values()) == [4]


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [
        (ROW_KEY, -1, []),
        (ROW_KEY, 2**62, []),
        (ROW_KEY, CONNECTORS, []),
        (ROW_COUNT, -1, []),
        (ROW_LENGTH, -5, []),
        (ROW_LENGTH, 2, []),
        (ROW_LENGTH, 3, [("a", "")]),
        (ROW_LENGTH, 2**62, []),
        (ROW_TEXT, 0x2020202020202020, []),
    ],
)
def test_of_a_damaged_row_only_values_of_its_signal_are_read(word: int, value: int, expected: list[Any]) -> None:
    both = Both()
    both.add(CALL_ERRORS, 0, ("a", "b"), 1)
    (at,) = np.flatnonzero(both.array[:, ROW_LENGTH])
    both.words[both.at.rows + int(at) * ROW + word] = value
    assert [values for _, _, values in both.read()] == expected
