"""The board *Connector*: one, or several next to each other: rate, errors, durations; then use, waiting, backlog."""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.connector_details import details
from dashboards.engines import engines
from dashboards.frame import Board, Section
from dashboards.gains import gains
from dashboards.panels import About, Panel, Query, distribution, lines, of_connector, p99_and_mean
from dashboards.questions import SELECTION
from dashboards.reuse import reuse
from dashboards.scheduling import scheduling
from dashboards.tables import Column, rows
from kvobs.schema import signals
from kvobs.schema.signals import Signal


def connector() -> Board:
    """Return the board."""
    return Board(
        frame.CONNECTOR,
        "kvobs / Connector",
        "One connector, or several: a row for each with its lookups, loads, failures and durations; then all of them "
        "together, each in its own colour: transfers in progress, waits, holds. Select connectors above.",
        [
            Section("", [(6, [(14, engines()), (10, _configured())])]),
            Section(
                "Requests",
                [
                    (10, [(8, _lookups()), (8, _loads()), (8, _errors())]),
                    (11, [(8, _durations()), (8, _quantiles()), (8, _tokens())]),
                ],
                repeats=True,
            ),
            Section(
                "Saturation: transfers in progress, waits, holds",
                [
                    (8, [(8, _in_flight()), (8, _age()), (8, _delay())]),
                    (
                        8,
                        [
                            (12, _stalls("loads", signals.LOAD_STALL, "Time a step's forward waited for loads")),
                            (12, _stalls("saves", signals.SAVE_STALL, "Time a step spent in saves")),
                        ],
                    ),
                ],
            ),
            gains(),
            reuse(),
            scheduling(),
            *details(),
        ],
    )


def _configured() -> Panel:
    return rows(
        "Configuration",
        About(
            "The configured connectors, in the order of their lookups.",
            "More rows than connectors mean that engines are configured differently: compare the instances.",
        ),
        {
            "index": "Index",
            "connector": "Connector",
            "class": "Class",
            "role": "Role",
            "load_policy": "Load policy",
            "failure_policy": "Failure policy",
        },
        [
            Column(
                "",
                SELECTION.gauge(
                    signals.CONNECTOR_INFO, "index", "connector", "class", "role", "load_policy", "failure_policy",
                    how="max",
                ),
            )
        ],
    )  # fmt: skip


def _lookups() -> Panel:
    return lines(
        "Lookups by outcome (requests/s)",
        About(
            "Lookups per second by outcome, each request once per outcome; pending is an answer of 'not yet', and "
            "not_read one that vLLM ignores.",
            "With many misses see the row Reuse, with many pending the lookup delay below.",
        ),
        Query(SELECTION.rate(signals.LOOKUPS, "connector", "outcome"), "{{connector}} {{outcome}}"),
        unit="short",
        colors=looks.BY_OUTCOME,
        stacked=True,
    )


def _loads() -> Panel:
    return lines(
        "Loads by outcome (loads/s)",
        About(
            "Loads per second by mode and outcome; the tokens of failed loads are recomputed, unless "
            "kv_load_failure_policy is fail.",
            "For failures see 'Exceptions by hook and class' to the right, and their traces on Slow loads.",
        ),
        Query(SELECTION.rate(signals.LOADS, "connector", "mode", "outcome"), "{{connector}} {{mode}} {{outcome}}"),
        unit="short",
        colors=looks.BY_OUTCOME,
        stacked=True,
    )


def _errors() -> Panel:
    return lines(
        "Exceptions by hook and class",
        About(
            "Exceptions by hook and class, the ten most frequent of each interval; no data is normal.",
            "Search vLLM's log for the class at that time: a red span has the same error.type.",
        ),
        Query(
            f"topk(10, {SELECTION.count(signals.CALL_ERRORS, 'connector', 'hook', 'error_type')})",
            "{{connector}} {{hook}}: {{error_type}}",
        ),
        unit="short",
    )


