"""Render a checked configuration as text and as JSON, for ``kvobs check``."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli.check.check import CheckResult, ConnectorResult
from kvobs.cli.check.live import LiveResult
from kvobs.cli.check.rewrite import Router
from kvobs.cli.output import count
from kvobs.schema import __version__
from kvobs.schema.findings import Finding


def lay_out_text(result: CheckResult) -> Group:
    """Return the results of the text: router, connectors, properties, disabled features."""
    parts: list[RenderableType] = []
    if result.connectors:
        parts = [Text(_headline(result)), Text(), _connectors(result.connectors), Text()]
        parts += [_pairs(_together(result), "together"), Text(), _pairs(result.off, "off", "why"), Text()]
    return Group(*parts)


def lay_out_classes(result: CheckResult, printed: Collection[str] = ()) -> Group:
    """Return the results of the classes: disabled features beyond those already printed."""
    off = {feature: why for feature, why in result.off.items() if feature not in printed}
    return Group(Text(), _pairs(off, "off", "why"), Text()) if off else Group()


def lines(result: CheckResult | LiveResult, printed: Container[Finding] = ()) -> Iterator[Text]:
    """Yield a line for each finding that is not printed yet, with its fix."""
    kinds = (("warning", "yellow", result.warnings), ("unknown", "cyan", result.unknown))
    for title, style, findings in (*kinds, ("mistake", "red", result.mistakes)):
        for finding in findings:
            if finding not in printed:
                text = Text(f"{title}: {finding}")
                text.stylize(style, 0, len(f"{title}: {finding.path}:"))
                yield text


def lay_out_live(result: LiveResult) -> Group:
    return Group(*(part for where, facts in result.facts.items() for part in (_pairs(facts, where), Text())))


def verdict(*results: CheckResult | LiveResult) -> Text:
    """Return the last line: the number of findings of each kind, and whether classes were left out."""
    kinds = ("mistakes", "warnings", "unknown")
    mistakes, warnings, unknown = (sum(len(getattr(each, kind)) for each in results) for kind in kinds)
    parts = [count(mistakes, "mistake") if mistakes else "no mistakes"]
    if unknown:
        parts.append(f"{unknown} not known here")
    if warnings:
        parts.append(count(warnings, "warning"))
    has_gap = any(isinstance(each, CheckResult) and "classes" in each.off for each in results)
    gap = "; the connectors' classes were not checked" if has_gap else ""
    engines = f"{count(len(results), 'engine')}: " if len(results) > 1 else ""
    color = "red" if mistakes else "cyan" if unknown else "green"
    return Text(engines + ", ".join(parts) + gap, style=f"bold {color}")


def as_dict(result: CheckResult) -> dict[str, Any]:
    """Return the output as plain data; None: unknown without building the connector, or without vLLM."""
    same = ("vllm", "failure_policy", "tracing", "metrics_go_to", "spans_go_to", "off")
    lists = ("connectors", "mistakes", "warnings", "unknown")
    return {
        "kvobs": __version__,
        "is_routed_by_kvobs": None if result.unknown else result.router is Router.KVOBS,
        "options": result.options.model_dump(mode="json"),
        **{name: getattr(result, name) for name in same},
        **{name: [asdict(each) for each in getattr(result, name)] for name in lists},
    }


def _headline(result: CheckResult) -> str:
    version = f"vLLM {result.vllm}" if result.vllm else "vLLM (not installed here)"
    between = f"{version} and {count(len(result.connectors), 'connector')}"
    if result.router is Router.KVOBS:
        by = ", enabled by KVOBS_ENABLE" if result.by_variable else ""
        return f"kvobs {__version__} routes between {between}{by}."
    return f"kvobs is not in this configuration. With --rewrite it would route between {between}:"


def _connectors(connectors: Sequence[ConnectorResult]) -> Table:
    out = _table("", *(Text(connector.name) for connector in connectors))
    for row in ("kv_connector", "kv_role"):
        out.add_row(row, *(Text(getattr(connector, row) or "?", overflow="fold") for connector in connectors))
    out.add_row("best-effort", *("yes" if connector.is_isolated else "no" for connector in connectors))
    return out


_LOADS_FROM = {
    "first": "the first connector with a hit",
    "longest": "the connector with the longest hit",
}


def _together(result: CheckResult) -> dict[str, str]:
    options = result.options
    return {
        "loads from": _LOADS_FROM[options.load_policy],
        "a failed load": f"{'is recomputed' if result.failure_policy == 'recompute' else 'fails its request'} "
        f"(kv_load_failure_policy {result.failure_policy})",
        "tracing": result.tracing,
        "metrics go to": result.metrics_go_to,
        "spans go to": result.spans_go_to,
    }


def _pairs(rows: Mapping[str, str], *heads: str) -> Table:
    out = _table(*heads, *([""] * (2 - len(heads))))
    for name, text in rows.items():
        out.add_row(name, Text(text))
    return out


def _table(*heads: str | Text) -> Table:
    out = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        out.add_column(head, vertical="top", overflow="fold")
    return out
