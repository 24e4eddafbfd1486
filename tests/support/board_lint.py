"""The rules of Grafana's dashboard-linter, for boards as parsed JSON: each returns what it finds, or nothing.

Known exceptions, each with its reason: metrics of vLLM and of the process come from another scrape job than kvobs's own
(README), so they carry no job, and with the exporter those of vLLM come from another port, so they carry no instance
(``Selection.beside`` says whose they are); a counter that is young is counted as a whole (``Selection.counted``), so it
may stand bare beside ``unless``; some alerts are about no single target, so ``ALERTS`` may have no job or instance; a
collector serves many engines, and is a target of its own (``questions.lost_in_collectors``).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser

from dashboards.sdk import units

Board = dict[str, Any]
Panel = dict[str, Any]

RATE_INTERVAL = "7m13s"  # no interval that anybody would write
FROM_ELSEWHERE = {
    "job": re.compile(r"vllm|process_start_time_seconds|otelcol_"),
    "instance": re.compile(r"vllm|otelcol_"),
}
UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}
WITH_UNITS = {"stat", "timeseries", "table", "gauge", "bargauge", "heatmap", "state-timeline"}


def panels(board: Board) -> list[Panel]:
    """Return all panels, those of closed rows too, without the rows."""
    every = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]
    return [panel for panel in every if panel["type"] != "row"]


def queries(board: Board) -> Iterator[tuple[str, str]]:
    """Return each PromQL expression with where it stands, annotations too."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            if "expr" in target:
                yield f"{panel['title']}/{target['refId']}", target["expr"]
    for annotation in board["annotations"]["list"]:
        if "expr" in annotation:
            yield f"annotation {annotation['name']}", annotation["expr"]


def parse(expr: str) -> promql_parser.Expr:
    """Parse a query with its window filled in; what is left of variables stands in texts only."""
    return promql_parser.parse(expr.replace("$__rate_interval", RATE_INTERVAL))


def selectors(expr: str) -> list[tuple[promql_parser.VectorSelector, list[promql_parser.Expr]]]:
    """Return each selector with what it stands in, the outermost first."""
    found: list[tuple[promql_parser.VectorSelector, list[promql_parser.Expr]]] = []

    def visit(node: Any, around: list[promql_parser.Expr]) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node, around))
            return
        inside = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
        for child in (*inside, *getattr(node, "args", ())):
            if isinstance(child, promql_parser.Expr):
                visit(child, [*around, node])

    visit(parse(expr), [])
    return found


def metric(selector: promql_parser.VectorSelector) -> str:
    """Return a selector's metric, or the pattern that names it."""
    return selector.name or next(m.value for m in selector.matchers.matchers if m.name == "__name__")


def matchers(selector: promql_parser.VectorSelector) -> dict[str, str]:
    """Return a selector's matchers as they are written, without the name."""
    ops = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
    return {m.name: ops[str(m.op)] + m.value for m in selector.matchers.matchers}


def variables(board: Board, kind: str) -> list[dict[str, Any]]:
    return [variable for variable in board["templating"]["list"] if variable["type"] == kind]


def template_datasource(board: Board) -> list[str]:
    sources = variables(board, "datasource")
    wrong = [
        f"data source variable {v['name']} ({v['label']}) should be {v['query']}_datasource, labelled so"
        for v in sources
        if (v["name"], v["label"]) != (f"{v['query']}_datasource", f"{v['query'].title()} data source")
    ]
    return wrong if sources else ["no data source variable"]


def _template(name: str, label: str, board: Board) -> list[str]:
    found = [v for v in variables(board, "query") if v["name"] == name]
    wanted = {
        "label": label,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "datasource": {"type": "prometheus", "uid": "${prometheus_datasource}"},
    }
    wrong = [f"variable {name}: {key} is {v.get(key)!r}" for v in found for key in wanted if v.get(key) != wanted[key]]
    return wrong if found else [f"no variable {name}"]


def template_job(board: Board) -> list[str]:
    return _template("job", "Job", board)


def template_instance(board: Board) -> list[str]:
    return _template("instance", "Instance", board)


