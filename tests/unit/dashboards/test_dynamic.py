"""Boards of the dynamic schema: the same panels as the classic ones, and rows that are there only with their data.

Names and values of their fields are checked against the schema's types by ``make check-boards``.
"""

import json
import re
from typing import Any

import pytest

from dashboards.__main__ import BOARDS, FILES
from kvobs.signals import SIGNALS
from tests.support.board_lint import panels

CLASSIC = {uid: json.loads(FILES[f"boards/{uid}.json"]()) for uid in BOARDS}
DYNAMIC = {uid: json.loads(FILES[f"boards-v2/{uid}.json"]()) for uid in BOARDS}

each = pytest.mark.parametrize("uid", BOARDS)


def rows(uid: str) -> list[dict[str, Any]]:
    assert DYNAMIC[uid]["spec"]["layout"]["kind"] == "RowsLayout"
    return [row["spec"] for row in DYNAMIC[uid]["spec"]["layout"]["spec"]["rows"]]


def items(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [item["spec"] for item in row["layout"]["spec"]["items"]]


def rules(part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    group = part.get("conditionalRendering", {"spec": {"items": []}})["spec"]
    return [(rule["kind"], rule["spec"]) for rule in group["items"]]


@each
def test_a_resource_has_the_classic_boards_id(uid: str) -> None:
    content = DYNAMIC[uid]
    assert (content["apiVersion"], content["kind"]) == ("dashboard.grafana.app/v2beta1", "Dashboard")
    assert content["metadata"] == {"name": uid}
    text = FILES[f"boards-v2/{uid}.json"]()
    assert text == json.dumps(content, sort_keys=True, indent=1) + "\n"


@each
def test_panels_ask_and_show_the_same(uid: str) -> None:
    elements = [element["spec"] for element in DYNAMIC[uid]["spec"]["elements"].values()]
    dynamic = {panel["title"]: panel for panel in elements}
    classic = {panel["title"]: panel for panel in panels(CLASSIC[uid])}
    assert dynamic.keys() == classic.keys()
    for title, panel in classic.items():
        other = dynamic[title]
        assert (other["id"], other["description"]) == (panel["id"], panel["description"])
        config, data = other["vizConfig"], other["data"]["spec"]
        shown = (config["group"], config["spec"]["options"], config["spec"]["fieldConfig"])
        assert shown == (panel["type"], panel["options"], panel["fieldConfig"])
        assert [_classic_target(query["spec"]) for query in data["queries"]] == panel["targets"]
        assert [step["spec"] for step in data["transformations"]] == panel.get("transformations", [])
        assert [step["kind"] for step in data["transformations"]] == [
            step["id"] for step in panel.get("transformations", [])
        ]
        assert data["queryOptions"].get("interval") == panel.get("interval")


def _classic_target(query: dict[str, Any]) -> dict[str, Any]:
    asked = query["query"]
    source = {"type": asked["group"], "uid": asked["datasource"]["name"]}
    return {**asked["spec"], "datasource": source, "refId": query["refId"]}


@each
def test_every_panel_is_in_one_place_and_rows_are_those_of_the_classic_board(uid: str) -> None:
    named = [item["element"]["name"] for row in rows(uid) for item in items(row)]
    assert sorted(named) == sorted(DYNAMIC[uid]["spec"]["elements"])
    classic = [panel for panel in CLASSIC[uid]["panels"] if panel["type"] == "row"]
    first, *titled = rows(uid)
    assert first["hideHeader"]
    assert [(row["title"], row["collapse"], row.get("repeat", {}).get("value")) for row in titled] == [
        (panel["title"], panel["collapsed"], panel.get("repeat")) for panel in classic
    ]
    placed = {f"panel-{panel['id']}": panel["gridPos"] for panel in panels(CLASSIC[uid])}
    for row in (row for row in rows(uid) if row["layout"]["kind"] == "GridLayout"):
        top = min(placed[item["element"]["name"]]["y"] for item in items(row))
        for item in items(row):
            at = {"x": item["x"], "y": top + item["y"], "w": item["width"], "h": item["height"]}
            assert at == placed[item["element"]["name"]]


@each
def test_variables_annotations_and_links_are_the_same(uid: str) -> None:
    spec, classic = DYNAMIC[uid]["spec"], CLASSIC[uid]
    shown = [v["spec"] for v in spec["variables"] if v["spec"]["hide"] == "dontHide"]
    assert [(v["name"], v["label"]) for v in shown] == [(v["name"], v["label"]) for v in classic["templating"]["list"]]
    asked = [(v["name"], v["query"]["spec"], v["allValue"]) for v in shown if "definition" in v]
    assert asked == [
        (v["name"], v["query"], v["allValue"]) for v in classic["templating"]["list"] if v["type"] == "query"
    ]
    assert [(a["spec"]["name"], a["spec"]["query"]["spec"]["expr"]) for a in spec["annotations"]] == [
        (a["name"], a["expr"]) for a in classic["annotations"]["list"]
    ]
    assert spec["links"] == classic["links"]
    assert spec["timeSettings"]["autoRefresh"] == classic["refresh"]


def test_rows_that_need_something_name_it_in_their_titles_and_hide_without_it() -> None:
    for uid in BOARDS:
        for row in rows(uid):
            assert bool(rules(row)) == ("requires" in row["title"]), row["title"]
    assert len([row for uid in BOARDS for row in rows(uid) if rules(row)]) == 7


@each
def test_a_row_is_there_while_a_hidden_variable_finds_a_series_of_a_panel_in_it(uid: str) -> None:
    spec = DYNAMIC[uid]["spec"]
    variables = {v["spec"]["name"]: v["spec"] for v in spec["variables"]}
    used = set()
    for row in rows(uid):
        asked = json.dumps([spec["elements"][item["element"]["name"]] for item in items(row)])
        for kind, rule in rules(row):
            assert kind == "ConditionalRenderingVariable", "Grafana knows no rule about data for rows"
            assert (rule["operator"], rule["value"]) == ("matches", ".+")
            if variables[rule["variable"]]["hide"] == "dontHide":  # Tempo, or what the board's reader has chosen
                assert f"${{{rule['variable']}}}" in asked
                continue
            used.add(rule["variable"])
            variable = variables[rule["variable"]]
            assert (variable["hide"], variable["skipUrlSync"]) == ("hideVariable", True)
            assert (variable["multi"], variable["includeAll"]) == (False, False), "else it is never empty"
            assert variable["refresh"] == "onTimeRangeChanged"
            found = re.fullmatch(r"label_values\((\w+)\{(.*)\}, instance\)", variable["query"]["spec"]["query"])
            assert found
            signal = next(signal for signal in SIGNALS if signal.name == found[1].removesuffix("_count"))
            assert signal.name in asked, row["title"]
            assert 'job=~"$job"' in found[2]
        if rules(row):
            assert row["conditionalRendering"]["spec"]["condition"] == "or"
    assert used == {name for name, variable in variables.items() if variable["hide"] == "hideVariable"}


@each
def test_single_panels_hide_only_in_rows_that_need_metrics(uid: str) -> None:
    """Elsewhere "No data" is an answer."""
    for row in rows(uid):
        needed = [rule["variable"] for _, rule in rules(row) if rule["variable"].startswith("has_")]
        for item in items(row):
            has_data = [("ConditionalRenderingData", {"value": True})]
            assert rules(item) == (has_data if needed else [])
        assert row["layout"]["kind"] == ("AutoGridLayout" if needed else "GridLayout")