def _durations() -> Panel:
    return distribution(
        "Load duration (points are traces)",
        About(
            "Successful loads by duration, where each point is a load with a trace.",
            "Click a point far above the others for its trace, which needs Tempo and the data source's exemplar "
            "setting.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _quantiles() -> Panel:
    return lines(
        "Load duration by mode (p50, p95, p99; dashed: mean)",
        About(
            "p50, p95 and p99 of successful loads, accurate to 10 %, and their mean (dashed): async loads last until "
            "the last rank's receipt, sync loads are a part of the step.",
            "If the p99 is far above the p50, see the ranks below and the traces on Slow loads.",
        ),
        *(
            Query(
                SELECTION.quantile(q, signals.LOAD_DURATION, "connector", "mode"),
                f"{{{{connector}}}} {{{{mode}}}} {name}",
                color,
            )
            for (name, color), q in zip(looks.BY_QUANTILE.items(), (0.5, 0.95, 0.99), strict=True)
        ),
        Query(
            SELECTION.mean(signals.LOAD_DURATION, "connector", "mode"),
            "{{connector}} {{mode}} mean",
            looks.VLLM,
            dashed=True,
        ),
        unit="s",
        exemplars=True,
    )


def _tokens() -> Panel:
    asked = {
        "offered": signals.OFFERED_TOKENS,
        "admitted": signals.ADMITTED_TOKENS,
        "loaded": signals.LOAD_TOKENS,
        "recomputed": signals.RECOMPUTED_TOKENS,
    }
    return lines(
        "Offered, loaded and lost tokens (tokens/s)",
        About(
            "Tokens per second that were offered, admitted for loading, loaded, lost to the shorter offer of the "
            "chosen connector, and recomputed after a failure.",
            "With many lost tokens try load_policy longest or another order; with recomputed ones look for the "
            "failures.",
        ),
        *(
            Query(SELECTION.rate(signal, "connector"), f"{{{{connector}}}} {name}", looks.BY_TOKENS[name])
            for name, signal in asked.items()
        ),
        Query(
            SELECTION.rate(signals.UNUSED_HIT_TOKENS, "connector", reason="other_chosen"),
            "{{connector}} lost",
            looks.BY_TOKENS["lost"],
        ),
        unit="short",
    )


def _in_flight() -> Panel:
    return lines(
        "Transfers in progress",
        About(
            "Loads in progress, and promised saves in progress (dashed), whose blocks are held.",
            "A line that only rises is a backlog: for saves look for readers that are slow or gone, for loads at the "
            "store or its network.",
        ),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="load"), "loads"),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="save"), "saves", dashed=True),
        unit="short",
    )


def _age() -> Panel:
    return lines(
        "Age of the oldest transfer",
        About(
            "Age of the oldest load and of the oldest promised save (dashed) in progress; a sawtooth is normal.",
            "If a line only rises, see 'Stuck transfers by rank' below, then that worker's log.",
        ),
        of_connector(questions.oldest("connector", kind="load"), "load"),
        of_connector(questions.oldest("connector", kind="save"), "save", dashed=True),
        unit="s",
    )


def _stalls(what: str, signal: Signal, of_steps: str) -> Panel:
    return lines(
        f"Steps blocked by {what} (p99; dashed: mean)",
        About(
            f"{of_steps}, p99 and mean (dashed): all requests of that step wait.",
            "Put such a connector after a faster one, or load asynchronously, which never blocks a step.",
        ),
        *p99_and_mean(SELECTION, signal),
        unit="s",
    )


def _delay() -> Panel:
    return lines(
        "Lookup delay (mean)",
        About(
            "Mean time from the connector's first 'not yet' for a request to its answer, which delays the request's "
            "first token.",
            "Set lookup_timeout_ms, so that such requests load from another connector or are computed.",
        ),
        of_connector(SELECTION.mean(signals.LOOKUP_DELAY, "connector")),
        unit="s",
    )
