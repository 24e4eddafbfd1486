"""The kinds of panels, each a function of its queries and its description."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards import looks, questions
from dashboards.promql import Selection
from dashboards.sdk import (
    Builder,
    board,
    build,
    common,
    heatmap,
    heatmap_model,
    model,
    prometheus,
    prometheus_model,
    stat,
    statetimeline,
    timeseries,
)
from kvobs.schema.signals import Signal

Panel = Builder[model.Panel]

PROMETHEUS = common.DataSourceRef(type_val="prometheus", uid="${prometheus_datasource}")
TEMPO = common.DataSourceRef(type_val="tempo", uid="${tempo_datasource}")

METRIC = re.compile(
    r"\bkvobs_\w+|\b(?:vllm|lmcache)\[:_\]\w+|\blmcache_mp_\w+|\bmaster_\w+|\b(?:process|otelcol)_\w+|\bALERTS\b"
)
CONNECTOR_LEGEND = "#{{index}} {{connector}}"
VERDICT_WINDOW = "2m"  # a verdict over less would flicker where requests are few


@dataclass(frozen=True)
class About:
    """A panel's help: one sentence about what it shows, and one about what to do or where to look."""

    shows: str
    do: str

    def text(self, exprs: Sequence[str]) -> str:
        """Return both sentences and, apart from them, the metrics that these expressions query."""
        names = sorted(set(METRIC.findall(" ".join(exprs))))
        metrics = ", ".join(f"`{name.replace('[:_]', ':')}`" for name in names)
        return f"{self.shows} {self.do}" + (f"\n\nMetrics: {metrics}" if names else "")


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""
    color: str = ""  # where the meaning has one
    width: int = 1
    dashed: bool = False
    unit: str = ""  # where it is not the panel's


def of_connector(expr: str, what: str = "", *, dashed: bool = False) -> Query:
    """Return a query with a series for each connector, in that connector's colour on every board."""
    return Query(questions.with_index(expr), f"{CONNECTOR_LEGEND} {what}".strip(), dashed=dashed)


def p99_and_mean(of: Selection, signal: Signal) -> tuple[Query, Query]:
    """Return the p99 of durations and, dashed, their mean, by connector."""
    p99 = of_connector(of.quantile(0.99, signal, "connector"), "p99")
    return p99, of_connector(of.mean(signal, "connector"), "mean", dashed=True)


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(PROMETHEUS).expr(query.expr).ref_id(ref_id(index))
    return target.legend_format(query.legend) if query.legend else target


def ref_id(index: int) -> str:
    """Return the name of a panel's query."""
    return chr(ord("A") + index)


def number(
    title: str,
    about: About,
    query: Query,
    *,
    unit: str,
    verdict: board.ThresholdsConfig = looks.PLAIN,
    verdicts: Mapping[str, board.ThresholdsConfig] | None = None,
    words: dict[int, tuple[str, str]] | None = None,
    empty: str = looks.NO_TRAFFIC,
    least: float | None = 0,
) -> Panel:
    """Return one number as it is now, and its colour: a series' name above it where the query has a legend.

    ``verdicts`` are the colours of series with these names. The last value of a course may be of an engine that ended.
    """
    panel = (
        stat.Panel()
        .title(title)
        .description(about.text([query.expr]))
        .datasource(PROMETHEUS)
        .with_target(_target(query, 0).instant())
        .interval(VERDICT_WINDOW)
        .unit(unit)
        .no_value(empty)
        .mappings([looks.not_a_number(empty), *([looks.map_values(words)] if words else [])])
        .thresholds(verdict)
        .color_scheme(board.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if query.legend else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if query.legend else common.BigValueTextMode.VALUE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
        .wide_layout(False)
        .reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    for name, other in (verdicts or {}).items():
        panel.override_by_name(name, [_property("thresholds", other.build())])
    return panel if least is None else panel.min(least)


def lines(
    title: str,
    about: About,
    *queries: Query,
    unit: str,
    colors: Mapping[str, str] | None = None,
    stacked: bool = False,
    exemplars: bool = False,
    least: float | None = 0,
) -> Panel:
    """Return a time series panel; ``colors`` maps the last word of a series' name to its colour."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about.text([query.expr for query in queries]))
        .datasource(PROMETHEUS)
        .unit(unit)
        .no_value(looks.NO_DATA)
        .color_scheme(board.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .draw_style(common.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(40 if stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .point_size(4)
        .stacking(build.StackingConfig().mode(common.StackingMode.NORMAL if stacked else common.StackingMode.NONE))
        .tooltip(build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .legend(
            build.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs(["mean", "max", "lastNotNull"])
            .sort_by("Max")
            .sort_desc(True)
        )
    )
    if least is not None:
        panel.min(least)
    for index, query in enumerate(queries):
        # A mean has no exemplars: they belong to buckets.
        panel.with_target(_target(query, index).range().exemplar(exemplars and "_bucket" in query.expr))
        if query.color:
            panel.override_by_query(ref_id(index), [*_color(query.color), _property("custom.lineWidth", query.width)])
        if query.unit:
            panel.override_by_query(ref_id(index), [_property("unit", query.unit)])
        if query.dashed:
            panel.override_by_query(ref_id(index), [_property("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})])
    if any(query.legend.startswith(CONNECTOR_LEGEND) for query in queries):
        for index, color in enumerate(looks.BY_INDEX):
            panel.override_by_regexp(f"/^#{index} /", _color(color))
    for word, color in (colors or {}).items():
        panel.override_by_regexp(f"/(^| ){word}$/", _color(color))
    return panel


def distribution(title: str, about: About, expr: str) -> Panel:
    """Return a heatmap of durations; its points are exemplars, each a trace."""
    target = _target(Query(expr, "{{le}}"), 0).range().format(prometheus_model.PromQueryFormat.HEATMAP).exemplar(True)
    return (
        heatmap.Panel()
        .title(title)
        .description(about.text([expr]))
        .datasource(PROMETHEUS)
        .with_target(target)
        .no_value(looks.NO_DATA)
        .unit("short")
        .y_axis(heatmap.YAxisConfig().unit("s").axis_placement(common.AxisPlacement.LEFT))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .fill("dark-blue")
            .scale(heatmap_model.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .cell_gap(1)
        .exemplars_color(looks.WARNING)
        .tooltip(heatmap.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE).y_histogram(True))
        .show_legend()
    )


def states(title: str, about: About, words: dict[int, tuple[str, str]], *queries: Query) -> Panel:
    """Return a state timeline with a band for each series."""
    panel = statetimeline.Panel()
    for i, query in enumerate(queries):
        panel = panel.with_target(_target(query, i).range())
    return (
        panel.title(title)
        .description(about.text([query.expr for query in queries]))
        .datasource(PROMETHEUS)
        .unit("short")
        .no_value(looks.NO_DATA)
        .mappings([looks.map_values(words)])
        .thresholds(looks.PLAIN)
        .color_scheme(board.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .show_value(common.VisibilityMode.AUTO)
        .row_height(0.8)
        .merge_values(True)
        .fill_opacity(80)
        .tooltip(build.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .legend(
            build.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
    )


def _property(name: str, value: object) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=name, value=value)


def _color(color: str) -> list[model.DynamicConfigValue]:
    return [_property("color", looks.fix_color(color))]
