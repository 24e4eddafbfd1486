"""Print a comparison: a table side by side, what the numbers leave out, or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvobs.cli import table
from kvobs.cli.units import clock, duration
from kvobs.cli.whatif.comparison import P50, P95, Column, Comparison
from kvobs.cli.whatif.replay import Settings

HEADS = ("", "was", "model", "what if")
LEGEND = "model: predicted for the recorded settings; how far it is off is its own error"

Number = Callable[[Column], str]


def headline(found: Comparison, recorded: Settings, other: Settings) -> list[str]:
    """Return which settings are compared, and when the lookups were."""
    times = f"{clock(found.began_ns)} to {clock(found.ended_ns)}" if found.lookups else "no lookups"
    return [f"was      {said(recorded)}; {times}", f"what if  {said(other)}"]


def said(settings: Settings) -> str:
    """Return the settings that decide, in one line."""
    options = settings.options
    parts = [f"load_policy {options.load_policy}", f"connectors {', '.join(settings.order)}"]
    if options.wait_for != "all":
        parts.append(f"wait_for {options.wait_for}")
    if options.min_tokens:
        parts.append("min_tokens " + ", ".join(f"{name}={n:,}" for name, n in options.min_tokens.items()))
    if options.lookup_timeout_ms is not None:
        parts.append(f"lookup_timeout_ms {options.lookup_timeout_ms:g}")
    return "; ".join(parts)


def lines(found: Comparison, connectors: Sequence[str]) -> list[str]:
    """Return the table."""
    columns = (found.was, found.model, found.what_if)
    rows: list[tuple[str, Number]] = [
        ("loads", lambda column: f"{column.loads:,}"),
        ("tokens loaded", lambda column: f"{column.tokens.total():,}"),
        *((f"  {name}", lambda column, name=name: f"{column.tokens[name]:,}") for name in connectors),
        ("computing saved", lambda column: duration(column.saved_s)),
        ("waited for loads", lambda column: duration(column.waited_s)),
        ("net gain", lambda column: _signed(column.saved_s - column.waited_s)),
        ("first token, p50", lambda column: duration(column.first_token_s(P50))),
        ("first token, p95", lambda column: duration(column.first_token_s(P95))),
    ]
    cells = [(title, *(number(column) for column in columns)) for title, number in rows]
    return table.lines(HEADS, cells, texts=("",))


def coverage(found: Comparison) -> list[str]:
    """Return what the numbers are about, and what they leave out."""
    said = [
        LEGEND,
        f"offers known for {found.known:,} of {found.lookups:,} lookups{_of(': nobody waited for', found.unknown)}",
        f"another choice in {found.changed:,} of them",
    ]
    if found.repeated < found.known:
        said.append(f"the replay of the recorded settings chooses as recorded in {found.repeated:,} of them only")
    lacking = _of(": no load is recorded of", found.unpredicted)
    if found.unestimated:
        lacking += f"{';' if lacking else ':'} no estimate of computing yet ({found.unestimated:,})"
    said.append(f"first token predicted for {found.predicted:,} of {found.requests:,} requests{lacking}")
    return said


def _of(text: str, names: Counter[str]) -> str:
    return f"{text} {', '.join(f'{name} ({n:,})' for name, n in names.most_common())}" if names else ""


def _signed(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"-{duration(-seconds)}"


def as_dict(found: Comparison, recorded: Settings, other: Settings) -> dict[str, Any]:
    """Return the comparison as ``--json`` prints it; null: unknown."""
    return {
        "from": found.began_ns / 1e9,
        "to": found.ended_ns / 1e9,
        "settings": {"was": _settings(recorded), "what_if": _settings(other)},
        "lookups": {
            "recorded": found.lookups,
            "known": found.known,
            "unknown": dict(found.unknown),
            "repeated": found.repeated,
            "changed": found.changed,
        },
        "requests": {
            "recorded": found.requests,
            "predicted": found.predicted,
            "without_loads": dict(found.unpredicted),
            "without_estimate": found.unestimated,
        },
        "was": _column(found.was),
        "model": _column(found.model),
        "what_if": _column(found.what_if),
    }


def _settings(settings: Settings) -> dict[str, Any]:
    options = settings.options.model_dump(mode="json", include={*_DECIDING})
    return {"connectors": list(settings.order), **options}


_DECIDING = ("load_policy", "wait_for", "lookup_timeout_ms", "min_tokens")


def _column(column: Column) -> dict[str, Any]:
    return {
        "loads": column.loads,
        "tokens": column.tokens.total(),
        "tokens_by_connector": dict(column.tokens),
        "saved_s": column.saved_s,
        "waited_s": column.waited_s,
        "first_token_p50_s": column.first_token_s(P50),
        "first_token_p95_s": column.first_token_s(P95),
    }
