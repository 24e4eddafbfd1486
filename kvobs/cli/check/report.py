"""Render a checked configuration as text and as JSON, for ``kvobs check``."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli.check.check import Checked, CheckedConnector
from kvobs.cli.check.live import Looked
from kvobs.cli.check.source import Router
from kvobs.cli.output import count
from kvobs.schema import __version__
from kvobs.schema.findings import Finding


def lay_out_text(checked: Checked) -> Group:
    """Return the results of the text: router, connectors, properties, disabled features."""
    parts: list[RenderableType] = []
    if checked.connectors:
        parts = [Text(_headline(checked)), Text(), _connectors(checked.connectors), Text()]
        parts += [_pairs(_together(checked), "together"), Text(), _pairs(checked.off, "off", "why"), Text()]
    return Group(*parts)


def lay_out_classes(checked: Checked, printed: Collection[str] = ()) -> Group:
    """Return the results of the classes: disabled features beyond those already printed."""
    off = {feature: why for feature, why in checked.off.items() if feature not in printed}
    return Group(Text(), _pairs(off, "off", "why"), Text()) if off else Group()


def lines(warnings: Iterable[Finding], mistakes: Iterable[Finding], printed: Container[Finding] = ()) -> Iterator[Text]:
    """Yield a line for each warning and mistake that is not printed yet, with its fix."""
    for findings, title, style in ((warnings, "warning", "yellow"), (mistakes, "mistake", "red")):
        for finding in findings:
            if finding not in printed:
                text = Text(f"{title}: {finding}")
                text.stylize(style, 0, len(f"{title}: {finding.path}:"))
                yield text


def lay_out_live(looked: Looked) -> Group:
    return Group(*(part for where, facts in looked.facts.items() for part in (_pairs(facts, where), Text())))


def verdict(*checked: Checked | Looked) -> Text:
    """Return the last line: the number of mistakes and warnings, and whether classes were left out."""
    mistakes, warnings = (sum(len(getattr(each, kind)) for each in checked) for kind in ("mistakes", "warnings"))
    parts = [count(mistakes, "mistake") if mistakes else "no mistakes"]
    if warnings:
        parts.append(count(warnings, "warning"))
    has_gap = any(isinstance(each, Checked) and "classes" in each.off for each in checked)
    gap = "; the connectors' classes were not checked" if has_gap else ""
    engines = f"{count(len(checked), 'engine')}: " if len(checked) > 1 else ""
    return Text(engines + ", ".join(parts) + gap, style="bold red" if mistakes else "bold green")


def as_dict(checked: Checked) -> dict[str, Any]:
    """Return the output as plain data; None: unknown without building the connector, or without vLLM."""
    return {
        "kvobs": __version__,
        "vllm": checked.vllm,
        "is_routed_by_kvobs": checked.router is Router.KVOBS,
        "connectors": [asdict(connector) for connector in checked.connectors],
        "failure_policy": checked.failure_policy,
        "tracing": checked.tracing,
        "metrics_go_to": checked.metrics_go_to,
        "spans_go_to": checked.spans_go_to,
        "options": checked.options.model_dump(mode="json"),
        "off": checked.off,
        "mistakes": [asdict(finding) for finding in checked.mistakes],
        "warnings": [asdict(finding) for finding in checked.warnings],
    }


def _headline(checked: Checked) -> str:
    version = f"vLLM {checked.vllm}" if checked.vllm else "vLLM (not installed here)"
    between = f"{version} and {count(len(checked.connectors), 'connector')}"
    if checked.router is Router.KVOBS:
        by = ", enabled by KVOBS_ENABLE" if checked.by_variable else ""
        return f"kvobs {__version__} routes between {between}{by}."
    return f"kvobs is not in this configuration. With --rewrite it would route between {between}:"


def _connectors(connectors: Sequence[CheckedConnector]) -> Table:
    out = _table("", *(Text(connector.name) for connector in connectors))
    for row in ("kv_connector", "kv_role"):
        out.add_row(row, *(Text(getattr(connector, row) or "?", overflow="fold") for connector in connectors))
    out.add_row("best-effort", *("yes" if connector.is_isolated else "no" for connector in connectors))
    return out


_LOADS_FROM = {
    "first": "the first connector with a hit",
    "longest": "the connector with the longest hit",
    "fastest": "the connector that is predicted to be the fastest, or none",
}


def _together(checked: Checked) -> dict[str, str]:
    options = checked.options
    return {
        "loads from": _LOADS_FROM[options.load_policy],
        "a failed load": f"{'is recomputed' if checked.failure_policy == 'recompute' else 'fails its request'} "
        f"(kv_load_failure_policy {checked.failure_policy})",
        "tracing": checked.tracing,
        "metrics go to": checked.metrics_go_to,
        "spans go to": checked.spans_go_to,
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
