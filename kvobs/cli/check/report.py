"""Render a checked configuration as text and as JSON, for ``kvobs check``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli import topology
from kvobs.cli.check.check import Checked, CheckedConnector
from kvobs.cli.check.live import Looked
from kvobs.cli.check.source import Router
from kvobs.cli.output import count
from kvobs.schema import __version__
from kvobs.schema.findings import Finding
from kvobs.vllm_api.hooks import HOOKS, Cadence

if TYPE_CHECKING:
    from kvobs.cli.check.classes import Facts

_VLLMS = "vllm.distributed.kv_transfer.kv_connector.v1."
_PER_LAYER = ("wait_for_layer_load", "save_kv_layer")


def lay_out_text(checked: Checked) -> Group:
    """Return the results of the text: router, connectors, properties, disabled features, who reads from whom."""
    parts: list[RenderableType] = []
    if checked.connectors:
        parts = [Text(_headline(checked)), Text(), _connectors(checked.connectors, _entry_rows), Text()]
        parts += [_pairs(_together(checked), "together"), Text(), _pairs(checked.off, "off", "why"), Text()]
    if checked.engines is not None:
        parts += [topology.lay_out(checked.engines), Text()]
    return Group(*parts)


def lay_out_classes(checked: Checked, printed: Collection[str] = ()) -> Group:
    """Return the results of the classes: properties, consequences, disabled features beyond those already printed."""
    if not any(connector.facts for connector in checked.connectors):
        return Group()
    off = {feature: why for feature, why in checked.off.items() if feature not in printed}
    parts: list[RenderableType] = [Text(), _connectors(checked.connectors, _class_rows), Text()]
    parts += [_pairs(_of_classes(checked), "of the classes together"), Text()]
    parts += [_pairs(off, "off", "why"), Text()] if off else []
    return Group(*parts)


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


def verdict(checked: Checked | Looked) -> Text:
    """Return the last line: the number of mistakes and warnings, and whether classes were left out."""
    mistakes, warnings = len(checked.mistakes), len(checked.warnings)
    parts = [count(mistakes, "mistake") if mistakes else "no mistakes"]
    if warnings:
        parts.append(count(warnings, "warning"))
    has_gap = isinstance(checked, Checked) and "classes" in checked.off
    gap = "; the connectors' classes were not checked" if has_gap else ""
    return Text(", ".join(parts) + gap, style="bold red" if mistakes else "bold green")


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
        "readers": {} if checked.engines is None else topology.as_dict(checked.engines),
        "mistakes": [asdict(finding) for finding in checked.mistakes],
        "warnings": [asdict(finding) for finding in checked.warnings],
    }


def _headline(checked: Checked) -> str:
    version = f"vLLM {checked.vllm}" if checked.vllm else "vLLM (not installed here)"
    between = f"{version} and {count(len(checked.connectors), 'connector')}"
    if checked.router is Router.KVOBS:
        by = ", enabled by KVOBS_ENABLE in this environment" if checked.by_variable else ""
        return f"kvobs {__version__} routes between {between}{by}."
    return f"kvobs is not in this configuration. With --rewrite it would route between {between}:"


def _connectors(connectors: Sequence[CheckedConnector], rows_of: Callable[[CheckedConnector], dict[str, str]]) -> Table:
    out = _table("", *(Text(connector.name) for connector in connectors))
    columns = [rows_of(connector) for connector in connectors]
    for row in max(columns, key=len):
        out.add_row(row, *(Text(column.get(row, "?"), overflow="fold") for column in columns))
    return out


def _entry_rows(connector: CheckedConnector) -> dict[str, str]:
    return {
        "kv_connector": connector.kv_connector,
        "kv_role": connector.kv_role or "?",
        "best-effort": _yes(connector.is_isolated),
    }


def _class_rows(connector: CheckedConnector) -> dict[str, str]:
    facts = connector.facts
    if facts is None:
        return {}
    module, _, name = facts.class_path.rpartition(".")
    in_step = [hook for hook in facts.empty_hooks if HOOKS[hook].cadence in (Cadence.STEP, Cadence.LAYER)]
    return {
        "class": name,
        "module": module.replace(_VLLMS, "vllm...v1."),
        "package": facts.package or "?",
        "library": facts.library or "none",
        "hybrid KV cache manager": _yes(facts.supports_hma),
        "sleep mode": "not used by this vLLM" if facts.supports_sleep_mode is None else _yes(facts.supports_sleep_mode),
        "piecewise CUDA graphs": "needed" if facts.requires_piecewise else "not needed",
        "KV cache layout": _layout(facts),
        "handshake": _yes(facts.has_handshake),
        "requires KV delivery": _yes(facts.must_deliver),
        "called per layer": ", ".join(hook for hook in _PER_LAYER if hook in facts.busy_hooks) or "nothing",
        "hooks not implemented": f"{len(facts.empty_hooks)} of {len(facts.empty_hooks + facts.busy_hooks)}",
        "of these, once a step": ", ".join(hook for hook in in_step if hook not in _PER_LAYER) or "none",
    }


def _layout(facts: Facts) -> str:
    plain, mla = (layout or "any" for layout in facts.layouts)
    return plain if plain == mla else f"{plain}, {mla} with MLA"


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
        "best-effort": ", ".join(options.isolate) or "none",
        "tracing": checked.tracing,
        "metrics go to": checked.metrics_go_to,
        "spans go to": checked.spans_go_to,
    }


def _of_classes(checked: Checked) -> dict[str, str]:
    piecewise, delivering = checked.with_fact("requires_piecewise", True), checked.with_fact("must_deliver", True)
    layouts = sorted(set(checked.layouts(is_mla=False).values()))
    return {
        "CUDA graphs": f"piecewise, for {', '.join(piecewise)}"
        if piecewise
        else "vLLM's choice; full graphs do not replay per-layer hooks, so these are not observed",
        "KV cache layout": " or ".join(layouts) or "any",
        "requires KV delivery": ", ".join(delivering) or "none",
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


def _yes(answer: bool | None) -> str:
    return "?" if answer is None else "yes" if answer else "no"
