"""The pure parts of the benchmark: quartiles, verdicts, table, and what the rounds on servers add up to."""

import io
from argparse import Namespace
from typing import Any

import pytest
from rich.console import Console

from tests.bench.__main__ import is_whole
from tests.bench.endtoend import CONFIGS, VERIFY, Turn, in_turn, lines, noise, prompts
from tests.bench.report import Budget, Line, Part, Verdict, markdown, merged, number, table


def line(*values: float, title: str = "a hook", unit: str = "ns", **more: Any) -> Line:
    return Line(title, unit, values, **more)


def test_quartiles_lie_between_samples_however_few_they_are() -> None:
    assert (line(3, 1, 2, 5, 4).median, line(3, 1, 2, 5, 4).quartiles) == (3, (2, 4))
    assert line(1, 2).quartiles == (1.25, 1.75)
    assert (line(7).median, line(7).quartiles) == (7, (7, 7))


@pytest.mark.parametrize(
    ("budget", "verdict"),
    [
        (None, Verdict.NONE),
        (Budget(3), Verdict.MET),
        (Budget(2.5), Verdict.IN_NOISE),
        (Budget(2), Verdict.IN_NOISE),
        (Budget(1.9), Verdict.MISSED),
        (Budget(3, at_least=True), Verdict.MET),
        (Budget(4, at_least=True), Verdict.IN_NOISE),
        (Budget(4.1, at_least=True), Verdict.MISSED),
    ],
)
def test_a_budget_is_missed_when_its_better_quartile_misses_it(budget: Budget | None, verdict: Verdict) -> None:
    assert line(1, 2, 3, 4, 5, budget=budget).verdict == verdict


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (0.2345, "0.234"), (42.04, "42.0"), (812.4, "812"), (15800, "15,800"), (-1.5, "-1.50")],
        *[(1, "1.000"), (1.0074, "1.007"), (1.1, "1.10")],  # ratios
    ],
)
def test_numbers_keep_three_digits_and_ratios_near_1_four(value: float, text: str) -> None:
    assert number(value) == text


def shown(*parts: Part) -> list[str]:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(parts))
    return console.export_text().splitlines()


PARTS = (
    Part("Calls", [line(50, 45, baselines=[100, 90], budget=Budget(0.4)), line(90, budget=Budget(80, at_least=True))]),
    Part("A page", [line(812, unit="B", title="bytes", budget=Budget(1024)), line(3, unit="s")]),
)


def test_the_table_has_a_row_for_each_line_under_its_part() -> None:
    rows = [[cell.strip() for cell in text.split("│")[1:-1]] for text in shown(*PARTS) if "│" in text]
    assert [row for row in rows if row[0]] == [
        ["Calls", "", "", "", "", "", ""],
        ["a hook", "95.0 ns", "47.5 ns", "0.500", "0.500 to 0.500", "≤ 0.400", "MISSED"],
        ["a hook", "", "90.0 ns", "90.0", "90.0 to 90.0", "≥ 80.0", "ok"],
        ["A page", "", "", "", "", "", ""],
        ["bytes", "", "812 B", "812", "812 to 812", "≤ 1,024", "ok"],
        ["a hook", "", "3.00 s", "3.00", "3.00 to 3.00", "", ""],
    ]


def test_the_published_table_is_the_printed_one() -> None:
    calls, page = markdown(PARTS).split("\n\n**")
    assert calls.splitlines()[:3] == [
        "**Calls**",
        "",
        "|  | baseline | measured | median | quartiles | budget | verdict |",
    ]
    assert calls.splitlines()[4:] == [
        "| a hook | 95.0 ns | 47.5 ns | 0.500 | 0.500 to 0.500 | ≤ 0.400 | MISSED |",
        "| a hook |  | 90.0 ns | 90.0 | 90.0 to 90.0 | ≥ 80.0 | ok |",
    ]
    assert "| bytes |  | 812 B | 812 | 812 to 812 | ≤ 1,024 | ok |" in page


def test_a_later_run_replaces_its_parts_only() -> None:
    calls, page = PARTS
    later = Part(page.title, [line(900, unit="B", title="bytes")])
    assert merged(markdown(PARTS), [later]) == markdown([calls, later])
    assert merged(markdown(PARTS), [Part("New", page.lines)]) == markdown([calls, page, Part("New", page.lines)])


def test_only_a_whole_run_is_published() -> None:
    assert is_whole(Namespace(parts=[], rounds=None))
    assert not is_whole(Namespace(parts=["calls"], rounds=None))
    assert not is_whole(Namespace(parts=[], rounds=3))


def test_every_server_is_at_every_place_of_a_round_equally_often() -> None:
    rounds = [in_turn(list(CONFIGS), number) for number in range(2 * len(CONFIGS))]
    for place in range(len(CONFIGS)):
        assert sorted(order[place] for order in rounds) == sorted([*CONFIGS, *CONFIGS])


def test_two_prompts_in_three_were_asked_in_the_two_turns_before() -> None:
    before = {*prompts("alone", 6, 9), *prompts("alone", 5, 9)}
    now = prompts("alone", 7, 9)
    assert len(set(now)) == 9
    assert len(before.intersection(now)) == 6


def test_the_noise_is_how_far_like_and_like_are_apart_either_way() -> None:
    assert noise([1, 1, 1, 1.1, 2]) == pytest.approx(1.1)
    assert noise([1, 1, 1, 1 / 1.1, 1 / 2]) == pytest.approx(1.1)


def turns(*tokens_per_s: float) -> list[Turn]:
    return [Turn(rate, 1000 / rate, 2000 / rate) for rate in tokens_per_s]


def test_kvobs_may_differ_as_much_as_two_runs_of_stock_do() -> None:
    same = turns(100, 100, 100, 100, 100)
    noisy = turns(95, 100, 105, 110, 90)
    for kvobs, verdict in ((turns(96, 99, 100, 104, 94), Verdict.MET), (turns(70, 75, 80, 70, 75), Verdict.MISSED)):
        each = {"kvobs": kvobs, VERIFY: kvobs, "stock": same, "stock again": noisy}
        judged = {found.title: found for found in lines(each)}
        assert len(judged) == 9
        for metric in ("tokens/s", "first token, p50", "first token, p95"):
            assert judged[f"{metric}, kvobs"].verdict == verdict, metric
            assert judged[f"{metric}, {VERIFY}"].median == 1, metric
            assert judged[f"{metric}, stock again"].budget is None
