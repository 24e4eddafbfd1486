"""Boards of Grafana's dynamic schema (v2): the same panels and queries, and rows that are there only with their data.

Grafana evaluates the rule "has data" for single panels of an automatic grid, not for rows. A row follows a rule about a
variable instead: a hidden one, whose values are those of a metric's label.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dashboards import frame
from dashboards.frame import Board, Section, panel_id
from dashboards.panels import PROMETHEUS, Panel
from dashboards.questions import SELECTION
from dashboards.sdk import Builder, JSONEncoder, v2, v2_model
from kvobs.signals import Kind, Signal

Json = Mapping[str, Any]
T = TypeVar("T")

SYNCS = {0: "Off", 1: "Crosshair", 2: "Tooltip"}
REFRESHES = {0: "never", 1: "onDashboardLoad", 2: "onTimeRangeChanged"}
SORTS = {0: "disabled", 1: "alphabeticalAsc"}
HAS_SOME = ".+"


class _Built(Builder[T]):
    """Stands for a builder where the object is there already."""

    def __init__(self, built: T) -> None:
        self._built = built

    def build(self) -> T:
        """Return the object."""
        return self._built


def dynamic(of: Board) -> str:
    """Return a board as a resource of Grafana's dashboard API."""
    content: Json = json.loads(frame.classic(of))
    panels = [inside for panel in content["panels"] for inside in (panel, *panel.get("panels", ()))]
    variables = [_variable(variable) for variable in content["templating"]["list"]]
    builder = (
        v2.Dashboard(content["title"])
        .description(content["description"])
        .tags(content["tags"])
        .editable(content["editable"])
        .cursor_sync(v2_model.DashboardCursorSync(SYNCS[content["graphTooltip"]]))
        .time_settings(
            v2.TimeSettings()
            .timezone(content["timezone"])
            .from_val(content["time"]["from"])
            .to(content["time"]["to"])
            .auto_refresh(content["refresh"])
        )
        .annotations([_annotation(annotation) for annotation in content["annotations"]["list"]])
        .links([_Built(v2_model.DashboardLink.from_json(link)) for link in content["links"]])
        .variables([*variables, *(_presence(signal) for signal in _signals(of.sections))])
        .elements({_name(panel["id"]): _panel(panel) for panel in panels if panel["type"] != "row"})
        .layout(v2.Rows().rows([_row(section) for section in of.sections]))
    )
    manifest = v2.manifest(of.uid, builder).build()
    return json.dumps(json.loads(json.dumps(manifest, cls=JSONEncoder)), sort_keys=True, indent=1) + "\n"


def _name(panel: int) -> str:
    return f"panel-{panel}"


def _query(group: str, uid: str, spec: Json) -> v2_model.DataQueryKind:
    source = v2_model.Dashboardv2beta1DataQueryKindDatasource(name=uid)
    return v2_model.DataQueryKind(group=group, datasource=source, spec=dict(spec))


def _panel(panel: Json) -> Builder[v2_model.PanelKind]:
    queries = v2.QueryGroup()
    queries.query_options(_options(panel)).targets([_target(target) for target in panel["targets"]])
    queries.transformations([_transformation(one) for one in panel.get("transformations", ())])
    config = panel["fieldConfig"]
    spec = v2_model.VizConfigSpec(options=panel["options"], field_config=config)
    return (
        v2.Panel()
        .id(panel["id"])
        .title(panel["title"])
        .description(panel["description"])
        .links([])
        .data(queries)
        .visualization(_Built(v2_model.VizConfigKind(group=panel["type"], spec=spec)))
    )


def _options(panel: Json) -> v2.QueryOptionsSpec:
    options = v2.QueryOptionsSpec()
    return options.interval(panel["interval"]) if "interval" in panel else options


def _target(target: Json) -> v2.Target:
    source, spec = target["datasource"], {key: target[key] for key in target.keys() - {"datasource", "refId"}}
    return v2.Target().ref_id(target["refId"]).hidden(False).query(_Built(_query(source["type"], source["uid"], spec)))


def _transformation(one: Json) -> v2.Transformation:
    return v2.Transformation().kind(one["id"]).id(one["id"]).options(one["options"])


def _annotation(annotation: Json) -> v2.AnnotationQuery:
    source, target = annotation["datasource"], annotation["target"]
    spec = {key: target[key] for key in target.keys() - {"datasource"}}
    return (
        v2.AnnotationQuery()
        .name(annotation["name"])
        .enable(annotation["enable"])
        .hide(annotation["hide"])
        .icon_color(annotation["iconColor"])
        .query(_Built(_query(source["type"], source["uid"], spec)))
        .legacy_options({key: annotation[key] for key in ("expr", "titleFormat", "textFormat")})
    )


