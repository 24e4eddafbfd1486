"""The page of PromQL recipes: each query gives the known answer about two connectors, by Prometheus itself."""

import re
from pathlib import Path

import pytest

from kvobs.schema.kinds import KINDS
from kvobs.schema.signals import LOAD_DURATION
from kvobs.schema.verdicts import STATES
from tests.support.pages import TEXTS
from tests.support.promtool import answers

pytestmark = pytest.mark.tools

SECTION = TEXTS["docs/metrics.md"].partition("\n## Recipes\n")[2].partition("\n## ")[0]
RECIPES: dict[str, list[str]] = {
    title: re.findall(r"^    (\S.*)$", part, re.MULTILINE)
    for title, _, part in (part.partition("\n") for part in SECTION.split("\n### ")[1:])
}

ABOVE = {"cpu": 0.3, "disk": 1.3}  # seconds that each load takes
GROWTH = {  # a minute, of cpu and of disk
    'kvobs_lookups_total{outcome="hit"}': (30, 10),
    'kvobs_lookups_total{outcome="miss"}': (10, 30),
    'kvobs_lookups_total{outcome="pending"}': (99, 99),
    "kvobs_load_tokens_total": (600, 300),
    'kvobs_loads_total{mode="async",outcome="ok"}': (9, 6),
    'kvobs_loads_total{mode="async",outcome="failed"}': (1, 2),
    'kvobs_loads_total{mode="async",outcome="aborted"}': (5, 5),
    'kvobs_load_duration_seconds_sum{mode="async"}': (2.7, 7.8),
    'kvobs_load_duration_seconds_count{mode="async"}': (9, 6),
    "kvobs_load_bytes_total": (6000, 1200),
    "kvobs_prefill_saved_seconds_total": (12, 3),
    "kvobs_load_waited_seconds_total": (6, 9),
    "kvobs_estimated_loads_total": (5, 8),
    'kvobs_unused_hit_tokens_total{reason="other_chosen"}': (0, 50),
    'kvobs_unused_hit_tokens_total{reason="aborted"}': (7, 7),
    "kvobs_offered_tokens_total": (600, 500),
    'kvobs_slowest_rank_total{rank="0"}': (6, 6),
}
GAUGES = {
    'kvobs_held_tokens{kind="load"}': (64, 0),
    'kvobs_held_tokens{kind="save"}': (32, 16),
    'kvobs_oldest_in_flight_seconds{kind="load"}': (3, 40),
}
ANSWERS = {
    "Which share of lookups hits?": (0.75, 0.25),
    "Which share of all prompt tokens does each connector load?": (0.3, 0.15),
    "How long do loads take: p99?": (2**-1.625, 2**0.375),
    "How long do loads take: mean?": (0.3, 1.3),
    "Which share of loads fails?": (0.1, 0.25),
    "How many bytes a second are loaded?": (100, 20),
    "Does loading pay?": (0.1, -0.1),
    "Which share of loads does that gain cover?": (0.5, 1),
    "Which offered tokens are lost to a shorter offer?": (0, 0.1),
    "Which connector is slow?": (0.3, 1.3),
    "Which rank comes last?": (1, 1),
    "Which connector holds blocks?": (96, 16),
    "What hangs?": (None, 40),
}


def series() -> dict[str, str]:
    made = {'vllm:prompt_tokens_total{job="vllm"}': "0+2000x20"}
    for index, name in enumerate(("cpu", "disk")):
        for metric, of in {**GROWTH, **GAUGES}.items():
            plain, _, labels = metric.partition("{")
            step = of[index] if metric in GROWTH else 0
            start = 0 if metric in GROWTH else of[index]
            made[f'{plain}{{connector="{name}",{labels.rstrip("}")}'.rstrip(",") + "}"] = f"{start}+{step}x20"
        count = GROWTH['kvobs_load_duration_seconds_count{mode="async"}'][index]
        for bound in (*map(str, LOAD_DURATION.buckets), "+Inf"):
            is_above = float(bound) >= ABOVE[name]
            labels = f'connector="{name}",mode="async",le="{bound}"'
            made[f"kvobs_load_duration_seconds_bucket{{{labels}}}"] = f"0+{count if is_above else 0}x20"
    return made


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_answers_its_question(title: str, tmp_path: Path) -> None:
    (query,) = RECIPES[title]
    expected = {name: n for name, n in zip(("cpu", "disk"), ANSWERS[title], strict=True) if n is not None}
    assert answers(tmp_path, series(), query) == pytest.approx(expected)


def test_there_are_ten_recipes_and_more() -> None:
    assert RECIPES.keys() == ANSWERS.keys()
    assert len(RECIPES) > 10


PAIRS = TEXTS["docs/prefill-decode.md"].partition("\n## Is it so?\n")[2].partition("\n## ")[0]


def test_queries_of_pairs_show_who_computes_and_which_loads_fail(tmp_path: Path) -> None:
    """Of three engines one loads, one computes, and one is a prefill engine, whose misses are right."""
    asked = {
        ("right", "hit"): 30,
        ("right", "miss"): 0,
        ("wrong", "hit"): 0,
        ("wrong", "miss"): 9,
        ("first", "miss"): 9,
    }
    roles = {"right": "kv_consumer", "wrong": "kv_consumer", "first": "kv_producer"}
    of = {name: f'job="kvobs",engine="0",connector="nixl",instance="{name}"' for name in roles}
    given = {f'kvobs_lookups_total{{{of[name]},outcome="{found}"}}': f"0+{n}x20" for (name, found), n in asked.items()}
    given |= {f'kvobs_connector_info{{{of[name]},role="{role}"}}': "1x20" for name, role in roles.items()}
    given[f'kvobs_peer_loads_total{{{of["right"]},peer="h:1",outcome="ok"}}'] = "0+60x20"
    share, loads = re.findall(r"^    (sum by .*)$", PAIRS, re.MULTILINE)
    assert answers(tmp_path, given, share, label="instance") == pytest.approx({"right": 1, "wrong": 0})
    assert answers(tmp_path, given, loads, label="peer") == pytest.approx({"h:1": 1})


def test_the_causes_name_kinds_of_findings_and_states_that_exist() -> None:
    section = TEXTS["docs/prefill-decode.md"].partition("\n## The five causes\n")[2].partition("\n### ")[0]
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")] for line in section.splitlines() if "#" in line
    ]
    assert len(rows) == 5
    kinds = {name for row in rows for name in row[3]}
    assert kinds >= {"no-address", "pair", "pair-blocks", "pair-roles"}
    assert kinds <= KINDS.keys()
    assert {name for row in rows for name in row[4]} <= {state.name for state in STATES}
