"""Summaries and comparisons as they are printed: whole at any width, and as Markdown."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console

from kvobs.cli.summary.rows import MISSED, ConnectorSums, PromptTokens, ServerSums, connector_sums
from kvobs.cli.summary.screen import Grid, Picture, notes, source_line
from kvobs.export.numbers import Numbers
from kvobs.schema import signals

NONE = connector_sums("cpu", Numbers())
CPU = replace(
    NONE, lookups=96, hits=8, hit_share=8 / 96, offered_tokens=7168, loaded_tokens=7168, loaded_bytes=29_400_000,
    bytes_per_s=117e6, loads=8, load_p50_s=0.034, load_p99_s=0.041, load_mean_s=0.031, load_stall_s=51e-6,
    save_stall_s=0.0012, estimated_loads=4, saved_s=0.452, waited_s=0.125, scheduler_s=0.051,
)  # fmt: skip
DISK = replace(CPU, connector="disk", hits=48, hit_share=0.5, lost_tokens=384, failed_loads=2, estimated_loads=0,
               saved_s=None, waited_s=None)  # fmt: skip
SERVER = ServerSums(
    "tiny at port 8000", "tiny", "0.32.0", "0.2.0", 754.0, prefills_seen=5, connectors=(CPU, DISK),
    prompt_tokens=PromptTokens(250, 500, {"cpu": 200, "disk": 50}),
)  # fmt: skip


def printed(picture: Picture, width: int = 80) -> str:
    console = Console(width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(picture)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_a_summary_is_one_table_with_a_column_for_each_connector() -> None:
    assert (
        printed(Picture([SERVER]))
        == """\
tiny at port 8000   13 min   vLLM 0.32.0, kvobs 0.2.0
                                  cpu        disk
lookups                            96          96
hits                                8          48
hit share                         8 %        50 %
tokens offered                  7,168       7,168
  lost to a shorter offer           0         384
tokens loaded                   7,168       7,168
bytes loaded                  29.4 MB     29.4 MB
speed of a load            117.0 MB/s  117.0 MB/s
loads                               8           8
loads failed                        0           2
load p50                        34 ms       34 ms
load p99                        41 ms       41 ms
load mean                       31 ms       31 ms
steps waited for loads          51 us       51 us
steps waited for saves         1.2 ms      1.2 ms
loads with an estimate              4           0
  time saved                   452 ms           -
  time paid                    125 ms           -
time in the scheduler           51 ms       51 ms
Of 1,000 prompt tokens: 25 % computed, 50 % in vLLM's own cache, 20 % loaded by
cpu, 5 % loaded by disk.
disk: no estimate yet: 5 prefills seen."""
    )


@pytest.mark.parametrize("width", [32, 40, 57, 80, 120, 200])
def test_at_any_width_every_number_of_every_connector_is_whole(width: int) -> None:
    rows = [replace(CPU, connector=f"a connector with a long name, {i}", lookups=123_456_789 + i) for i in range(9)]
    text = printed(Picture([replace(SERVER, connectors=tuple(rows))]), width)
    assert all(f"{123_456_789 + i:,}" in text for i in range(9))
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_failure_is_red_and_nothing_else() -> None:
    console = Console(width=80, color_system="standard", force_terminal=True, highlight=False)
    with console.capture() as capture:
        console.print(Picture([SERVER]))
    assert [text.strip() for text in re.findall(r"\x1b\[1;31m(.*?)\x1b", capture.get())] == ["2"]


def test_what_is_not_known_is_named() -> None:
    quiet = ServerSums("gpu-1:9464", "llama", restarted=True)
    assert printed(Picture([quiet]), 120).split("\n")[0] == (
        "gpu-1:9464   llama   it restarted during the run: the numbers since then"
    )
    assert "Where the prompt tokens came from is unknown" in printed(Picture([quiet]), 120)
    ended = replace(quiet, restarted=False, ended="its engine has ended: SIGKILL")
    assert printed(Picture([ended])).startswith("gpu-1:9464   llama   its engine has ended: SIGKILL\n")
    assert "No connector has any numbers." in printed(Picture([quiet]))


def test_markdown_has_the_same_table() -> None:
    named = replace(SERVER, connectors=(replace(CPU, connector="a|b"), DISK))
    lines = Picture([named]).markdown().splitlines()
    assert lines[:4] == [
        "**tiny at port 8000   13 min   vLLM 0.32.0, kvobs 0.2.0**  ", "", "|  | a\\|b | disk |", "| --- | --: | --: |"
    ]  # fmt: skip
    assert "| lost to a shorter offer | 0 | 384 |" in lines
    assert lines[-3:] == [source_line(SERVER.prompt_tokens or PromptTokens(0, 0, {})), "",
                          "disk: no estimate yet: 5 prefills seen."]  # fmt: skip


def test_differences_have_their_size() -> None:
    before: tuple[ConnectorSums, ...] = (replace(CPU, lookups=48, load_p99_s=0.082, exceptions=3), replace(DISK))
    old = replace(SERVER, connectors=before, prompt_tokens=PromptTokens(500, 500, {}), seconds=600)
    text = printed(Picture([SERVER], [old]), 100)
    assert text.splitlines()[:2] == [
        "tiny at port 8000   13 min   vLLM 0.32.0, kvobs 0.2.0",
        "before: tiny at port 8000   10 min   vLLM 0.32.0, kvobs 0.2.0",
    ]
    for line in (
        "cpu lookups 48 96 +48 (+100 %)", "exceptions 3 0 -3 (-100 %)", "load p99 82 ms 41 ms -41 ms (-50 %)",
        "hit share 8 % 8 % 0", "disk lookups 96 96 0", "all prompts tokens 1,000 1,000 0",
        "computed 50 % 25 % -25.0 points", "loaded by disk 0 % 5 % +5.0 points",
    ):  # fmt: skip
        assert line in " ".join(text.split()), text
    assert "| **cpu** |  |  |  |\n| lookups | 48 | 96 | +48 (+100 %) |\n" in Picture([SERVER], [old]).markdown()
    other = [replace(old, server="one"), replace(old, server="two")]
    assert "The earlier summary has no server of this name." in printed(Picture([SERVER], other))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4).filter(any))
def test_shares_of_tokens_sum_to_100_and_are_within_one_percent(counts: list[int]) -> None:
    computed, *loaded = counts
    line = source_line(PromptTokens(computed, 0, {f"c{i}": n for i, n in enumerate(loaded)}))
    found = [int(share) for share in re.findall(r"(\d+) %", line)]
    assert sum(found) == 100
    expected = [computed, 0, *loaded]
    assert all(abs(share - 100 * n / sum(counts)) <= 1 for share, n in zip(found, expected, strict=True))
    assert source_line(PromptTokens(0, 0, {})).startswith("Of 0 prompt tokens: 0 %")


def test_a_grid_without_columns_is_printed() -> None:
    assert printed_grid(Grid([""], [])) == ""


def printed_grid(grid: Grid) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(grid)
    return capture.get().strip()


def test_what_was_not_offered_has_its_reasons_the_largest_first() -> None:
    missed = replace(CPU, missed_tokens={"never_seen": 100, "evicted": 300})
    server = ServerSums("here", connectors=(missed, replace(DISK)))
    says = "cpu was asked for 400 tokens that it did not offer: 75 % evicted, 25 % in new prompts."
    assert [line for line in notes(server) if "not offer" in line] == [says]
    assert MISSED.keys() == set(signals.MISSED_TOKENS.labels["reason"])
