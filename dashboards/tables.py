"""Tables: a row for each connector, and rows of spans out of Tempo; and the trace of one of these spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dashboards import looks
from dashboards.panels import PROMETHEUS, TEMPO, VERDICT_WINDOW, About, Panel, ref_id
from dashboards.sdk import board, build, common, model, prometheus, prometheus_model, table, tempo, tempo_model
from kvobs.schema.spans import ATTRIBUTES

TRACE_ID = "${__data.fields.traceIdHidden}"
"""A row's trace: Grafana 10.4 to 13 name the field of a span table so; in a table of traces it is ``traceID``."""

NOTHING = "-"
WIDTHS = {"Index": 70, "Engine": 80, "Instance": 140, "Alert": 220}
"""Of columns that need less or more than the others, in pixels."""


@dataclass(frozen=True)
class Column:
    """One query's values, a row for each combination of labels; without a title only its labels are shown."""

    title: str
    expr: str
    unit: str = "short"
    verdict: board.ThresholdsConfig | None = None  # colours the cell
    words: dict[int, tuple[str, str]] | None = None  # shown in place of numbers
    width: int = 0
    decimals: int | None = None


def rows(
    title: str,
    about: About,
    labels: dict[str, str],
    columns: Sequence[Column],
    *,
    link: str = "",
    limit: int = 0,
    empty: str = NOTHING,
) -> Panel:
    """Return a table of the latest values, the greatest of the first two columns on top, at most ``limit`` rows.

    ``labels`` are the columns before them, with their titles; the first one's cells lead to ``link``.
    """
    panel = (
        table.Panel()
        .title(title)
        .description(about.text([column.expr for column in columns]))
        .datasource(PROMETHEUS)
        .interval(VERDICT_WINDOW)
        .unit("short")
        .no_value(empty)
        .mappings([looks.not_a_number(NOTHING, looks.NONE)])
        .cell_height(common.TableCellHeight.SM)
        .min_width(90)
        .align(common.FieldTextAlignment.LEFT)
    )
    renamed, left_out = dict(labels), ["Time"]
    for index, column in enumerate(columns):
        name = ref_id(index)
        panel.with_target(
            prometheus.Dataquery()
            .datasource(PROMETHEUS)
            .expr(column.expr)
            .ref_id(name)
            .instant()
            .format(prometheus_model.PromQueryFormat.TABLE)
        )
        value = f"Value #{name}" if len(columns) > 1 else "Value"
        if not column.title:
            left_out.append(value)
            continue
        renamed[value] = column.title
        if properties := _looks_of(column):
            panel.override_by_name(column.title, properties)
    if link:
        links = [{"title": "Open this connector's board", "url": link, "targetBlank": False}]
        panel.override_by_name(next(iter(labels.values())), [model.DynamicConfigValue(id_val="links", value=links)])
    for name in labels.values():
        own: dict[str, object] = {"custom.width": WIDTHS[name]} if name in WIDTHS else {}
        # The panel's words are about a table without rows: Grafana also shows them in empty cells.
        own |= {"noValue": NOTHING} if empty != NOTHING else {}
        if own:
            panel.override_by_name(name, [model.DynamicConfigValue(id_val=key, value=v) for key, v in own.items()])
    order = {name: index for index, name in enumerate(renamed)}
    if len(columns) > 1:
        panel.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        model.DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": dict.fromkeys(left_out, True), "indexByName": order, "renameByName": renamed},
        )
    )
    if limit:
        by_first = {"fields": {}, "sort": [{"field": columns[0].title, "desc": True}]}
        panel.with_transformation(model.DataTransformerConfig(id_val="sortBy", options=by_first))
        panel.with_transformation(model.DataTransformerConfig(id_val="limit", options={"limitField": limit}))
    greatest = [column.title for column in columns[:2] if column.title]
    sorts = [(name, True) for name in greatest] or [(next(iter(labels.values())), False)]
    return panel.sort_by([build.TableSortByFieldState().display_name(name).desc(desc) for name, desc in sorts])


def _looks_of(column: Column) -> list[model.DynamicConfigValue]:
    properties: dict[str, object] = {}
    if column.unit != "short":
        properties["unit"] = column.unit
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    if column.width:
        properties["custom.width"] = column.width
    if column.verdict or column.words:
        properties["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
    if column.verdict:
        properties["thresholds"] = looks.only_what_stands_out(column.verdict).build()
    if column.words:
        properties["mappings"] = [looks.map_values(column.words)]
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


def attribute(name: str) -> str:
    """Return how TraceQL names a span's attribute; ValueError for one that kvobs does not set."""
    if name not in ATTRIBUTES:
        raise ValueError(f"{name!r} is not an attribute of kvobs's spans: they are {', '.join(sorted(ATTRIBUTES))}")
    return f"span.{name}"


def explore(trace_id: str) -> str:
    """Return the address of a trace in Explore; ``trace_id`` may be a field of the row."""
    source, start, end = variables = ("${tempo_datasource}", "${__from}", "${__to}")
    pane = {
        "datasource": source,
        "queries": [{"query": trace_id, "queryType": "traceql", "refId": "A"}],
        "range": {"from": start, "to": end},
    }
    text = quote(json.dumps({"kvobs": pane}, separators=(",", ":")), safe="")
    for variable in (*variables, trace_id):  # Grafana fills them in before the browser sees the address
        text = text.replace(quote(variable, safe=""), variable)
    return f"/explore?schemaVersion=1&panes={text}"


def spans(title: str, about: About, query: str, shown: dict[str, str], *, link: str, limit: int = 20) -> Panel:
    """Return a table of the spans that a TraceQL query finds; ``shown`` are attributes, with their columns' titles.

    A span's name leads to ``link``, where its trace is shown, and to Explore, which a Viewer of Grafana can't open.
    """
    selected = f"{query} | select({', '.join(attribute(name) for name in shown)})"
    panel = (
        table.Panel()
        .title(title)
        .description(about.text([]))
        .datasource(TEMPO)
        .unit("short")
        .no_value("No such span in this time range, or no Tempo")
        .cell_height(common.TableCellHeight.SM)
        .with_target(
            tempo.Dataquery()
            .datasource(TEMPO)
            .ref_id("A")
            .query_type("traceql")
            .query(selected)
            .limit(limit)
            .table_type(tempo_model.SearchTableType.SPANS)
        )
        .sort_by([build.TableSortByFieldState().display_name("Duration").desc(True)])
    )
    links = [
        {"title": "Show the trace on this board", "url": link, "targetBlank": False},
        {"title": "Open the trace in Explore", "url": explore(TRACE_ID), "targetBlank": True},
    ]
    panel.override_by_name("name", [model.DynamicConfigValue(id_val="links", value=links)])
    for name, column in shown.items():
        panel.override_by_name(name, [model.DynamicConfigValue(id_val="displayName", value=column)])
    return panel


def trace(title: str, about: About, variable: str) -> Panel:
    """Return a panel of the trace whose id is the value of a variable of the board."""
    # A query that is only hexadecimal digits is an id to Grafana's data source, and no TraceQL.
    target = tempo.Dataquery().datasource(TEMPO).ref_id("A").query_type("traceql").query(f"${{{variable}}}")
    return (
        board.Panel()
        .type("traces")
        .title(title)
        .description(about.text([]))
        .datasource(TEMPO)
        .with_target(target)
        .no_value("No trace is chosen")
        .options({})
    )
