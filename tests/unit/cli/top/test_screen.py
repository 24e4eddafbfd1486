"""Whatever the numbers, names and window: nothing runs over its edges, nothing is left out unmarked."""

import re
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

from kvobs.cli.top.screen import SORTS, Picture, sort_rows
from kvobs.export.connector_columns import MEANINGS, columns
from kvobs.export.connector_rows import ConnectorRow, Server
from kvobs.schema import __version__
from tests.support.top_rows import CPU, SERVER, SERVERS


def segments(servers: list[Server], width: int, height: int | None = None, by: str | None = None) -> list[Segment]:
    console = Console(width=width)
    return list(console.render(Picture(servers, 5, by), console.options.update(height=height)))


def shown(servers: list[Server], width: int, height: int | None = None, by: str | None = None) -> list[str]:
    text = "".join(segment.text for segment in segments(servers, width, height, by))
    return [line.rstrip() for line in text.removesuffix("\n").split("\n")]


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))  # what it finds is small enough
@given(SERVERS, st.sampled_from(SORTS), st.integers(40, 200), st.integers(16, 60))
def test_all_lines_fit_and_no_connector_is_lost(servers: list[Server], by: str | None, width: int, height: int) -> None:
    """In 80 columns, nor is a number cut."""
    names = iter(range(10**4, 10**5))
    servers = [
        replace(server, connectors=tuple(replace(row, connector=f"@{next(names)}") for row in server.connectors))
        for server in servers
    ]
    lines = shown(servers, width, height, by)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    if width >= 80:
        left_out = re.fullmatch(r"and (\d+) more connectors", lines[-1])
        listed, n = sum(line.count("@") for line in lines), sum(len(server.connectors) for server in servers)
        assert listed + int(left_out[1] if left_out else 0) == n
        assert not [line for line in lines if "@" in line and "…" in line]


@given(SERVERS, st.sampled_from(SORTS[1:]))
def test_sorting_keeps_every_row_and_puts_missing_values_last(servers: list[Server], by: str) -> None:
    as_configured = sort_rows(servers, None)
    assert as_configured == [(i, row) for i, server in enumerate(servers, 1) for row in server.connectors]
    rows = sort_rows(servers, by)
    assert sorted(map(repr, rows)) == sorted(map(repr, as_configured))
    for (_, one), (_, next_one) in pairwise(rows):
        first, second = getattr(one, by), getattr(next_one, by)
        assert second is None or (first is not None and first >= second)


def test_without_an_earlier_scrape_totals_are_no_rates() -> None:
    """docs/on-call.md has the rest."""
    lines = shown([replace(SERVER, seconds=None, telemetry_s_per_s=2.5)], 80)
    assert "/s" not in " ".join(lines)
    assert "since the servers' start" in lines[0]
    assert lines[9].split()[:9] == ["cpu", "40", "%", "224", "67", "ms", "521", "ms", "2.0"]


def test_numbers_are_whole_in_68_columns_and_near_names_in_200() -> None:
    narrow, usual, wide = (next(line for line in shown([SERVER], width) if "cpu " in line) for width in (68, 80, 200))
    assert narrow.split() == usual.split() == wide.split()
    assert (len(narrow), len(usual), len(wide)) == (68, 80, 90)


@pytest.mark.parametrize("width", [52, 67])
def test_narrower_windows_have_whole_names_and_every_number(width: int) -> None:
    lines = " ".join(" ".join(shown([replace(SERVER, connectors=(CPU,))], width)).split())
    usual = " ".join(" ".join(shown([replace(SERVER, connectors=(CPU,))], 80)).split())
    assert "…" not in lines
    assert f"{SERVER.model}; vLLM" in lines
    for column in columns(since_start=False):
        if (number := column.show(CPU)) not in ("-", "0"):
            assert lines.count(number) >= usual.count(number) > 0, column.title
    assert f"load p50 {columns(since_start=False)[2].show(CPU)}" in lines


def test_the_legend_has_each_number() -> None:
    titles = [re.sub(r"\s*/s", "", column.title).split() for column in columns(since_start=False)]
    known = {word for title in MEANINGS for word in title.replace(",", "").split()}
    assert {word for title in titles for word in title} <= known


def test_names_are_cut_before_numbers() -> None:
    rows = (replace(CPU, connector="[red]" + "c" * 50), replace(CPU, connector="日本 語"))
    lines = shown([replace(SERVER, model="m" * 50, connectors=rows)], 80)
    assert re.search("m… +5 +1 ", lines[4])
    assert re.match(r"\[red\]c+… +40 % ", lines[9]), "names are not markup"
    assert any(line.startswith("日本 語 ") for line in lines)


