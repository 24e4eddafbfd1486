"""Every check of the checklist holds on every board, and finds what it is there to find."""

import copy
import json
from collections.abc import Callable

import pytest

from dashboards.__main__ import FILES
from tests.support.boards import CHECKS, Board, Panel, of_tempo, series

BOARDS: dict[str, Board] = {path: json.loads(text()) for path, text in FILES.items() if path.startswith("boards/")}
SLOW_LOADS = BOARDS["boards/kvobs-slow-loads.json"]  # it has a panel of every sort that checks are about

Spoil = Callable[[Board], None]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("path", BOARDS)
def test_every_board_passes_every_check(path: str, check: str) -> None:
    assert CHECKS[check](BOARDS[path]) == []


def expr(old: str, new: str, pick: Callable[[Board], Panel] = lambda board: series(board)[0]) -> Spoil:
    """Return what changes the first query of a panel."""

    def spoil(board: Board) -> None:
        target = pick(board)["targets"][0]
        name = "query" if "query" in target else "expr"
        assert old in target[name], target[name]
        target[name] = target[name].replace(old, new)

    return spoil


def table(board: Board) -> Panel:
    return of_tempo(board)[0]


def variable(name: str, board: Board) -> Panel:
    return next(v for v in board["templating"]["list"] if v["name"] == name)


def link_of(board: Board) -> Panel:
    (named,) = [o for o in table(board)["fieldConfig"]["overrides"] if o["matcher"]["options"] == "name"]
    return named["properties"][0]["value"][0]


P99 = "histogram_quantile(0.99, sum by (le, connector) (rate(kvobs_load_duration_seconds_bucket"

SPOILED: dict[str, Spoil] = {
    "ids": lambda board: board["panels"][0].update(id=board["panels"][1]["id"]),
    "layout": lambda board: board["panels"][1]["gridPos"].update(x=11),
    "sources": lambda board: table(board)["datasource"].update(uid="tempo"),
    "works_without_tempo": lambda board: table(board)["targets"].append(series(board)[0]["targets"][0]),
    "templates": lambda board: variable("engine", board).update(allValue=".*"),
    "selections": expr('connector=~"$connector",mode="async"', 'connector="cpu",mode="async"'),
    "first_load": lambda board: board["panels"][0]["targets"].extend(board["panels"][0]["targets"] * 40),
    "registered": expr("kvobs_load_duration_seconds_bucket", "kvobs_load_time_seconds_bucket"),
    "label_values": expr('mode="async"', 'mode="later"'),
    "quantiles": expr("by (le, connector)", "by (le, mode)"),
    "windows": expr("$__rate_interval", "5m"),
    "raw_counters": expr("rate(", "avg_over_time("),
    "guards": expr(P99, f"1 / {P99}"),
    "axes": lambda board: series(board)[0]["fieldConfig"]["defaults"].pop("min"),
    "panel_units": lambda board: series(board)[0]["fieldConfig"]["defaults"].update(unit="ms"),
    "descriptions": lambda board: table(board).update(description=table(board)["description"].replace("**Do:**", "")),
    "legends": lambda board: series(board)[0]["targets"][0].update(legendFormat="{{index}}"),
    "bounded": expr("topk(10, ", "topk(100, ", lambda board: next(p for p in series(board) if "hook" in str(p))),
    "palette": lambda board: board["annotations"]["list"][0].update(iconColor="#FF0000"),
    "traceql": expr("span.kv_transfer.mode", "span.kv_transfer.color", table),
    "trace_links": lambda board: link_of(board).update(url="/d/kvobs-slow-loads?var-trace=${__data.fields.traceID}"),
    "links": lambda board: board["links"][1].update(keepTime=False),
    "annotations": lambda board: board["annotations"]["list"].pop(),
}

MORE = [
    ("registered", expr("kvobs_load_duration_seconds_bucket{", '{__name__=~"kvobs_load_duration_.*",')),
    ("first_load", lambda board: board.update(schemaVersion=42)),
    ("traceql", expr('name =~ "kv.load .+"', 'name =~ "kv.lode .+"', table)),
    ("traceql", expr('"slow"', '"sloww"', table)),
]


@pytest.mark.parametrize(("check", "spoil"), [*SPOILED.items(), *MORE])
def test_every_check_finds_what_breaks_it(check: str, spoil: Spoil) -> None:
    board = copy.deepcopy(SLOW_LOADS)
    spoil(board)
    assert len(CHECKS[check](board)) == 1
    assert SPOILED.keys() == CHECKS.keys()
