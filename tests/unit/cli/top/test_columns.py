"""Each column fits its width and shows what it is sorted by; what is cut is marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from rich.cells import cell_len

from kvobs.cli.top.columns import LEFT_OUT, OF_SERVERS, SORTS, columns, fit
from kvobs.cli.top.rows import ConnectorRow, Server
from tests.support.top_rows import CHILDREN, SERVERS


@pytest.mark.parametrize("since_start", [True, False])
def test_titles_fit(since_start: bool) -> None:
    for column in columns(since_start=since_start):
        assert max(len(column.title), len(column.unit)) <= column.width
    assert all(len(column.title) <= column.width for column in OF_SERVERS)


@given(CHILDREN, SERVERS)
def test_numbers_fit(child: ConnectorRow, servers: list[Server]) -> None:
    for column in columns(since_start=True):
        if column.by != "stall_s":  # a sum of two, each as long as can be
            assert len(column.show(child)) <= column.width
    for server_column in OF_SERVERS:
        assert all(len(server_column.show(server)) <= server_column.width for server in servers)


def test_what_can_be_left_out_or_sorted_by_is_a_column() -> None:
    fields = [column.by for column in columns(since_start=False)]
    assert len(set(fields)) == len(fields)
    assert set(LEFT_OUT) <= set(fields)
    assert (None, *fields) == SORTS


def test_what_is_cut_ends_with_a_mark() -> None:
    assert [fit(text, 5) for text in ("abc", "abcde", "abcdef", "日本語")] == ["abc  ", "abcde", "abcd…", "日本…"]
    assert cell_len(fit("a日本", 4)) == 4