def test_a_gain_has_the_number_of_its_loads_or_why_there_is_none() -> None:
    rows = (CPU, replace(CPU, gain_s_per_s=None), replace(CPU, gain_s_per_s=None, loads_per_s=0))
    texts = [" ".join(shown([replace(SERVER, connectors=(row,))], 200)) for row in rows]
    assert "gain: 0.04 of 1.2 loads/s" in texts[0]
    assert "gain: no estimate yet: 90 prefills seen" in texts[1]
    assert "gain" not in texts[2]
    idle = replace(CPU, gain_s_per_s=0.0, loads_per_s=0, estimated_loads_per_s=0)
    assert "gain" not in " ".join(shown([replace(SERVER, connectors=(idle,))], 200))


def test_how_full_a_store_is_stands_below_its_connector() -> None:
    full = replace(CPU, stored_tokens=131_072, evicted_tokens_per_s=2_000.0)
    assert "2.0k tokens/s evicted, 131k tokens stored" in " ".join(shown([replace(SERVER, connectors=(full,))], 200))
    sized = replace(full, capacity_tokens=262_144)
    assert "131k of 262k tokens stored" in " ".join(shown([replace(SERVER, connectors=(sized,))], 200))
    assert "stored" not in " ".join(shown([SERVER], 200)), "unknown is not 0"


def test_reuse_is_below_a_single_server() -> None:
    server = replace(SERVER, seen_share=0.4, half_within_tokens=131_072, local_cache_tokens=524_288)
    text = "40 % of the prompts' tokens were used before, half of them within 131k tokens; vLLM's own cache has 524k"
    assert shown([server], 200)[5] == f"  vLLM 0.32.0, kvobs {__version__}; {text}"
    assert "used before" not in " ".join(shown([server, server], 200))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (replace(CPU, state="Hangs", state_by="load", state_value=20.0), "  Hangs: load for 20 s, load mean 91 ms, "),
        (
            replace(CPU, state="Hangs", state_by="call", state_value=20.0, call="wait_for_save on rank 1", call_s=20.0),
            "  Hangs: call for 20 s, in wait_for_save on rank 1, load mean 91",
        ),
        (
            replace(CPU, state="OK", call="lookup on rank 1", call_s=2),
            "  in lookup on rank 1 for 2.0 s, load mean 91 ms, ",
        ),
        (replace(CPU, state="Slow"), "  Slow, load mean 91 ms, "),
    ],
)
def test_a_bad_state_is_red_with_its_age_where_something_hangs(row: ConnectorRow, says: str) -> None:
    server = [replace(SERVER, connectors=(row,))]
    assert shown(server, 80)[10].startswith(says)
    red = "".join(segment.text for segment in segments(server, 80) if segment.style and segment.style.color)
    assert red == f"cpu{says.partition(', load mean')[0].strip().replace(', ', '')}"


def test_each_of_several_servers_has_a_number() -> None:
    down = Server("localhost:8001", error="for 12 s: no answer: Connection refused")
    two = replace(SERVER, address="localhost:8002", connectors=(replace(CPU, engine="0"), replace(CPU, engine="1")))
    lines = shown([SERVER, down, two], 80)
    assert lines[4:6] == [" 2 localhost:8001", "  for 12 s: no answer: Connection refused"]
    assert [line.split()[:3] for line in lines if re.match(r" \d +\d ", line)] == [
        ["1", "0", "cpu"], ["1", "0", "disk"], ["1", "0", "remote"], ["3", "0", "cpu"], ["3", "1", "cpu"]
    ]  # fmt: skip


def test_engines_of_one_model_on_this_host_show_their_ports() -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    servers = [replace(SERVER, address=f"{model} at port {port}", model=model) for port in (8000, 8001)]
    lines = shown(servers, 80)
    assert [line[:13] for line in lines if "port" in line] == [" 1 port 8000 ", " 2 port 8001 "]


def test_the_column_sorted_by_is_in_the_title_and_stands_out() -> None:
    lines = shown([SERVER], 80, by="errors_per_s")
    assert "by errors /s, largest first" in lines[0]
    assert [line.split()[0] for line in lines[9:] if line[0] != " "] == ["remote", "cpu", "disk"]
    reverse = [
        segment.text for segment in segments([SERVER], 80, by="errors_per_s") if segment.style and segment.style.reverse
    ]
    assert "".join(reverse).split() == ["errors", "/s"]


def test_many_servers_leave_room_and_the_ones_down_come_first() -> None:
    lines = shown([*[SERVER] * 30, Server("down:8000", error="no answer")], 80, 24)
    assert len(lines) <= 24
    assert lines[4] == "31 down:8000"
    assert "and 27 more servers" in lines
    assert re.fullmatch(r"and 8\d more connectors", lines[-1])
