"""Figures in pages are the code's or a published run's: alerts' times, what a part of kvobs costs."""

import re
from collections.abc import Iterator

import pytest

from dashboards.alerts import rule_groups
from dashboards.site import Site
from docs.pages import part
from docs.tables import CONDITIONS
from kvobs.schema.options import Options
from kvobs.state import quarantine
from tests.support.messages import is_written
from tests.support.pages import ALL_TEXTS, RUNBOOK, TEXTS, paragraphs

# --- how long alerts wait, and what they look back on

RULES = [rule for group in rule_groups(Site())["groups"] for rule in group["rules"]]
RULE_OF = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
UNITS = {"s": 1, "seconds": 1, "minute": 60, "hour": 3600, "day": 86400}
NUMBERS = ("a", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
OTHERS = {"an": 1, "last": 1, "half an": 0.5, "quarter of an": 0.25, "fifteen": 15, "twenty": 20, "thirty": 30}
WORDS = {**{word: float(n) for n, word in enumerate(NUMBERS, 1)}, **OTHERS}
TIME = re.compile(
    rf"(?<![\w.])({'|'.join(sorted(WORDS, key=len, reverse=True))}|\d+)[ -](seconds|s\b|minute|hour|day)", re.IGNORECASE
)


def times(text: str) -> set[float]:
    """Return the durations that a text names, in seconds."""
    return {(WORDS.get(n.lower()) or float(n)) * UNITS[unit] for n, unit in TIME.findall(text)}


def in_rule(name: str) -> set[float]:
    """Return the durations of an alert's rule, in seconds: how long it lasts, ranges, thresholds."""
    expr = RULE_OF[name]["expr"]
    for _ in RECORDED:  # a recording may ask for another one
        expr = re.sub("|".join(map(re.escape, RECORDED)), lambda name: f"({RECORDED[name[0]]})", expr)
    ranges = re.findall(r"(?:\[|offset )(\d+)([smhd])\b", expr) + re.findall(r"^(\d+)([smhd])$", RULE_OF[name]["for"])
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    thresholds = re.findall(r"> (\d+)\b", expr)
    return {float(n) * seconds[unit] for n, unit in ranges} | {float(n) for n in thresholds}


def meanings() -> Iterator[tuple[str, str]]:
    for section in ALL_TEXTS[RUNBOOK].split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        yield name, " ".join(text.partition("**How to confirm.**")[0].split())


MEANINGS = dict(meanings())
BESIDE = {
    "KvobsStuckTransfers": {float(Options().stuck_after_s)},
    "KvobsConnectorQuarantined": {quarantine.LONGEST_NS / 1e9},
}
"""What a section says of an option's default, and of the longest quarantine."""


def test_times_are_read() -> None:
    text = "for half an hour, more than a minute, in the last day, 60 s by default, at most 60 seconds, five minutes"
    assert times(text) == {1800, 60, 86400, 300}
    assert sum(bool(times(meaning)) for meaning in MEANINGS.values()) > 12
    assert in_rule("KvobsSlowestRank") >= {600, 900}


@pytest.mark.parametrize("name", RULE_OF)
def test_times_in_the_runbook_and_the_conditions_are_those_of_the_rule(name: str) -> None:
    assert times(MEANINGS[name]) <= in_rule(name) | BESIDE.get(name, set())
    assert times(CONDITIONS[name.removeprefix("Kvobs")](Site())) <= in_rule(name)


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_times_beside_an_alert_are_those_of_its_rule(page: str) -> None:
    for text in paragraphs(TEXTS[page]):
        for sentence in re.split(r"(?<=[.:;]) ", text):
            if len(named := set(re.findall(r"Kvobs[A-Z]\w+", sentence)) & RULE_OF.keys()) == 1:
                assert times(sentence) <= in_rule(named.pop())


# --- what it costs

PERFORMANCE = "docs/performance.md"
RUN = part(TEXTS[PERFORMANCE], "run", "bench")
NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?"
MEASURED = re.compile(
    rf"({NUMBER})(?: to ({NUMBER}))? ?(%|(?:ns|us|ms|MiB|KiB|tok/s|spans/s|bytes)\b)|({NUMBER})(?<=\.\d\d)"
)
GIVEN = {("5", "ms"), ("1", "%"), ("3", "%"), ("3.11", "")}
"""A step of the benchmark, its budgets, Python's version."""


def figures(text: str) -> set[tuple[str, str]]:
    """Return the figures of a text with their units; of those without a unit the ones with two decimals."""
    found = MEASURED.findall(text)
    return {(n.replace(",", ""), unit) for *numbers, unit, plain in found for n in (*numbers, plain) if n}


PUBLISHED = figures(RUN) | {(n.replace(",", ""), "") for n in re.findall(NUMBER, RUN)}


def is_published(number: str, unit: str) -> bool:
    """Return whether a figure is in the published run, there with as many digits or more."""
    digits = len(number.partition(".")[2])
    return any(unit == other and f"{float(published):.{digits}f}" == number for published, other in PUBLISHED)


def quoted() -> Iterator[tuple[str, str]]:
    for page, text in TEXTS.items():
        for part_ in paragraphs(text):
            if page == PERFORMANCE or "performance.md" in part_:
                yield page, part_


QUOTED = [(page, figure) for page, text in quoted() for figure in sorted(figures(text) - GIVEN)]


def test_figures_are_found() -> None:
    assert {PERFORMANCE, "docs/sizing.md"} <= {page for page, _ in QUOTED}
    assert is_published("51.6", "MiB")
    assert not is_published("1.01", "%"), "an older run's"


@pytest.mark.parametrize(("page", "figure"), QUOTED, ids=str)
def test_a_figure_is_one_of_the_published_run(page: str, figure: tuple[str, str]) -> None:
    assert is_published(*figure), f"{page}: {' '.join(figure)}"


def test_what_missed_its_budget_is_named_in_a_sentence() -> None:
    missed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in RUN.splitlines() if "| MISSED |" in line]
    (sentence,) = (text for text in paragraphs(TEXTS[PERFORMANCE]) if text.startswith("**Missed**"))
    for title, _, _, median, *_ in missed:
        assert f"*{title}*" in sentence
        assert median in sentence


def test_a_title_of_the_published_run_is_the_benchmarks() -> None:
    titles = re.findall(r"^\*\*(.*)\*\*$", RUN, re.MULTILINE)
    assert len(titles) >= 10
    assert [title for title in titles if not is_written(title, "tests/bench")] == []
