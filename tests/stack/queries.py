"""The queries of generated boards: out of their JSON, with Grafana's variables filled in, and what they must find."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql

from tests.support.boards import panels

RATE_INTERVAL = "20s"
VARIABLES = {"__rate_interval": RATE_INTERVAL, "__interval": "2s", "cluster": ".*"}
OPTIONAL = frozenset({"cluster", "namespace", "pod"})
"""Labels that some sites have."""
NOBODY = "none"
"""What boards call the guilty connector where there is none."""
ALL = ".+"
"""What the boards' own variables stand for when "All" is chosen."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|([A-Za-z_]\w*))")  # $1 is a group of label_replace
_COMBINED = {"topk", "bottomk", "limitk"}  # aggregations that keep their input's labels

Found = Sequence[Mapping[str, Any]]
"""Series as Prometheus's API gives them."""


@dataclass(frozen=True)
class Target:
    """One query of one panel."""

    board: str
    panel: str
    ref: str
    query: str
    legend: str
    is_instant: bool
    has_exemplars: bool

    def __str__(self) -> str:
        return f"{self.board}: {self.panel} ({self.ref})"


def boards(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the boards in a folder by their uid."""
    return {board["uid"]: board for board in (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))}


def targets(board: dict[str, Any]) -> Iterator[Target]:
    """Yield every query for Prometheus: those for Tempo have no ``expr``."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            if "expr" in target:
                query, legend = filled(target["expr"]), target.get("legendFormat") or ""
                flags = bool(target.get("instant")), bool(target.get("exemplar"))
                yield Target(board["uid"], panel["title"], target["refId"], query, legend, *flags)


def filled(query: str) -> str:
    """Return a query with Grafana's variables filled in, the boards' own as if all were chosen."""
    return _VARIABLE.sub(lambda found: VARIABLES.get(found[1] or found[2], ALL), query)


def labels_of(query: str) -> frozenset[str] | None:
    """Return the labels that a query's result has; None where they are those of its series."""
    return _labels(promql.parse(query))


def _labels(expr: Any) -> frozenset[str] | None:
    match expr:
        case promql.AggregateExpr(modifier=None):
            return _labels(expr.expr) if str(expr.op) in _COMBINED else frozenset()
        case promql.AggregateExpr(modifier=promql.AggModifier(type=promql.AggModifierType.By, labels=labels)):
            return frozenset(labels)
        case promql.ParenExpr() | promql.UnaryExpr():
            return _labels(expr.expr)
        case promql.BinaryExpr():
            kept = _labels(expr.rhs if _is_scalar(expr.lhs) else expr.lhs)
            joined = expr.modifier.group_labels if expr.modifier else None
            return None if kept is None else kept | set(joined or ())
        case promql.Call(args=[*_, of]) if expr.func.name == "histogram_quantile":
            inner = _labels(of)
            return None if inner is None else inner - {"le"}
        case _:
            return None


def _is_scalar(expr: Any) -> bool:
    return isinstance(expr, promql.NumberLiteral) or (isinstance(expr, promql.Call) and not expr.args)


def faults(found: Found, labels: frozenset[str] | None, legend: str = "") -> list[str]:
    """Say what is wrong with the series that a query found: none, not finite, or with other labels than expected.

    A gap (NaN) is none as long as a series has something else to show; infinity is never right.
    """
    wrong = [] if found else ["no series"]
    # An alert may be about an engine as a whole, or about an instance that answers nothing.
    optional = OPTIONAL | {"connector", "engine"} if labels and "alertname" in labels else OPTIONAL
    for series in found:
        values = [float(value) for _, value in series.get("values") or [series["value"]]]
        has = frozenset(series["metric"]) - {"__name__"}
        if any(map(math.isinf, values)):
            wrong.append(f"infinite: {dict(series['metric'])}")
        if not any(map(math.isfinite, values)):
            wrong.append(f"never a number: {dict(series['metric'])}")
        if series["metric"].get("connector") == NOBODY:
            continue
        if labels is not None and has - optional != labels - optional:
            wrong.append(f"labels {sorted(has)} instead of {sorted(labels)}")
        if missing := set(re.findall(r"{{\s*(\w+)\s*}}", legend)) - has - optional:
            wrong.append(f"no {sorted(missing)} for the legend {legend!r}")
    return wrong