def template_label_promql(board: Board) -> list[str]:
    wrong = []
    for variable in variables(board, "query"):
        call = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        if call is None:
            wrong.append(f"variable {variable['name']} is no label_values(metric, label)")
        else:
            wrong += _parsed(f"variable {variable['name']}", call[1])
    return wrong


def template_on_time_change_reload(board: Board) -> list[str]:
    return [f"variable {v['name']} is not read anew" for v in variables(board, "query") if v["refresh"] != 2]


def panel_datasource(board: Board) -> list[str]:
    allowed = {f"${{{variable['name']}}}" for variable in variables(board, "datasource")}
    return [
        f"{panel['title']}: data source {part.get('datasource')}"
        for panel in panels(board)
        for part in (panel, *panel.get("targets", ()))
        if part.get("datasource", {}).get("uid") not in allowed
    ]


def panel_title_description(board: Board) -> list[str]:
    return [f"{p.get('title')!r} says nothing" for p in panels(board) if not p.get("title") or not p.get("description")]


def panel_units(board: Board) -> list[str]:
    wrong = []
    for panel in panels(board):
        config = panel["fieldConfig"]
        used = [config["defaults"].get("unit", "")]
        used += [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
        if panel["type"] in WITH_UNITS:
            wrong += [f"{panel['title']}: unit {unit!r} is unknown" for unit in used if unit not in UNITS]
    return wrong


def panel_no_targets(board: Board) -> list[str]:
    return [f"{panel['title']} asks nothing" for panel in panels(board) if not panel.get("targets")]


def _parsed(where: str, expr: str) -> list[str]:
    try:
        parse(expr)
    except ValueError as error:
        return [f"{where}: {error}"]
    return []


def target_promql(board: Board) -> list[str]:
    return [finding for where, expr in queries(board) for finding in _parsed(where, expr)]


def target_rate_interval(board: Board) -> list[str]:
    return [
        f"{where}: {metric(selector)} over {window.range}"
        for where, expr in queries(board)
        for selector, around in selectors(expr)
        for window in around[-1:]
        if isinstance(window, promql_parser.MatrixSelector)
        and promql_parser.display_duration(window.range) != RATE_INTERVAL
    ]


def _target(label: str, board: Board) -> list[str]:
    return [
        f"{where}: {metric(selector)} without {label}"
        for where, expr in queries(board)
        for selector, _ in selectors(expr)
        if matchers(selector).get(label) != f"=~${label}{'|' if metric(selector) == 'ALERTS' else ''}"
        and not FROM_ELSEWHERE[label].match(metric(selector))
    ]


def target_job(board: Board) -> list[str]:
    return _target("job", board)


def target_instance(board: Board) -> list[str]:
    return _target("instance", board)


def _is_counted(around: list[Any]) -> bool:
    calls = [node.func.name for node in around if isinstance(node, promql_parser.Call)]
    is_young = any(isinstance(node, promql_parser.BinaryExpr) and str(node.op) == "unless" for node in around)
    return is_young or bool({"rate", "irate", "increase"} & set(calls))


def target_counter_agg(board: Board) -> list[str]:
    return [
        f"{where}: {metric(selector)} is a counter, and raw"
        for where, expr in queries(board)
        for selector, around in selectors(expr)
        if re.search(r"_(total|bucket|sum|count)$", metric(selector)) and not _is_counted(around)
    ]


def target_logql(board: Board) -> list[str]:
    return [f"{p['title']}: LogQL" for p in panels(board) if p.get("datasource", {}).get("type") == "loki"]


def uneditable(board: Board) -> list[str]:
    return ["the board is editable"] if board["editable"] else []


RULES: dict[str, Callable[[Board], list[str]]] = {
    rule.__name__: rule
    for rule in (
        template_datasource,
        template_job,
        template_instance,
        template_label_promql,
        template_on_time_change_reload,
        panel_datasource,
        panel_title_description,
        panel_units,
        panel_no_targets,
        target_promql,
        target_rate_interval,
        target_job,
        target_instance,
        target_counter_agg,
        target_logql,
        uneditable,
    )
}