def _query_variable(one: Json) -> Builder[v2_model.VariableKind]:
    source = one["datasource"]
    return (
        v2.QueryVariable(one["name"])
        .label(one["label"])
        .query(_Built(_query(source["type"], source["uid"], one["query"])))
        .definition(one["definition"])
        .refresh(v2_model.VariableRefresh(REFRESHES[one["refresh"]]))
        .sort(v2_model.VariableSort(SORTS[one["sort"]]))
        .multi(one["multi"])
        .include_all(one["includeAll"])
        .all_value(one["allValue"])
        .current(v2_model.VariableOption.from_json(one["current"]))
    )


def _source_variable(one: Json) -> Builder[v2_model.VariableKind]:
    return v2.DatasourceVariable(one["name"]).label(one["label"]).plugin_id(one["query"])


def _text_variable(one: Json) -> Builder[v2_model.VariableKind]:
    return v2.TextVariable(one["name"]).label(one["label"]).query(one["query"])


def _filters(one: Json) -> Builder[v2_model.VariableKind]:
    source = v2_model.Dashboardv2beta1AdhocVariableKindDatasource(name=one["datasource"]["uid"])
    return v2.AdhocVariable(one["name"]).label(one["label"]).group(one["datasource"]["type"]).datasource(_Built(source))


VARIABLES: dict[str, Callable[[Json], Builder[v2_model.VariableKind]]] = {
    "query": _query_variable,
    "datasource": _source_variable,
    "textbox": _text_variable,
    "adhoc": _filters,
}


def _variable(one: Json) -> Builder[v2_model.VariableKind]:
    return VARIABLES[one["type"]](one)


def _signals(sections: Iterable[Section]) -> list[Signal]:
    return list(dict.fromkeys(need for section in sections for need in section.needs if isinstance(need, Signal)))


def _has(need: Signal | str) -> str:
    """Return the variable that has a value where there is what a row needs."""
    return f"has_{need.name}" if isinstance(need, Signal) else need


def _presence(signal: Signal) -> Builder[v2_model.VariableKind]:
    """Return a hidden variable: an instance that has such series, if any."""
    series = SELECTION.series(signal, "_count" if signal.kind is Kind.HISTOGRAM else "")
    query = f"label_values({series}, instance)"
    spec = {"query": query, "refId": _has(signal), "qryType": 1}
    return (
        v2.QueryVariable(_has(signal))
        .hide(v2_model.VariableHide.HIDE_VARIABLE)
        .skip_url_sync(True)
        .query(_Built(_query("prometheus", PROMETHEUS.uid or "", spec)))
        .definition(query)
        .refresh(v2_model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _row(section: Section) -> v2.Row:
    row = v2.Row().title(section.heading).collapse(section.collapsed).hide_header(not section.title)
    if section.repeats:
        row.repeat(v2.RowRepeatOptions().value("connector"))
    if section.needs:
        row.conditional_rendering(_shown_with(section.needs))
    return row.layout(_automatic(section) if _signals([section]) else _grid(section))


def _shown_with(needs: Sequence[Signal | str]) -> v2.ConditionalRenderingGroup:
    rules = [v2.ConditionalRenderingVariable().variable(_has(n)).operator("matches").value(HAS_SOME) for n in needs]
    return v2.ConditionalRenderingGroup().visibility("show").condition("or").items(list(rules))


def _grid(section: Section) -> v2.Grid:
    grid, y = v2.Grid(), 0
    for height, line in section.lines:
        x = 0
        for width, builder in line:
            grid.item(v2.GridItem().name(_named(builder)).x(x).y(y).width(width).height(height))
            x += width
        y += height
    return grid


def _automatic(section: Section) -> v2.AutoGrid:
    """Return the panels in lines of equal widths, each one there only with its data."""
    widest = max(len(line) for _, line in section.lines)
    grid = v2.AutoGrid().max_column_count(widest).column_width_mode("standard").row_height_mode("standard")
    for _, line in section.lines:
        for _, builder in line:
            has_data = v2.ConditionalRenderingGroup().visibility("show").condition("and")
            has_data.item(v2.ConditionalRenderingData().value(True))
            grid.item(v2.AutoGridItem().name(_named(builder)).conditional_rendering(has_data))
    return grid


def _named(builder: Panel) -> str:
    return _name(panel_id(builder.build().title or ""))
