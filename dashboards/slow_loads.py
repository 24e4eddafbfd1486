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
            "Successful loads by duration, where each point is a load with a trace.",
            "Click a point far above the dark band, then 'Query with Tempo'; with several connectors chosen above, "
            "all are summed.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _speed() -> Panel:
    return lines(
        "Throughput of a load by connector (mean)",
        About(
            "Bytes of successful loads divided by the time that they took, by connector.",
            "If it falls while loads get slower, compare it with the bandwidth of the link or store; if not, the "
            "loads are larger.",
        ),
        of_connector(questions.load_speed("connector")),
        unit="Bps",
    )


def _of_request() -> Panel:
    return spans(
        "Spans of a request",
        About(
            "Spans of the requests whose id contains the text in the box 'Request id' above, the longest first.",
            "Click a name for the whole trace; only requests that were sampled, slow or failed have spans.",
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
            "Click a name for its trace; if the rank skew is close to the duration, look at the machine of the "
            "slowest rank.",
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
            "The spans of one request, vLLM's and kvobs's, whose trace id is in the box 'Trace id' above.",
            "Click a span's name in a table above and choose 'Show the trace on this board', or paste an id.",
        ),
        TRACE,
    )


def _failed_loads() -> Panel:
    return spans(
        "Failed loads",
        About(
            "Loads that failed, as spans, and how many tokens were recomputed for each.",
            "Click a name for its trace, and see the exception in 'Slow and failed calls' to the right.",
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
            "Calls into connectors that took longer than slow_call_ms, or raised; calls in the scheduler have no rank.",
            "Click a name for its trace, or read vLLM's log at the same time.",
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
