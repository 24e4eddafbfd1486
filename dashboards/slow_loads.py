"""The board *Slow loads*: from slow and failed loads to their traces, and which rank was last."""

from __future__ import annotations

from dashboards import frame, questions
from dashboards.frame import Board, Section
from dashboards.panels import About, Panel, distribution, lines, of_connector
from dashboards.questions import SELECTION
from dashboards.sdk import board
from dashboards.tables import TRACE_ID, attribute, spans, trace
from kvobs.schema import signals
from kvobs.schema import spans as names
from kvobs.schema.spans import Reason, Span


def slow_loads() -> Board:
    """Return the board."""
    return Board(
        frame.SLOW_LOADS,
        "kvobs / Slow loads",
        "Slow and failed loads, their traces, and the rank that was last. The tables need Tempo; the metrics work "
        "without it.",
        [
            Section("", [(10, [(12, _durations()), (12, _speed())])]),
            Section(
                "Traces (requires Tempo, and spans: --otlp-traces-endpoint)",
                [
                    (8, [(24, _slow_loads())]),
                    (8, [(12, _failed_loads()), (12, _slow_calls())]),
                    (8, [(24, _of_request())]),
                ],
            ),
            Section("Trace (requires Tempo, and a span chosen above)", [(14, [(24, _trace())])]),
        ],
        [
            board.TextBoxVariable(REQUEST).label("Request id").default_value(""),
            board.TextBoxVariable(TRACE).label("Trace id").default_value(""),
        ],
    )


REQUEST, TRACE = "request", "trace"

TO_TRACE = frame.to_board(frame.SLOW_LOADS, keeping=[frame.TEMPO_SOURCE, REQUEST], trace=TRACE_ID)


def select_span(span: Span) -> str:
    """Return the TraceQL condition for spans of this kind, of the chosen connectors."""
    name = f'name =~ "{span.name} .+"' if span.subject else f'name = "{span.name}"'
    return f'{name} && {attribute(names.CONNECTOR)} =~ "${{connector:pipe}}"'


def _durations() -> Panel:
    return distribution(
        "Load duration (points are traces)",
        About(
            "Successful loads by duration; each point is a load with a trace.",
            "Points far above the dark band are the slow loads to open.",
            "Click a point, then 'Query with Tempo'. Select one connector above: several are summed here.",
            "Not every load has a point: at most one for each bucket and scrape, and only exported traces.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _speed() -> Panel:
    return lines(
        "Throughput of a load by connector (mean)",
        About(
            "Bytes of successful loads divided by the time they took.",
            "Falling while loads get slower: the link or store is slower. Unchanged: the loads are larger.",
            "Compare with the bandwidth of the link or store, and with the other connectors.",
            "Loads that run at the same time share the link: together they may be faster than this.",
        ),
        of_connector(questions.load_speed("connector")),
        unit="Bps",
    )


def _of_request() -> Panel:
    return spans(
        "Spans of a request",
        About(
            "Spans of the requests whose id contains the text in the box 'Request id' above, the longest first.",
            "kv.lookup shows the offers, kv.load the loaded tokens and the duration.",
            "Click a name for the whole trace of the request, on this board or in Explore.",
            "If the box is empty, these are spans of any request. Only requests that were sampled, slow or failed "
            "have spans.",
        ),
        f'{{ {attribute(names.GEN_AI_REQUEST)} =~ ".*${{{REQUEST}}}.*" }}',
        {
            names.CONNECTOR: "Connector",
            names.OUTCOME: "Outcome",
            names.TOKENS: "Tokens",
            names.BYTES: "Bytes",
            names.RANK: "Rank",
            names.ERROR_TYPE: "Error",
            names.ENGINE: "Engine",
            names.GEN_AI_REQUEST: "Request",
        },
        link=TO_TRACE,
        limit=50,
    )


def _slow_loads() -> Panel:
    return spans(
        "Slow loads",
        About(
            "Loads that took longer than slow_load_ms, as spans.",
            "Rank skew close to the duration: one rank was slow, shown in the column Slowest rank.",
            "Click a name for its trace, on this board or in Explore: kv.load.rank shows each rank.",
            "Slow loads are always exported, other loads only if sampled: use metrics for counts.",
        ),
        f'{{ {select_span(names.LOAD)} && {attribute(names.REASON)} = "{Reason.SLOW}" }}',
        {
            names.CONNECTOR: "Connector",
            names.MODE: "Mode",
            names.OUTCOME: "Outcome",
            names.TOKENS: "Tokens",
            names.BYTES: "Bytes",
            names.RANK_SKEW: "Rank skew (s)",
            names.SLOWEST_RANK: "Slowest rank",
            names.ENGINE: "Engine",
            names.GEN_AI_REQUEST: "Request",
        },
        link=TO_TRACE,
    )


def _trace() -> Panel:
    return trace(
        "Trace of the chosen span",
        About(
            "The trace whose id is in the box 'Trace id' above. It shows the spans of one request: vLLM's and kvobs's.",
            "kv.lookup shows the offers, kv.load how long the load took, kv.load.rank which rank finished last.",
            "Click a span's name in a table above and choose 'Show the trace on this board', or paste an id above.",
            "Until a trace is chosen, Grafana may show this panel as loading, or an error about the missing id.",
        ),
        TRACE,
    )


def _failed_loads() -> Panel:
    return spans(
        "Failed loads",
        About(
            "Loads that failed, as spans.",
            "Recomputed tokens are the cost of the failure.",
            "Click a name for its trace; see the exception in 'Slow and failed calls' to the right.",
            "A failed load is not necessarily a failed request.",
        ),
        f"{{ {select_span(names.LOAD)} && status = error }}",
        {
            names.CONNECTOR: "Connector",
            names.ERROR_TYPE: "Error",
            names.RECOMPUTED_TOKENS: "Recomputed",
            names.GEN_AI_REQUEST: "Request",
        },
        link=TO_TRACE,
    )


def _slow_calls() -> Panel:
    return spans(
        "Slow and failed calls",
        About(
            "Calls into connectors that took longer than slow_call_ms, or raised.",
            "Rank is the worker's rank; calls in the scheduler have none.",
            "Click a name for its trace, or check the log at the same time.",
            "Calls that belong to no request have their own traces.",
        ),
        f'{{ {select_span(names.CALL)} && {attribute(names.REASON)} =~ "{Reason.SLOW}|{Reason.ERROR}" }}',
        {
            names.CONNECTOR: "Connector",
            names.HOOK: "Hook",
            names.ERROR_TYPE: "Error",
            names.RANK: "Rank",
            names.ENGINE: "Engine",
        },
        link=TO_TRACE,
    )
