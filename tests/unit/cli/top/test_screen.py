"""Whatever the numbers, names and window: nothing runs over its edges, nothing is left out unmarked."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import Phase, given, settings
from rich.cells import cell_len

from kvobs.cli.top.columns import SORTS
from kvobs.cli.top.rows import ConnectorRow, Server
from kvobs.cli.top.screen import View, picture, visible
from tests.support.top_rows import SERVERS

VIEWS = st.builds(
    View, st.sampled_from(SORTS), st.booleans(), st.booleans(), st.just("the last 2 s"), st.just(""), st.integers(0, 40)
)


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))  # what it finds is small enough
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
    said, n = sum(line.count("@") for line in lines), sum(len(server.children) for server in servers)
    part = re.fullmatch(r"(?:(\d+) to )?(\d+) of (\d+): .*", lines[-1])
    shown, of = visible(servers, view, width, height)
    assert (said, of) == (len(shown), n)
    if part:
        assert (int(part[1] or part[2]), int(part[2]), int(part[3])) == (shown.start + 1, shown.stop, n)
    elif len(lines) < height - 1:
        assert said == n


@settings(max_examples=50, phases=(Phase.generate,))
@given(SERVERS, VIEWS, st.integers(80, 200), st.integers(16, 60))
def test_every_child_can_be_scrolled_to(servers: list[Server], view: View, width: int, height: int) -> None:
    seen: set[int] = set()
    shown, n = visible(servers, view, width, height)
    for first in range(n):
        shown, _ = visible(servers, replace(view, first=first), width, height)
        seen |= set(shown)
    assert seen == set(range(n)) or not shown
    assert not n or not shown or shown.stop == n, "the end of the list stays at the end of the window"


CPU = ConnectorRow(
    "0", "cpu", "OffloadingConnector", lookups=20, hit_share=0.25, loads=5, load_tokens=7168, load_bytes=3e9,
    unused_tokens=0, load_p50_s=0.03,
    load_p99_s=0.067, scheduler_s=0.045, load_stall_s=0.001, save_stall_s=0.0004, gain_s=0.52, failed_loads=0,
    exceptions=0, skew_p99_s=0.12,
    slowest_rank="3", slowest_rank_share=0.92, loads_open=2, saves_held=3, oldest_s=1.25, quarantined=False,
)  # fmt: skip
DISK = replace(
    CPU, connector="disk", exceptions=2, quarantined=True, skew_p99_s=None, slowest_rank=None, slowest_rank_share=None,
    saves_held=0, gain_s=-0.05,
)  # fmt: skip
SERVER = Server("localhost:8000", None, "tiny", "0.32.0", "0.1.0", 2.0, 0.0003, 0, 12, 340, 0.08, 2.4, (CPU, DISK))


def shown(servers: list[Server], width: int, **view: object) -> str:
    view_of: View = replace(View(over="the last 2 s"), **view)  # type: ignore[arg-type]
    return "".join(f"{line.plain.rstrip()}\n" for line in picture(servers, view_of, width))


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
        "  in quarantine, gain -0.05\n"
    )


def test_with_room_all_is_in_columns() -> None:
    lines = shown([SERVER], 160).splitlines()
    assert lines[2].split()[:6] == ["server", "model", "vLLM", "kvobs", "run", "wait"]
    assert lines[5].split() == [
        "connector", "hits", "lookups", "tokens", "bytes", "unused", "loads", "load", "load", "sched", "stall", "gain",
        "loads", "saves", "oldest", "skew", "slowest", "errors",
    ]  # fmt: skip
    numbers = "cpu 25 % 20 7.2k 3.0G 0 5.0 30 ms 67 ms 4 % 1.4 0.52 2 3 1.2 s 120 ms 3 (92 %) 0"
    assert " ".join(lines[7].split()) == numbers
    assert lines[9].split() == ["in", "quarantine"]


def test_what_has_no_column_is_below_its_connector_in_as_many_lines_as_it_takes() -> None:
    busy = replace(CPU, connector="c" * 30, unused_tokens=88.0, quarantined=True)
    assert shown([replace(SERVER, children=(busy,))], 80).splitlines()[7:] == [
        "c" * 18 + "…  25 %   7.2k  30 ms  67 ms    4 %    1.4     2  1.2 s      0",
        "  in quarantine, gain 0.52, slowest rank 3 (92 %), skew p99 120 ms",
        "  88 tokens/s unused, saves held 3, 3.0G bytes/s",
    ]


def test_only_what_matches_is_shown() -> None:
    """By connector, class, address or model; in any case."""
    two = [SERVER, replace(SERVER, address="gpu-7:8000", children=(replace(CPU, connector="lmcache"),))]
    for only, names in (("DIS", ["disk"]), ("offloading", ["cpu", "disk", "lmcache"]), ("gpu-7", ["lmcache"])):
        lines = shown(two, 80, only=only).splitlines()
        assert [line.split()[1] for line in lines if re.match(r" \d [cdl]", line) and "%" in line] == names
        assert lines[0].endswith(f"only {only}")
        assert "localhost:8000" in lines[3], "servers stay"
    assert shown(two, 80, only="nixl").splitlines()[-1] == "no connector matches nixl"


def test_what_is_cut_ends_with_a_mark() -> None:
    long = replace(SERVER, address="a" * 50, model="m" * 50)
    line = shown([long], 80).splitlines()[3]
    assert line.count("…") == 2
    assert len(line) <= 80


def test_of_several_servers_each_has_a_number() -> None:
    down = Server("localhost:8001", error="no answer: Connection refused, for 12 s")
    two = replace(SERVER, address="localhost:8002", children=(replace(CPU, engine="0"), replace(CPU, engine="1")))
    lines = shown([SERVER, down, two], 80).splitlines()
    assert lines[4] == " 2 localhost:8001  no answer: Connection refused, for 12 s"
    assert [line.split()[:3] for line in lines if re.match(r" \d +\d ", line)] == [
        ["1", "0", "cpu"], ["1", "0", "disk"], ["3", "0", "cpu"], ["3", "1", "cpu"]
    ]  # fmt: skip


def test_sorted_by_a_column_the_title_names_it_and_the_column_stands_out() -> None:
    lines = picture([SERVER], View("errors"), 80)
    assert "by errors, largest first" in lines[0].plain
    assert [line.plain[:4] for line in lines[7:]] == ["disk", "  in", "cpu ", "  ga"]
    assert [lines[5].plain[span.start : span.end].strip() for span in lines[5].spans if span.style == "reverse"] == [
        "errors"
    ]


def test_totals_have_no_rates_in_their_header() -> None:
    text = shown([replace(SERVER, seconds=None)], 160, since_start=True)
    assert "/s" not in text
    assert "1.4 ms" in text


def test_many_servers_leave_room_for_children_and_those_that_are_down_come_first() -> None:
    down = Server("down:8000", error="no answer")
    lines = [line.plain for line in picture([*[SERVER] * 30, down], View(), 80, 24)]
    assert len(lines) <= 24
    assert any(line.startswith("31 down:8000") for line in lines)
    assert "and 26 more servers" in lines
    assert re.fullmatch(r"1 to \d+ of 60: arrows scroll, / filters", lines[-1])
