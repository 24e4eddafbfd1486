"""Every check holds on every board, and finds what it is there to find."""

import copy
import json
from collections.abc import Callable

import pytest

from dashboards.__main__ import FILES
from tests.support.boards import CHECKS, Board, Panel, of_tempo, series

BOARDS: dict[str, Board] = {path: json.loads(text()) for path, text in FILES.items() if path.startswith("boards/")}
CONNECTOR, SLOW_LOADS = (BOARDS[f"boards/kvobs-{name}.json"] for name in ("connector", "slow-loads"))
OF_TEMPO = {"sources", "traceql", "trace_links"}

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


def link_of(board: Board) -> Panel:
    (named,) = [o for o in table(board)["fieldConfig"]["overrides"] if o["matcher"]["options"] == "name"]
    return named["properties"][0]["value"][0]


SPOILED: dict[str, Spoil] = {
    "ids": lambda board: board["panels"][0].update(id=board["panels"][1]["id"]),
    "sources": lambda board: table(board)["datasource"].update(uid="tempo"),
    "selections": expr('connector=~"$connector"}[', 'connector="cpu"}['),
    "first_load": lambda board: board["panels"][0]["targets"].extend(board["panels"][0]["targets"] * 40),
    "registered": expr("kvobs_lookups_total", "kvobs_lookup_total"),
    "panel_units": lambda board: series(board)[0]["fieldConfig"]["defaults"].update(unit="seconds"),
    "legends": lambda board: series(board)[0]["targets"][0].update(legendFormat="{{index}}"),
    "titles": lambda board: series(board)[0].update(title="p99 " * 40),
    "helps": lambda board: series(board)[0].update(description="It shows loads.\n\nMetrics: `a`"),
    "bounded": expr(
        "topk(10, ", "topk(100, ", lambda board: next(p for p in series(board) if "topk(10" in str(p["targets"][:1]))
    ),
    "traceql": expr("span.kv_transfer.mode", "span.kv_transfer.color", table),
    "trace_links": lambda board: link_of(board).update(url="/d/kvobs-slow-loads?var-trace=${__data.fields.traceID}"),
}

MORE = [
    ("helps", lambda board: series(board)[0].pop("description")),
    ("helps", lambda board: series(board)[0].update(description="It shows loads. See traces. Zero is normal.")),
    ("helps", lambda board: series(board)[0].update(description="It shows loads. See traces")),
    ("helps", lambda board: series(board)[0].update(description=f"It shows loads{' and loads' * 40}. See traces.")),
    ("panel_units", lambda board: series(board)[0]["targets"].clear()),
    ("registered", expr("kvobs_lookups_total{", '{__name__=~"kvobs_lookups_.*",')),
    ("traceql", expr('name =~ "kv.load .+"', 'name =~ "kv.lode .+"', table)),
    ("traceql", expr('"slow"', '"sloww"', table)),
]


@pytest.mark.parametrize(("check", "spoil"), [*SPOILED.items(), *MORE])
def test_every_check_finds_what_breaks_it(check: str, spoil: Spoil) -> None:
    board = copy.deepcopy(SLOW_LOADS if check in OF_TEMPO else CONNECTOR)
    spoil(board)
    assert len(CHECKS[check](board)) == 1
    assert SPOILED.keys() == CHECKS.keys()
