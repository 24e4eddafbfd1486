"""What a board is, and the common parts of all: variables, annotations, links, and panels on 24 columns."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dashboards import looks, questions
from dashboards.panels import PROMETHEUS, Panel
from dashboards.promql import CLUSTER
from dashboards.sdk import Builder, JSONEncoder, board, model, prometheus
from dashboards.site import RUNBOOK
from kvobs.schema import signals

OVERVIEW, CONNECTOR, SLOW_LOADS = "kvobs-overview", "kvobs-connector", "kvobs-slow-loads"
PREFILL_DECODE, ITSELF = "kvobs-prefill-decode", "kvobs-itself"

TEMPO_SOURCE = "tempo_datasource"
COLUMNS = 24
SCHEMA = 39  # loads in Grafana 10.4; newer ones migrate it

LABELS = {
    "cluster": "Cluster",
    "job": "Job",
    "instance": "Instance",
    "model_name": "Model",
    "engine": "Engine",
    "connector": "Connector",
    questions.ROLE: "Role",
}


@dataclass(frozen=True)
class Section:
    """A titled row: lines of panels, each panel with its width; the first number of a line is its height.

    ``repeats``: once for each chosen connector, which the title names.
    """

    title: str
    lines: Sequence[tuple[int, Sequence[tuple[int, Panel]]]]
    collapsed: bool = False
    repeats: bool = False

    @property
    def heading(self) -> str:
        """Return the title as it is shown."""
        return f"{self.title}: $connector" if self.repeats else self.title


@dataclass(frozen=True)
class Board:
    """One board; its first section has no header, the panels are on top. ``more`` are variables."""

    uid: str
    title: str
    description: str
    sections: Sequence[Section]
    more: Sequence[Builder[model.VariableModel]] = ()


def classic(of: Board) -> str:
    """Return a board's JSON for Grafana 10.4 and newer."""
    filters = board.AdHocVariable("filters").label("Filters").datasource(PROMETHEUS)
    builder = (
        board.Dashboard(of.title)
        .uid(of.uid)
        .description(of.description)
        .tags(["kvobs", "vllm-kv-transfer"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables([*_sources(), *_variables(), *of.more, filters])
        .annotations(_annotations())
    )
    for link in _links():
        builder.link(link)
    built = builder.build()
    built.schema_version = SCHEMA
    built.panels = list(_lay_out(of.sections))
    content = json.loads(json.dumps(built, cls=JSONEncoder))
    for shown in (*content["links"], *content["annotations"]["list"]):
        del shown["placement"]  # the SDK knows only the menu, which is rarely opened
    # Not indented: as a ConfigMap the largest board must fit `kubectl apply`'s annotation of 256 KiB.
    return json.dumps(content, sort_keys=True, indent=0) + "\n"


def panel_id(title: str) -> int:
    """Return a panel's id: of its title, so that links to a panel outlive its neighbours."""
    return zlib.crc32(title.encode()) % 100_000 + 1


def _lay_out(sections: Sequence[Section]) -> Iterable[model.Panel | model.RowPanel]:
    y = 0
    for section in sections:
        inside: list[model.Panel] = []
        if section.title:
            header = board.Row(section.heading).id(panel_id(section.title)).collapsed(section.collapsed)
            row = (header.repeat("connector") if section.repeats else header).build()
            row.grid_pos = model.GridPos(h=1, w=COLUMNS, x=0, y=y)
            row.panels = inside if section.collapsed else []
            y += 1
            yield row
        bottom = y
        for height, line in section.lines:
            x = 0
            for width, builder in line:
                panel = builder.build()
                panel.id_val = panel_id(panel.title or "")
                panel.grid_pos = model.GridPos(h=height, w=width, x=x, y=bottom)
                x += width
                inside.append(panel)
            if x != COLUMNS:
                raise ValueError(f"{section.title or 'top'}: a line of panels is {x} columns wide, not {COLUMNS}")
            bottom += height
        if not section.collapsed:
            y = bottom
            yield from inside


def _sources() -> list[Builder[model.VariableModel]]:
    return [
        board.DatasourceVariable("prometheus_datasource").label("Prometheus data source").type("prometheus"),
        board.DatasourceVariable(TEMPO_SOURCE).label("Tempo data source").type("tempo"),
    ]


def _variables() -> list[Builder[model.VariableModel]]:
    """Return a variable for each label; its values are filtered by the variables before it."""
    return [of_label(name, questions.VARIABLES[:index]) for index, name in enumerate(questions.VARIABLES)]


def of_label(name: str, before: Sequence[str]) -> Builder[model.VariableModel]:
    """Return a variable for a label, its values filtered by the variables before it."""
    matchers = ",".join(f'{label}=~"${label}"' for label in before)
    query = f"label_values({signals.CONNECTOR_INFO.name}{{{matchers}}}, {name})"
    return (
        board.QueryVariable(name)
        .label(LABELS[name])
        .datasource(PROMETHEUS)
        .definition(query)
        .query({"query": query, "refId": name, "qryType": 1})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*" if name == CLUSTER else ".+")  # a site may have no such label
        .current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _annotations() -> list[Builder[model.AnnotationQuery]]:
    return [
        _annotation("Alerts", questions.firing_alerts(), looks.BAD, "{{alertname}} {{connector}} {{instance}}"),
        _annotation("Restarts", questions.restarts(), looks.WARNING, "{{instance}} restarted"),
        _annotation("Versions", questions.new_versions(), looks.OTHER, "kvobs {{version}} on vLLM {{vllm_version}}"),
    ]


def _annotation(name: str, expr: str, color: str, title: str) -> board.AnnotationQuery:
    query = prometheus.Dataquery().datasource(PROMETHEUS).expr(expr).ref_id("Anno").range()
    return (
        board.AnnotationQuery()
        .name(name)
        .datasource(PROMETHEUS)
        .enable(True)
        .icon_color(color)
        .expr(expr)
        .target(query)
        .title_format(title)
        .text_format(name)
    )


def _links() -> list[board.DashboardLink]:
    def link_boards(title: str, tag: str, tooltip: str, *, keeps: bool = True) -> board.DashboardLink:
        link = _link(title, tooltip).type(model.DashboardLinkType.DASHBOARDS).tags([tag]).as_dropdown(True)
        return link.include_vars(keeps)

    return [
        link_boards("kvobs", "kvobs", "kvobs's other boards"),
        # Theirs is another scrape job: with ours, their boards would be empty.
        link_boards("vLLM", "vllm", "vLLM's own boards, if installed", keeps=False),
        _link("Runbook", "What each alert means, and what to do")
        .url(RUNBOOK)
        .target_blank(True)
        .include_vars(False)
        .keep_time(False),
    ]


def _link(title: str, tooltip: str) -> board.DashboardLink:
    link = board.DashboardLink(title).type(model.DashboardLinkType.LINK).tooltip(tooltip).icon("external link")
    return link.include_vars(True).keep_time(True)


def to_board(uid: str, *, keeping: Sequence[str] = (), **chosen: str) -> str:
    """Return the address of a board with this board's time and variables, with other values for those in ``chosen``.

    ``keeping`` are variables in addition to every board's variables.
    """
    names = [*questions.VARIABLES, "prometheus_datasource", *keeping]
    kept = [f"${{{name}:queryparam}}" for name in names if name not in chosen]
    new = [f"var-{name}={value}" for name, value in chosen.items()]
    return f"/d/{uid}?{'&'.join([*kept, *new])}&${{__url_time_range}}"
