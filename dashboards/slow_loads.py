"""The board *Slow loads*: from slow and failed loads to their traces, and which rank was last."""

from __future__ import annotations

from dashboards import frame
from dashboards.connector_details import calls, ranks, slow_calls
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, distribution, lines
from dashboards.questions import SELECTION
from dashboards.tables import attribute, spans
from kvobs import signals
from kvobs import spans as names
from kvobs.spans import Reason, Span


def slow_loads() -> str:
    """Return the board's JSON."""
    return frame.board_text(
        frame.SLOW_LOADS,
        "kvobs / Slow loads",
        "Which loads were slow or failed, their traces, and which rank was last. The tables need Tempo; without it the "
        "metrics still work.",
        [
            Section("", [(10, [(12, _durations()), (12, _slow())])]),
            Section(
                "Traces (requires Tempo, and spans: --otlp-traces-endpoint)",
                [(8, [(24, _slow_loads())]), (8, [(12, _failed_loads()), (12, _slow_calls())])],
            ),
            Section("Ranks: who is last? (requires more than one rank)", [(8, ranks())]),
            Section("Calls: which hook is slow?", [(8, [(12, calls()), (12, slow_calls())])]),
        ],
    )


def named(span: Span) -> str:
    """Return the TraceQL condition for spans of this kind, of the chosen children."""
    name = f'name =~ "{span.name} .+"' if span.subject else f'name = "{span.name}"'
    return f'{name} && {attribute(names.CONNECTOR)} =~ "${{connector:pipe}}"'


def _durations() -> Panel:
    return distribution(
        "Which loads were slow? Points are traces",
        About(
            "Loads that ended well, by duration; each point is a load with a trace.",
            "Points far above the dark band are the ones to open.",
            "Click a point, then 'Query with Tempo'. Choose one child above: several are added up here.",
            "Not every load has a point: one for each bucket and scrape at most, and only exported traces.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _slow() -> Panel:
    return lines(
        "Whose loads are slow? (p99)",
        About(
            "p99 of load durations by child and mode; the points are exemplars.",
            "The line that rises is the child to look at.",
            "Click a point for its trace.",
            "Values lie within a bucket, a factor of two wide.",
        ),
        Query(SELECTION.quantile(0.99, signals.LOAD_DURATION, "connector", "mode"), "{{connector}} {{mode}}"),
        unit="s",
        exemplars=True,
    )


def _slow_loads() -> Panel:
    return spans(
        "Slow loads",
        About(
            "Loads that took longer than slow_load_ms, as spans.",
            "Rank skew near the duration: one rank was late, and the column beside it says which.",
            "Click a name for its trace: kv.load.rank shows each rank, kv.lookup what was offered.",
            "Slow loads are exported always, others as sampled: count in metrics, not here.",
        ),
        f'{{ {named(names.LOAD)} && {attribute(names.REASON)} = "{Reason.SLOW}" }}',
        {
            names.CONNECTOR: "Child",
            names.MODE: "Mode",
            names.OUTCOME: "Outcome",
            names.TOKENS: "Tokens",
            names.BYTES: "Bytes",
            names.RANK_SKEW: "Rank skew (s)",
            names.SLOWEST_RANK: "Slowest rank",
            names.ENGINE: "Engine",
            names.GEN_AI_REQUEST: "Request",
        },
    )


def _failed_loads() -> Panel:
    return spans(
        "Failed loads",
        About(
            "Loads that failed, as spans.",
            "Recomputed tokens are what the failure cost.",
            "Click a name for its trace; look for the exception among the failed calls beside this.",
            "A failed load need not be a failed request.",
        ),
        f"{{ {named(names.LOAD)} && status = error }}",
        {
            names.CONNECTOR: "Child",
            names.ERROR_TYPE: "Error",
            names.RECOMPUTED_TOKENS: "Recomputed",
            names.GEN_AI_REQUEST: "Request",
        },
    )


def _slow_calls() -> Panel:
    return spans(
        "Slow and failed calls",
        About(
            "Calls into children that took longer than slow_call_ms, or raised.",
            "Rank is the worker's; calls of the scheduler have none.",
            "Click a name for its trace, or look for the same second in the log.",
            "Calls about no request are traces of their own.",
        ),
        f'{{ {named(names.CALL)} && {attribute(names.REASON)} =~ "{Reason.SLOW}|{Reason.ERROR}" }}',
        {
            names.CONNECTOR: "Child",
            names.HOOK: "Hook",
            names.ERROR_TYPE: "Error",
            names.RANK: "Rank",
            names.ENGINE: "Engine",
        },
    )
