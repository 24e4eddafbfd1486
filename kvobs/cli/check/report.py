"""Render a checked configuration as text and as JSON, for ``kvobs check``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli import topology
from kvobs.cli.check.check import Checked, CheckedConnector
from kvobs.cli.check.facts import Facts
from kvobs.cli.check.live import Looked
from kvobs.cli.check.rewrite import Router
from kvobs.findings import Finding
from kvobs.hooks import HOOKS, Cadence
from kvobs.version import __version__

_VLLMS = "vllm.distributed.kv_transfer.kv_connector.v1."
_PER_LAYER = ("wait_for_layer_load", "save_kv_layer")


def lay_out_text(checked: Checked) -> Group:
    """Return what the text of a configuration says: router, connectors, properties, disabled features, who reads."""
    parts: list[RenderableType] = []
    if checked.children:
        parts = [Text(_headline(checked)), Text(), _children(checked.children, _entry_rows), Text()]
        parts += [_pairs(_together(checked), "together"), Text(), _pairs(checked.off, "off", "why"), Text()]
    if checked.engines is not None:
        prefill, decode, heads, is_mla = checked.engines
        parts += [topology.lay_out(prefill, decode, heads, is_mla=is_mla), Text()]
    return Group(*parts)


def lay_out_classes(checked: Checked, known_off: Collection[str] = ()) -> Group:
    """Return what the classes say: their properties, what follows from them, features off beyond those known."""
    if not any(child.facts for child in checked.children):
        return Group()
    off = {what: why for what, why in checked.off.items() if what not in known_off}
    parts: list[RenderableType] = [Text(), _children(checked.children, _class_rows), Text()]
    parts += [_pairs(_of_classes(checked), "of the classes together"), Text()]
    if off:
        parts += [_pairs(off, "off", "why"), Text()]
    return Group(*parts)


def lines(warnings: Iterable[Finding], mistakes: Iterable[Finding]) -> Iterator[Text]:
    """Yield a line for each warning and mistake, with its fix."""
    for findings, title, style in ((warnings, "warning", "yellow"), (mistakes, "mistake", "red")):
        for finding in findings:
            text = Text(f"{title}: {finding}")
            text.stylize(style, 0, len(f"{title}: {finding.path}:"))
            yield text


def lay_out_live(looked: Looked) -> Group:
    """Return what was seen of running servers, and of Prometheus."""
    return Group(*(part for where, facts in looked.facts.items() for part in (_pairs(facts, where), Text())))


def verdict(checked: Checked | Looked) -> Text:
    """Return the last line: how many mistakes and warnings there are, and whether all could be checked."""
    mistakes, warnings = len(checked.mistakes), len(checked.warnings)
    parts = [f"{mistakes} mistake{'' if mistakes == 1 else 's'}" if mistakes else "no mistakes"]
    if warnings:
        parts.append(f"{warnings} warning{'' if warnings == 1 else 's'}")
    unseen = (
        "" if not isinstance(checked, Checked) or checked.has_classes else "; the connectors' classes were not checked"
    )
    return Text(", ".join(parts) + unseen, style="bold red" if mistakes else "bold green")


def as_dict(checked: Checked) -> dict[str, Any]:
    """Return the output as plain data; None: unknown without building the connector, or without vLLM."""
    readers = {} if checked.engines is None else topology.as_dict(*checked.engines[:3], is_mla=checked.engines.is_mla)
    return {
        "kvobs": __version__,
        "vllm": checked.vllm,
        "is_routed_by_kvobs": checked.router is Router.KVOBS,
        "children": [asdict(child) for child in checked.children],
        "failure_policy": checked.failure_policy,
        "tracing": checked.tracing,
        "metrics_go_to": checked.metrics_go_to,
        "spans_go_to": checked.spans_go_to,
        "options": checked.options.model_dump(mode="json"),
        "off": checked.off,
        "readers": readers,
        "mistakes": [asdict(finding) for finding in checked.mistakes],
        "warnings": [asdict(finding) for finding in checked.warnings],
    }


def _headline(checked: Checked) -> str:
    version = f"vLLM {checked.vllm}" if checked.vllm else "vLLM (not installed here)"
    count = f"{len(checked.children)} connector{'' if len(checked.children) == 1 else 's'}"
    if checked.router is Router.KVOBS:
        by = ", enabled by KVOBS_ENABLE in this environment" if checked.by_variable else ""
        return f"kvobs {__version__} routes between {version} and {count}{by}."
    return f"kvobs is not in this configuration. With --rewrite it would route between {version} and {count}:"


def _children(children: Sequence[CheckedConnector], rows_of: Callable[[CheckedConnector], dict[str, str]]) -> Table:
    out = _table("", *(Text(child.name) for child in children))
    columns = [rows_of(child) for child in children]
    for row in max(columns, key=len):
        out.add_row(row, *(Text(column.get(row, "?"), overflow="fold") for column in columns))
    return out


def _entry_rows(child: CheckedConnector) -> dict[str, str]:
    """Return what a connector's entry says, as row name -> text."""
    return {
        "kv_connector": child.kv_connector,
        "kv_role": child.kv_role or "?",
        "best-effort": _yes(child.is_isolated),
    }


def _class_rows(child: CheckedConnector) -> dict[str, str]:
    """Return what a connector's class says, as row name -> text."""
    facts = child.facts
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
    piecewise, delivering = checked.saying("requires_piecewise", True), checked.saying("must_deliver", True)
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
    for what, says in rows.items():
        out.add_row(what, Text(says))
    return out


def _table(*heads: str | Text) -> Table:
    out = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        out.add_column(head, vertical="top", overflow="fold")
    return out


def _yes(answer: bool | None, otherwise: str = "?") -> str:
    return otherwise if answer is None else "yes" if answer else "no"
