"""Read a board as parsed JSON; what every board of ours must keep: each check returns what it finds, or nothing.

Metrics of vLLM and of the process come from another scrape job than kvobs's, so they carry no job, and with
the exporter those of vLLM come from another port, so they carry no instance (``Selection.beside`` says whose they are).
Some alerts are about no single target, so ``ALERTS`` may have no job or instance. A collector serves many engines, and
is a separate target (``questions.collector_losses``), as is a store of several engines.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser

from dashboards.sdk import units
from kvobs.schema.signals import SIGNALS, Kind, Scope
from kvobs.schema.spans import ATTRIBUTES, SPANS, Reason

Board = dict[str, Any]
Panel = dict[str, Any]
RATE_INTERVAL = "7m13s"  # no interval that anybody would write
MOST_QUERIES = 36
TWO_SENTENCES = re.compile(r"(?:(?![.!?]\s).)+\. (?:(?![.!?]\s).)+\.")
LONGEST_HELP = 300
UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}
WITH_UNITS = {"stat", "timeseries", "table", "gauge", "bargauge", "heatmap", "state-timeline"}
SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.COUNTER: ("",), Kind.GAUGE: ("",)}
QUERIED = {signal.name + suffix: signal for signal in SIGNALS for suffix in SUFFIXES[signal.kind]}
NOT_OURS = {
    *(f"vllm[:_]{name}" for name in (
        "prompt_tokens_total", "prompt_tokens_by_source_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "request_queue_time_seconds_bucket", "num_requests_waiting",
        "request_prefill_time_seconds_bucket", "num_requests_running", "kv_cache_usage_perc",
        "kv_offload_cpu_cache_usage_perc", "simple_kv_offload_used_blocks", "kv_offload_allocation_failure_total",
        "simple_kv_offload_save_outcomes_total",
    )),
    "process_start_time_seconds",
    *(f"otelcol_exporter_{what}_failed_spans{suffix}" for what in ("send", "enqueue") for suffix in ("", "_total")),
    *(f"lmcache[:_]{name}" for name in (
        "local_cache_usage", "local_storage_usage", "pinned_memory_objs_count", "local_cpu_evict_keys_count_total",
    )),
    *(f"lmcache_mp_{name}" for name in (
        "l1_memory_usage_bytes", "l2_usage_bytes", "l1_evicted_chunks_total", "l2_evicted_objects_chunks_total",
    )),
    *(f"master_{name}" for name in (
        "allocated_bytes", "total_capacity_bytes", "allocated_file_size_bytes", "total_file_capacity_bytes",
        "evicted_size_bytes",
    )),
    "ALERTS", "up",
}  # fmt: skip
OF_ONE_ROLE = {"=kv_producer", "=kv_consumer"}
"""An engine is of this role by any connector, whichever are chosen."""
ANY_CONNECTOR = "=~.+"


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
        for index in (*inside, *getattr(node, "args", ())):
            if isinstance(index, promql_parser.Expr):
                visit(index, [*around, node])

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


def series(board: Board) -> list[Panel]:
    return [panel for panel in panels(board) if panel["type"] == "timeseries"]


def of_tempo(board: Board) -> list[Panel]:
    return [panel for panel in panels(board) if panel["datasource"]["type"] == "tempo"]


def asked(board: Board) -> Iterator[tuple[str, promql_parser.VectorSelector]]:
    for where, expr in queries(board):
        for selector, _ in selectors(expr):
            yield where, selector


def ids(board: Board) -> list[str]:
    found = [panel["id"] for outer in board["panels"] for panel in (outer, *outer.get("panels", ()))]
    return [f"id {number} twice" for number in sorted({n for n in found if found.count(n) > 1})]


def sources(board: Board) -> list[str]:
    """Nothing hard-coded, nothing asked for at import."""
    text = json.dumps({**board, "uid": ""})
    chosen = {f"${{{v['name']}}}" for v in variables(board, "datasource") if v["name"] == f"{v['query']}_datasource"}
    used = set(re.findall(r'"uid": "([^"]+)"', text)) - chosen
    return [f"data source {uid}" for uid in sorted(used)] + [key for key in ("__inputs", "__requires") if key in board]


def selections(board: Board) -> list[str]:
    """Every selector follows every variable that its metric has a label for."""
    wrong = []
    for where, selector in asked(board):
        signal = QUERIED.get(metric(selector))
        labels = ["instance"] if metric(selector).startswith("process_") else ["model_name", "engine"]
        labels = ["job"] if metric(selector) == "up" else labels  # an instance that is gone can't be chosen
        labels = [] if metric(selector).startswith(("otelcol_", "lmcache", "master_")) else labels
        labels += ["job", "instance"] if signal else []
        of = matchers(selector)
        is_about_engines = of.get("role") in OF_ONE_ROLE or of.get("connector") == ANY_CONNECTOR
        labels += ["connector"] if signal and signal.scope is Scope.CONNECTOR and not is_about_engines else []
        labels += ["cluster"]
        or_none = ""
        if metric(selector) == "ALERTS":  # not all have all labels
            labels, or_none = ["cluster", "job", "instance", "model_name", "engine", "connector"], "|"
        missing = [label for label in labels if of.get(label) != f"=~${label}{or_none}"]
        wrong += [f"{where}: {metric(selector)} without {', '.join(missing)}"] if missing else []
    return wrong


def first_load(board: Board) -> list[str]:
    """As many queries as a browser and a Prometheus answer at once: rows that are closed ask later."""
    count = sum(len(panel.get("targets", ())) for panel in board["panels"])
    return [] if count <= MOST_QUERIES else [f"{count} queries on first load"]


def registered(board: Board) -> list[str]:
    """Patterns of names stand in the table as they are written."""
    return [f"{where}: {metric(s)}" for where, s in asked(board) if metric(s) not in QUERIED.keys() | NOT_OURS]


def panel_units(board: Board) -> list[str]:
    """A panel has queries, and says in which unit they answer, by a name that Grafana knows."""
    wrong = [f"{panel['title']} asks nothing" for panel in panels(board) if not panel.get("targets")]
    for panel in panels(board):
        config = panel["fieldConfig"]
        used = [config["defaults"].get("unit", "")]
        used += [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
        if panel["type"] in WITH_UNITS:
            wrong += [f"{panel['title']}: unit {unit!r} is unknown" for unit in used if unit not in UNITS]
    return wrong


def legends(board: Board) -> list[str]:
    """Every label of a series is in its name."""
    wrong = []
    for panel in series(board):
        for target in panel["targets"]:
            outermost = re.findall(r"(?:sum|max|min) by \(([^)]*)\)", target["expr"])[:1]
            labels = {label for group in outermost for label in group.split(", ")} - {"le"}
            if not labels <= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])):
                wrong.append(f"{panel['title']}: {target['legendFormat']} for {labels}")
    return wrong


def helps(board: Board) -> list[str]:
    """Every panel has a help of two whole sentences, what it shows and what to do, in one tooltip's length."""
    wrong = []
    for panel in panels(board):
        text = panel.get("description", "").partition("\n\nMetrics: ")[0]
        if not TWO_SENTENCES.fullmatch(text) or len(text) > LONGEST_HELP:
            wrong.append(f"{panel['title']}: {text}")
    return wrong


