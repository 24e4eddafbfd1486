"""Read a board as parsed JSON: its panels, variables and queries, and the selectors of a query."""

from collections.abc import Iterator
from typing import Any

import promql_parser

Board = dict[str, Any]
Panel = dict[str, Any]

RATE_INTERVAL = "7m13s"  # no interval that anybody would write


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
