"""Whatever the numbers, names and window: nothing runs over its edges, nothing is left out unmarked."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings
from rich.cells import cell_len

from kvobs.cli.top.rows import ConnectorRow, Server
from kvobs.cli.top.screen import LEFT_OUT, OF_SERVERS, SORTS, columns, fit, picture
from tests.support.top_rows import SERVERS


@pytest.mark.parametrize("since_start", [True, False])
def test_titles_fit_and_columns_that_can_be_left_out_or_sorted_by_exist(since_start: bool) -> None:
    fields = [column.by for column in columns(since_start=since_start)]
    assert set(LEFT_OUT) <= set(fields)
    assert (None, *dict.fromkeys(fields)) == SORTS
    for column in columns(since_start=since_start):
        assert max(len(column.title), len(column.unit)) <= column.width
    assert all(len(column.title) <= column.width for column in OF_SERVERS)


def test_a_cut_text_ends_with_a_mark() -> None:
    line = shown([replace(SERVER, address="a" * 50, model="m" * 50)], 80).splitlines()[3]
    assert (line.count("…"), len(line) <= 80) == (2, True)
    texts = ("abc", "abcde", "abcdef", "日本語", "a日本日")
    assert [fit(text, 5) for text in texts] == ["abc  ", "abcde", "abcd…", "日本…", "a日 …"]


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))  # what it finds is small enough
@given(SERVERS, st.sampled_from(SORTS), st.integers(80, 200), st.integers(16, 60))
def test_all_lines_fit_and_no_connector_is_lost(servers: list[Server], by: str | None, width: int, height: int) -> None:
    """Nor is a number wider than its column."""
    for server in servers:
        assert all(len(column.show(server)) <= column.width for column in OF_SERVERS)
        for row in server.connectors:
            columns_of = [column for column in columns(since_start=True) if column.by != "stall_s"]  # a sum of two
            assert all(len(column.show(row)) <= column.width for column in columns_of)
    names = iter(range(10**4, 10**5))
    servers = [
        replace(server, connectors=tuple(replace(row, connector=f"@{next(names)}") for row in server.connectors))
        for server in servers
    ]
    lines = [line.plain for line in picture(servers, 2, width, height, by)]
    assert len(lines) <= height
    # The terminal cuts the title and the errors.
    errors = [f"  {server.error}" for server in servers if server.error]
    for line in lines[1:]:
        assert cell_len(line) <= width or line.endswith(tuple(errors))
    left_out = re.fullmatch(r"and (\d+) more connectors", lines[-1])
    listed, n = sum(line.count("@") for line in lines), sum(len(server.connectors) for server in servers)
    assert listed + int(left_out[1] if left_out else 0) == n


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))
@given(SERVERS, st.integers(1, 79))
def test_narrow_windows_show_less(servers: list[Server], width: int) -> None:
    """The terminal cuts what is too wide; servers leave out columns, but not kvobs's errors."""
    lines = [line.plain for line in picture(servers, 2, width)]
    assert "server" in lines[2]
    assert lines[2].endswith("errors in it")
    for line, server in zip(lines[3:], servers, strict=False):
        assert server.error or cell_len(line) <= max(width, 35)


CPU = ConnectorRow(
    "0", "cpu", "OffloadingConnector", lookups=20, hit_share=0.25, loads=5, load_tokens=7168, load_bytes=3e9,
    unused_tokens=0, load_p50_s=0.03, load_p99_s=0.067, scheduler_s=0.045, load_stall_s=0.001, save_stall_s=0.0004,
    gain_s=0.52, failed_loads=0, exceptions=0, skew_p99_s=0.12, slowest_rank="3", slowest_rank_share=0.92,
    loads_open=2, saves_held=3, oldest_s=1.25, quarantined=False, call=None, call_s=None,
)  # fmt: skip
DISK = replace(
    CPU, connector="disk", exceptions=2, quarantined=True, skew_p99_s=None, slowest_rank=None, slowest_rank_share=None,
    saves_held=0, state="Quarantined", gain_s=-0.05,
)  # fmt: skip
SERVER = Server("localhost:8000", None, "tiny", "0.32.0", "0.1.0", 2.0, 0.0003, 0, 12, 340, 0.08, 2.4, (CPU, DISK))


def shown(servers: list[Server], width: int) -> str:
    return "".join(f"{line.plain.rstrip()}\n" for line in picture(servers, 2, width))


def test_at_80_columns_a_second_line_has_the_rest() -> None:
    assert shown([SERVER], 80) == (
        "kvobs top   the last 2 s   as configured\n"
        "\n"
        "server          model   run  wait TTFT p50    p99 telemetry errors in it\n"
        "localhost:8000  tiny     12   340    80 ms  2.4 s  300 us/s            0\n"
        "\n"
        "connector  hits tokens  bytes   load   load  sched  stall loads oldest errors\n"
        "                    /s     /s    p50    p99   busy   ms/s  open            /s\n"
        "cpu        25 %   7.2k   3.0G  30 ms  67 ms    4 %    1.4     2  1.2 s      0\n"
        "  gain 0.52, slowest rank 3 (92 %), skew p99 120 ms, saves held 3\n"
        "disk       25 %   7.2k   3.0G  30 ms  67 ms    4 %    1.4     2  1.2 s    2.0\n"
        "  Quarantined, gain -0.05\n"
    )