def bounded(board: Board) -> list[str]:
    wrong = []
    for panel in series(board):
        for target in panel["targets"]:
            # The worst of many is one, and so is their number.
            shown = re.sub(r"((?:max|min|count) by \(connector\)) \(.*", r"\1", target["expr"])
            groups = {label for group in re.findall(r"by \(([^)]*)\)", shown) for label in group.split(", ")}
            if groups & {"hook", "error_type", "rank", "instance"} and not target["expr"].startswith("topk(10, "):
                wrong.append(f"{panel['title']}: {groups}")
    return wrong


def traceql(board: Board) -> list[str]:
    """Spans, attributes and reasons are those that kvobs sets; a panel of one trace asks for a text variable's id."""
    boxes = {f"${{{variable['name']}}}" for variable in variables(board, "textbox")}
    wrong = [query for query in _traces(board) if query not in boxes]
    for query in (target["query"] for panel in of_tempo(board) for target in panel["targets"]):
        wrong += sorted(set(re.findall(r"\bspan\.([\w.]+)", query)) - set(ATTRIBUTES))
        wrong += sorted({name.removesuffix(" .+") for name in re.findall(r'name =~? "([^"]+)"', query)} - set(SPANS))
        reasons = {r for found in re.findall(r'reason =~? "([^"]+)"', query) for r in found.split("|")}
        wrong += sorted(reasons - set(Reason))
    return wrong


def trace_links(board: Board) -> list[str]:
    """Each row of spans leads to its trace on the board, where Viewers see it, and in Explore.

    The board keeps the rest that is chosen; ``traceIdHidden`` is what a table of spans calls the trace.
    """
    traces = _traces(board)
    if len(traces) != 1:
        return [f"{len(traces)} panels of a trace"] if of_tempo(board) else []
    (trace,) = traces
    others = [v["name"] for v in board["templating"]["list"] if v["type"] != "adhoc" and f"${{{v['name']}}}" != trace]
    kept = [f"${{{name}:queryparam}}&" for name in others]
    shown = trace.replace("${", "&var-").replace("}", "=${__data.fields.traceIdHidden}&")
    on_board = [f"/d/{board['uid']}?", *kept, shown, "${__url_time_range}"]
    in_explore = ["/explore?schemaVersion=1&panes=", "${tempo_datasource}", "${__data.fields.traceIdHidden}"]
    wrong = []
    for panel in (panel for panel in of_tempo(board) if panel["type"] == "table"):
        values = [p["value"] for o in panel["fieldConfig"]["overrides"] for p in o["properties"] if p["id"] == "links"]
        urls = [link["url"] for links in values for link in links]
        if len(urls) != 2 or not all(part in urls[0] for part in on_board) or not all(p in urls[1] for p in in_explore):
            wrong.append(f"{panel['title']}: {urls}")
    return wrong


def _traces(board: Board) -> list[str]:
    """Return the queries of panels that show one trace."""
    return [target["query"] for panel in of_tempo(board) if panel["type"] == "traces" for target in panel["targets"]]


def titles(board: Board) -> list[str]:
    """Titles that are cut on a board of 1600 pixels, less the panel's edges and the sign of its help."""
    return [p["title"] for p in panels(board) if len(p["title"]) * 7.3 > p["gridPos"]["w"] * 1600 / 24 - 68]


CHECKS: dict[str, Callable[[Board], list[str]]] = {
    check.__name__: check
    for check in (
        ids, sources, selections, first_load, registered, panel_units, legends, titles, helps, bounded, traceql,
        trace_links,
    )
}  # fmt: skip
