"""Every rule of the dashboard lint holds on every board, and finds what it is there to find."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from dashboards.__main__ import FILES
from tests.support.board_lint import RULES, Board, panels

BOARDS = {path: json.loads(text()) for path, text in FILES.items() if path.startswith("boards/")}
OVERVIEW = BOARDS["boards/kvobs-overview.json"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", BOARDS)
def test_every_board_keeps_every_rule(path: str, rule: str) -> None:
    assert RULES[rule](BOARDS[path]) == []


def _in_list(variable: str, **changes: Any) -> Callable[[Board], None]:
    def spoil(board: Board) -> None:
        next(v for v in board["templating"]["list"] if v["name"] == variable).update(changes)

    return spoil


def _in_panel(**changes: Any) -> Callable[[Board], None]:
    return lambda board: panels(board)[0].update(changes)


def _expr(old: str, new: str) -> Callable[[Board], None]:
    def spoil(board: Board) -> None:
        target = panels(board)[0]["targets"][0]
        assert old in target["expr"]
        target["expr"] = target["expr"].replace(old, new, 1)

    return spoil


SPOILED: dict[str, Callable[[Board], None]] = {
    "template_datasource": _in_list("prometheus_datasource", name="datasource"),
    "template_job": _in_list("job", allValue=".*"),
    "template_instance": _in_list("instance", multi=False),
    "template_label_promql": _in_list("engine", query={"query": "label_values(kvobs_connector_info{job=}, engine)"}),
    "template_on_time_change_reload": _in_list("engine", refresh=1),
    "panel_datasource": _in_panel(datasource={"type": "prometheus", "uid": "prometheus"}),
    "panel_title_description": _in_panel(description=""),
    "panel_units": lambda board: panels(board)[0]["fieldConfig"]["defaults"].update(unit="seconds"),
    "panel_no_targets": _in_panel(targets=[]),
    "target_promql": _expr("sum by (", "sum by "),
    "target_rate_interval": _expr("$__rate_interval", "5m"),
    "target_job": _expr('job=~"$job",', ""),
    "target_instance": _expr('instance=~"$instance"', 'instance="$instance"'),
    "target_counter_agg": _expr("rate(", "avg_over_time("),
    "target_logql": _in_panel(datasource={"type": "loki", "uid": "${prometheus_datasource}"}),
    "uneditable": lambda board: board.update(editable=True),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_finds_what_breaks_it(rule: str) -> None:
    board = copy.deepcopy(OVERVIEW)
    SPOILED[rule](board)
    assert len(RULES[rule](board)) == 1
