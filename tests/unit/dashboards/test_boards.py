"""The boards' files: byte-stable, whole as Grafana's own model reads them, taken by Prometheus; what is on which board.

What must hold on all of them is in ``test_board_checks.py``, what the questions mean in ``test_questions.py``.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboards import __main__ as generator
from dashboards import frame, looks
from dashboards.__main__ import FILES, GENERATED, differences
from dashboards.panels import CONNECTOR_LEGEND, About, lines
from dashboards.sdk import JSONEncoder, model
from dashboards.site import Site
from kvobs.schema import signals
from kvobs.schema.signals import SIGNALS
from tests.support.boards import QUERIED, Board, asked, metric, panels, queries
from tests.support.promtool import answers, passed

TEXTS = {path: text() for path, text in FILES.items() if path.startswith("boards/")}
BOARDS: dict[str, Board] = {path: json.loads(text) for path, text in TEXTS.items()}
OVERVIEW, CONNECTOR, SLOW_LOADS, ITSELF = (
    BOARDS[f"boards/{uid}.json"] for uid in (frame.OVERVIEW, frame.CONNECTOR, frame.SLOW_LOADS, frame.ITSELF)
)

each = pytest.mark.parametrize("path", BOARDS)


def test_files_are_as_generated_and_the_check_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert differences(GENERATED) == []
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((GENERATED / path).read_text())
    changed = tmp_path / f"boards/{frame.OVERVIEW}.json"
    changed.write_text(changed.read_text().replace("now-1h", "now-6h"))
    monkeypatch.setattr(generator, "GENERATED", tmp_path)
    differs = f"boards/{frame.OVERVIEW}.json: differs from what python -m dashboards makes\n"
    for arguments, code, says in ((["--check"], 1, differs), ([], 0, "")):
        monkeypatch.setattr(sys, "argv", ["dashboards", *arguments])
        with pytest.raises(SystemExit) as end:
            generator.main()
        assert end.value.code == code
        assert capsys.readouterr().out == says or not code
    assert differences(tmp_path) == []


@each
def test_text_is_stable_sorted_and_ends_with_a_newline(path: str) -> None:
    assert TEXTS[path] == FILES[path]() == json.dumps(BOARDS[path], sort_keys=True, indent=0) + "\n"


@each
def test_grafanas_own_model_reads_every_key(path: str) -> None:
    def read(content: Board) -> Any:
        again = json.loads(json.dumps(model.Dashboard.from_json(content), cls=JSONEncoder))
        for shown in (*again["links"], *again["annotations"]["list"]):
            assert shown.pop("placement") == "inControlsMenu"  # the model always says so; boards leave it out
        return again

    assert read(BOARDS[path]) == BOARDS[path]
    misspelt = copy.deepcopy(BOARDS[path])
    misspelt["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
    assert read(misspelt) != misspelt


def test_an_id_is_of_its_panel_whatever_stands_before_it() -> None:
    def ids(content: Board) -> dict[str, int]:
        return {panel["title"]: panel["id"] for panel in panels(content)}

    shared = ids(CONNECTOR).keys() & ids(SLOW_LOADS).keys()
    assert shared
    assert all(ids(CONNECTOR)[title] == ids(SLOW_LOADS)[title] for title in shared)


def test_a_line_that_is_not_full_is_refused() -> None:
    panel = lines("a", About("", ""), unit="s")
    with pytest.raises(ValueError, match="Use: a line of panels is 20 columns wide, not 24"):
        frame.classic(frame.Board("x", "x", "x", [frame.Section("Use", [(8, [(12, panel), (8, panel)])])]))


def test_overview_table_leads_to_the_connectors_board() -> None:
    table = next(panel for panel in panels(OVERVIEW) if panel["type"] == "table")
    link = next(o for o in table["fieldConfig"]["overrides"] if o["matcher"]["options"] == "Connector")["properties"][0]
    assert link["value"][0]["url"].startswith(f"/d/{frame.CONNECTOR}?")
    assert "var-connector=${__value.raw}" in link["value"][0]["url"]


OFF_BOARDS = {
    signal.name
    for signal in (  # those that an alert, `kvobs top` or a query in docs/metrics.md shows to whom they concern
        signals.BLOCK_COPY_BYTES,
        signals.BLOCK_COPY_DURATION,
        signals.ESTIMATE_PREFILLS,
        signals.GC_PAUSES,
        signals.KV_EVENTS,
        signals.QUARANTINES,
        signals.SLOW_CALLS,
        signals.UNEXPECTED_REPORTS,
        signals.UNUSED_OFFERS,
    )
}


def test_every_metric_is_on_a_board_or_is_left_off_with_a_reason() -> None:
    found = {metric(selector) for content in BOARDS.values() for _, selector in asked(content)}
    shown = {QUERIED[name].name for name in found & set(QUERIED)}
    assert shown == {signal.name for signal in SIGNALS} - OFF_BOARDS


@pytest.mark.tools
@each
def test_prometheus_2_takes_every_query(path: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": expr.replace("$__rate_interval", "2m")}
        for index, (_, expr) in enumerate(queries(BOARDS[path]))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in passed("check", "rules", file)


def test_a_connector_has_the_same_colour_on_all_boards() -> None:
    found = []
    for panel in (panel for content in BOARDS.values() for panel in panels(content)):
        if any(target.get("legendFormat", "").startswith(CONNECTOR_LEGEND) for target in panel["targets"]):
            overrides = panel["fieldConfig"]["overrides"]
            colored = [o["properties"][0] for o in overrides if o["matcher"]["options"].startswith("/^#")]
            found.append([color["value"]["fixedColor"] for color in colored])
    assert len(found) > 8
    assert all(colors == list(looks.BY_INDEX) for colors in found)


def test_lines_of_several_connectors_differ() -> None:
    """In a row of its own, or by colour, and then the kinds by the style of the line: at most two."""
    repeats = False
    for panel in CONNECTOR["panels"]:
        if panel["type"] == "row":
            repeats = bool(panel.get("repeat"))
        inside = panel.get("panels", [panel])
        for shown in (p for p in inside if p["type"] == "timeseries" and not repeats and not panel.get("collapsed")):
            assert all(t["legendFormat"].startswith(CONNECTOR_LEGEND) for t in shown["targets"]), shown["title"]
            overrides = shown["fieldConfig"]["overrides"]
            styles = [p for o in overrides for p in o["properties"] if p["id"] == "custom.lineStyle"]
            assert len(shown["targets"]) - len(styles) <= 1, shown["title"]


def test_failures_have_one_colour_and_healthy_cells_none() -> None:
    colours = dict(looks.VERDICTS.values())
    assert looks.BY_OUTCOME["failed"] == looks.BAD == colours["Failing"]
    assert looks.BY_OUTCOME["ok"] == looks.GOOD == colours["OK"]
    tables = [panel for content in BOARDS.values() for panel in panels(content) if panel["type"] == "table"]
    properties = [p for panel in tables for o in panel["fieldConfig"]["overrides"] for p in o["properties"]]
    bases = [p["value"]["steps"][0] for p in properties if p["id"] == "thresholds"]
    assert bases
    assert all(base == {"color": "transparent", "value": None} for base in bases)


def test_boards_change_their_colour_where_alerts_begin() -> None:
    site = Site()
    assert looks.bound(looks.FAILING_SHARE, looks.BAD) == site.failed_share
    assert looks.bound(looks.LOAD_SECONDS, looks.WARNING) == site.slow_load_s
    assert looks.bound(looks.SCHEDULER_SHARE, looks.WARNING) == site.scheduler_share
    assert looks.bound(looks.SCHEDULER_SHARE, looks.BAD) == site.blocked_share
    assert looks.bound(looks.AGE_SECONDS, looks.BAD) == site.save_age_s
    assert looks.bound(looks.UNUSED_HIT_SHARE, looks.WARNING) == site.unused_hit_share


def test_tiles_show_what_is_now() -> None:
    """The last value of a course was that of an engine which had ended."""
    tiles = [panel for board in BOARDS.values() for panel in panels(board) if panel["type"] == "stat"]
    assert len(tiles) > 10
    assert all(target["instant"] and not target.get("range") for tile in tiles for target in tile["targets"])


@pytest.mark.tools
def test_an_end_outside_of_any_call_is_shown(tmp_path: Path) -> None:
    (engines,) = [panel for panel in panels(ITSELF) if panel["title"] == "Engines"]
    ends = {f'kvobs_engine_ended{{connector="{of}",hook="h",reason="SIGKILL"}}': "1x20" for of in ("", "cpu")}
    assert answers(tmp_path, ends, engines["targets"][1]["expr"]) == {"": 2, "cpu": 2}


def test_an_empty_cell_does_not_say_that_no_alert_fires() -> None:
    (table,) = [panel for panel in panels(OVERVIEW) if panel["title"] == "Firing alerts"]
    assert table["fieldConfig"]["defaults"]["noValue"] == "No alert fires"
    cells = {o["matcher"]["options"]: {p["id"]: p["value"] for p in o["properties"]} for o in
             table["fieldConfig"]["overrides"]}  # fmt: skip
    assert {cells[name]["noValue"] for name in ("Alert", "Connector", "Instance", "Cluster")} == {"-"}


def test_critical_alerts_and_wrong_bytes_are_red() -> None:
    tiles = {panel["title"]: panel["fieldConfig"] for panel in panels(OVERVIEW) if panel["type"] == "stat"}
    red = {"color": looks.BAD, "value": 1e-9}
    assert red in tiles["Wrong bytes"]["defaults"]["thresholds"]["steps"]
    (critical,) = [o["properties"][0]["value"] for o in tiles["Alerts"]["overrides"]
                   if o["matcher"]["options"] == "critical"]  # fmt: skip
    assert red in critical["steps"]
