"""What the live tests judge by, without a server."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.stack.queries import faults, filled, labels_of, targets
from tests.stack.run import HOLD, hurry


def series(*values: float, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": "m", **labels}, "values": [[i, str(value)] for i, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        ("sum by (connector) (rate(x[1m]))", {"connector"}),
        ("topk(10, sum by (a, b) (x))", {"a", "b"}),
        ("histogram_quantile(0.99, sum by (le, connector) (rate(x_bucket[1m])))", {"connector"}),
        ("(sum by (a) (x) or 0 * max by (a) (y)) / (sum by (a) (z) > 0)", {"a"}),
        ("time() - min by (a, kind) (x)", {"a", "kind"}),
        ("100 * -sum by (a) (x)", {"a"}),
        ("sum by (a) (x) * on (a) group_left (index) topk by (a) (1, y)", {"a", "index"}),
        ("sum(x)", set()),
        ("sum without (a) (x)", None),
        ("rate(x[1m])", None),
    ],
)
def test_the_labels_of_a_result_are_those_that_its_query_keeps(query: str, labels: set[str] | None) -> None:
    assert labels_of(query) == labels


def test_variables_are_filled_in() -> None:
    assert filled('rate(x{job=~"$job",c=~"${connector:pipe}"}[$__rate_interval])') == 'rate(x{job=~".+",c=~".+"}[20s])'


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "no series"),
        ([series(1, math.inf, connector="a")], "infinite"),
        ([series(math.nan, math.nan, connector="a")], "never a number"),
        ([series(1, connector="a"), series(1, connector="a", rank="0")], "instead of"),
        ([series(1)], "instead of"),
        ([{"metric": {"connector": "a"}, "value": [0, "NaN"]}], "never a number"),
    ],
)
def test_a_fault_is_found(found: list[dict[str, Any]], said: str) -> None:
    assert any(said in fault for fault in faults(found, frozenset({"connector"})))


def test_a_legend_needs_its_labels() -> None:
    assert faults([series(1, connector="a")], None, "{{connector}} {{ rank }}")
    assert faults([series(1, math.nan, connector="a")], frozenset({"connector"}), "{{connector}}") == []


def test_panels_in_collapsed_rows_count_but_not_those_for_tempo() -> None:
    shown = {"title": "Shown", "type": "stat", "targets": [{"refId": "A", "expr": "up", "instant": True}]}
    hidden_targets = [{"refId": "A", "expr": "up"}, {"refId": "B", "query": "{}"}]
    hidden = {"title": "Hidden", "type": "stat", "targets": hidden_targets}
    board = {"uid": "u", "panels": [shown, {"title": "Row", "type": "row", "panels": [hidden]}]}
    instant = {str(target): target.is_instant for target in targets(board)}
    assert instant == {"u: Shown (A)": True, "u: Hidden (A)": False}


def test_rules_are_hurried_up_and_not_changed() -> None:
    alert, record = {"alert": "A", "expr": "up == 0", "for": "10m"}, {"record": "a:b", "expr": "up"}
    (group,) = hurry({"groups": [{"name": "g", "interval": "30s", "rules": [alert, record]}]})["groups"]
    assert group == {"name": "g", "interval": "1s", "rules": [{**alert, "for": HOLD}, record]}