def test_reuse_is_below_a_single_server() -> None:
    server = replace(SERVER, seen_share=0.4, half_within_tokens=131_072, local_cache_tokens=524_288)
    line = "40 % of the prompts' tokens were used before, half of them within 131k tokens; vLLM's own cache has 524k"
    assert shown([server], 120).splitlines()[4] == line
    assert "used before" not in shown([server, server], 200)


def test_with_room_all_is_in_columns() -> None:
    lines = shown([SERVER], 160).splitlines()
    assert lines[2].split()[:6] == ["server", "model", "vLLM", "kvobs", "run", "wait"]
    assert lines[5].split() == [
        "connector", "hits", "lookups", "tokens", "bytes", "unused", "loads", "load", "load", "sched", "stall", "gain",
        "loads", "saves", "oldest", "skew", "slowest", "errors",
    ]  # fmt: skip
    numbers = "cpu 25 % 20 7.2k 3.0G 0 5.0 30 ms 67 ms 4 % 1.4 0.52 2 3 1.2 s 120 ms 3 (92 %) 0"
    assert " ".join(lines[7].split()) == numbers
    assert lines[9].split() == ["Quarantined"]
    text = shown([replace(SERVER, seconds=None)], 160)
    assert ("/s" in text, "1.4 ms" in text) == (False, True), "totals are no rates"


def test_what_has_no_column_is_below_its_connector_in_as_many_lines_as_it_takes() -> None:
    busy = replace(CPU, connector="c" * 30, unused_tokens=88.0, state="Quarantined")
    assert shown([replace(SERVER, connectors=(busy,))], 80).splitlines()[7:] == [
        "c" * 18 + "…  25 %   7.2k  30 ms  67 ms    4 %    1.4     2  1.2 s      0",
        "  Quarantined, gain 0.52, slowest rank 3 (92 %), skew p99 120 ms",
        "  88 tokens/s unused, saves held 3, 3.0G bytes/s",
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (replace(CPU, state="Hangs", state_by="load", state_value=20.0), "  Hangs: load for 20 s, gain 0.52, "),
        (
            replace(CPU, state="Hangs", state_by="call", state_value=20.0, call="wait_for_save on rank 1", call_s=20.0),
            "  Hangs: call for 20 s, in wait_for_save on rank 1, gain 0.52",
        ),
        (replace(CPU, state="OK", call="lookup on rank 1", call_s=2), "  in lookup on rank 1 for 2.0 s, gain 0.52, "),
        (replace(CPU, state="Slow"), "  Slow, gain 0.52, "),
    ],
)
def test_a_state_is_told_with_its_age_where_something_hangs(row: ConnectorRow, says: str) -> None:
    assert shown([replace(SERVER, connectors=(row,))], 80).splitlines()[8].startswith(says)


def test_of_several_servers_each_has_a_number() -> None:
    down = Server("localhost:8001", error="for 12 s: no answer: Connection refused")
    two = replace(SERVER, address="localhost:8002", connectors=(replace(CPU, engine="0"), replace(CPU, engine="1")))
    lines = shown([SERVER, down, two], 80).splitlines()
    assert lines[4] == " 2 localhost:8001  for 12 s: no answer: Connection refused"
    assert [line.split()[:3] for line in lines if re.match(r" \d +\d ", line)] == [
        ["1", "0", "cpu"], ["1", "0", "disk"], ["3", "0", "cpu"], ["3", "1", "cpu"]
    ]  # fmt: skip


def test_sorted_by_a_column_the_title_names_it_and_the_column_stands_out() -> None:
    lines = picture([SERVER], 2, 80, by="errors")
    assert "by errors, largest first" in lines[0].plain
    assert [line.plain[:4] for line in lines[7:]] == ["disk", "  Qu", "cpu ", "  ga"]
    (column,) = [span for span in lines[5].spans if span.style == "reverse"]
    assert lines[5].plain[column.start : column.end].strip() == "errors"


def test_many_servers_leave_room_for_connectors_and_those_that_are_down_come_first() -> None:
    lines = [line.plain for line in picture([*[SERVER] * 30, Server("down:8000", error="no answer")], 2, 80, 24)]
    assert len(lines) <= 24
    assert any(line.startswith("31 down:8000") for line in lines)
    assert "and 26 more servers" in lines
    assert re.fullmatch(r"and 5\d more connectors", lines[-1])


def test_lines_below_a_connector_are_as_long_as_they_look() -> None:
    """Wide characters take two columns."""
    for n in range(1, 40):
        lines = shown([replace(SERVER, connectors=(replace(DISK, call="日" * n, call_s=9.0),))], 80).splitlines()
        assert all(cell_len(line) <= 80 for line in lines[1:])
