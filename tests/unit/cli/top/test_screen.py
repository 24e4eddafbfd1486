"""Whatever the numbers, names and window: nothing runs over its edges, nobody is lost without a word."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings
from rich.cells import cell_len

from kvobs.cli.top.rows import ConnectorRow, Server
from kvobs.cli.top.screen import SORTS, View, picture
from tests.unit.cli.top.test_rows import SERVERS

VIEWS = st.builds(View, st.sampled_from(SORTS), st.booleans(), st.booleans(), st.just("the last 2 s"))


@settings(max_examples=50)
@given(SERVERS, VIEWS, st.integers(80, 200), st.integers(16, 60))
def test_no_line_is_too_long_and_no_child_is_lost(servers: list[Server], view: View, width: int, height: int) -> None:
    names = iter(range(10**4, 10**5))
    servers = [
        replace(server, children=tuple(replace(child, connector=f"@{next(names)}") for child in server.children))
        for server in servers
    ]
    lines = [line.plain for line in picture(servers, view, width, height)]
    assert len(lines) <= height
    # The terminal cuts the title and the errors.
    errors = [f"  {server.error}" for server in servers if server.error]
    for line in lines[1:]:
        assert cell_len(line) <= width or line.endswith(tuple(errors))
    said = sum(line.count("@") for line in lines)
    more = re.fullmatch(r"and (\d+) more: .*", lines[-1])
    assert said + (int(more[1]) if more else 0) == sum(len(server.children) for server in servers)


CPU = ConnectorRow(
    "0", "cpu", "OffloadingConnector", lookups=20, hit_share=0.25, loads=5, load_tokens=7168, load_p50_s=0.03,
    load_p99_s=0.067, scheduler_s=0.045, load_stall_s=0.001, save_stall_s=0.0004, failed_loads=0, exceptions=0,
    skew_p99_s=0.12,
    slowest_rank="3", slowest_rank_share=0.92, loads_open=2, saves_held=3, oldest_s=1.25, quarantined=False,
)  # fmt: skip
DISK = replace(
    CPU, connector="disk", exceptions=2, quarantined=True, skew_p99_s=None, slowest_rank=None, slowest_rank_share=None,
    saves_held=0,
)  # fmt: skip
SERVER = Server("localhost:8000", None, "tiny", "0.32.0", "0.1.0", 2.0, 0.0003, 0, (CPU, DISK))


def shown(servers: list[Server], width: int, **view: object) -> str:
    view_of: View = replace(View(over="the last 2 s"), **view)  # type: ignore[arg-type]
    return "".join(f"{line.plain.rstrip()}\n" for line in picture(servers, view_of, width))


def test_at_80_columns_a_second_line_has_the_rest() -> None:
    assert shown([SERVER], 80) == (
        "kvobs top   the last 2 s   as configured\n"
        "\n"
        "server          model vLLM     kvobs   telemetry kvobs errors\n"
        "localhost:8000  tiny  0.32.0   0.1.0    300 us/s            0\n"
        "\n"
        "connector  hits tokens   load   load  sched  stall loads saves oldest errors\n"
        "                    /s    p50    p99   busy   ms/s  open  held            /s\n"
        "cpu        25 %   7.2k  30 ms  67 ms    4 %    1.4     2     3  1.2 s      0\n"
        "  slowest rank 3 (92 %), skew p99 120 ms\n"
        "disk       25 %   7.2k  30 ms  67 ms    4 %    1.4     2     0  1.2 s    2.0\n"
        "  in quarantine\n"
    )


def test_with_room_all_is_in_columns() -> None:
    lines = shown([SERVER], 140).splitlines()
    assert lines[5].split() == [
        "connector", "hits", "lookups", "tokens", "loads", "load", "load", "sched", "stall", "loads", "saves", "oldest",
        "skew", "slowest", "errors",
    ]  # fmt: skip
    numbers = "cpu 25 % 20 7.2k 5.0 30 ms 67 ms 4 % 1.4 2 3 1.2 s 120 ms 3 (92 %) 0"
    assert " ".join(lines[7].split()) == numbers
    assert lines[9].split() == ["in", "quarantine"]


def test_of_several_servers_each_has_a_number() -> None:
    down = Server("localhost:8001", error="no answer: Connection refused, for 12 s")
    two = replace(SERVER, address="localhost:8002", children=(replace(CPU, engine="0"), replace(CPU, engine="1")))
    lines = shown([SERVER, down, two], 80).splitlines()
    assert lines[4] == " 2 localhost:8001  no answer: Connection refused, for 12 s"
    assert [line.split()[:3] for line in lines if re.match(r" \d +\d ", line)] == [
        ["1", "0", "cpu"], ["1", "0", "disk"], ["3", "0", "cpu"], ["3", "1", "cpu"]
    ]  # fmt: skip


def test_sorted_by_a_column_the_title_says_so_and_the_column_stands_out() -> None:
    lines = picture([SERVER], View("errors"), 80)
    assert "by errors, largest first" in lines[0].plain
    assert [line.plain[:4] for line in lines[7:]] == ["disk", "  in", "cpu ", "  sl"]
    assert [lines[5].plain[span.start : span.end].strip() for span in lines[5].spans if span.style == "reverse"] == [
        "errors"
    ]


def test_totals_have_no_rates_in_their_header() -> None:
    text = shown([replace(SERVER, seconds=None)], 140, since_start=True)
    assert "/s" not in text
    assert "1.4 ms" in text


def test_many_servers_leave_room_for_children_and_those_that_are_down_come_first() -> None:
    down = Server("down:8000", error="no answer")
    lines = [line.plain for line in picture([*[SERVER] * 30, down], View(), 80, 24)]
    assert len(lines) <= 24
    assert any(line.startswith("31 down:8000") for line in lines)
    assert "and 26 more servers" in lines
    assert any(line.startswith("and ") and "enlarge the window" in line for line in lines)
