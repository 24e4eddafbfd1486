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
            "Index 0 is looked up first. Role and policies apply to the whole engine.",
            "Compare engines: more rows than connectors means that engines are configured differently.",
            "A configured connector does not necessarily work.",
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
            "Lookups per second by outcome; an outcome is counted once per request.",
            "pending: the answer was 'not yet'. timeout: kvobs stopped waiting after lookup_timeout_ms. not_read: "
            "vLLM asks and ignores the answer, as for prompt_logprobs and pooling; no hit share includes these.",
            "Many misses: check whether its cache fits the traffic. Many pending: see the lookup delay below.",
            "A request that was first pending and then a hit counts in both.",
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
            "Loads per second by mode and outcome.",
            "aborted: the request was cancelled. failed: tokens are recomputed, unless kv_load_failure_policy is fail.",
            "For failures, see 'Exceptions by hook and class', and the traces on Slow loads.",
            "After a hit, another connector may load instead: see lost tokens and unused offers.",
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
            "Exceptions by hook and class: the ten most frequent of each interval.",
            "No data is normal.",
            "Search vLLM's log for the class at that time; a red span has the same error.type.",
            "A connector may fail loads without an exception: see 'Loads by outcome'.",
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
            "Successful loads by duration; each point is a load with a trace.",
            "Two bands are two kinds of loads. Points above them are outliers.",
            "Click a point for its trace (needs Tempo, and the data source's exemplar setting).",
            "Failed and aborted loads are not included. Select one connector: several are summed here.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _quantiles() -> Panel:
    return lines(
        "Load duration by mode (p50, p95, p99; dashed: mean)",
        About(
            "p50, p95 and p99 of successful loads, and their mean (dashed), by connector and mode.",
            "A p99 far above the p50: some loads are much slower, see ranks and traces.",
            "Compare with other connectors, and with time to first token on the Overview.",
            "A percentile is the middle of its bucket, accurate to 10 %: it moves in steps of 19 %. The modes "
            "measure different durations: async from allocation to the last rank's receipt, sync a part of the step.",
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
            "Tokens per second: offered; admitted for loading; loaded; lost to the shorter offer of the "
            "connector that was chosen; recomputed, because a load failed.",
            "Admitted close to offered: this connector is the one in use.",
            "Many lost: try load_policy longest, or another order. Recomputed: fix the failures.",
            "Tokens offered but not admitted are not lost if another connector also had them. A request's offers "
            "count once, its loads every time: after preemptions, more may be admitted than offered.",
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
            "A line that only rises is a backlog.",
            "Ever more saves: the reading side is slow or gone. Ever more loads: their requests wait.",
            "The value is updated in engine steps: an idle engine keeps its last value.",
        ),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="load"), "loads"),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="save"), "saves", dashed=True),
        unit="short",
    )


def _age() -> Panel:
    return lines(
        "Age of the oldest transfer",
        About(
            "Age of the oldest load and promised save (dashed) in progress.",
            "A sawtooth is normal. A line that only rises means a transfer never finishes, or the engine hangs.",
            "See 'Stuck transfers by rank' below; then that worker's log.",
            "0 means that no transfer is in progress. The age also grows while the engine hangs.",
        ),
        of_connector(questions.oldest("connector", kind="load"), "load"),
        of_connector(questions.oldest("connector", kind="save"), "save", dashed=True),
        unit="s",
    )


def _stalls(what: str, signal: Signal, of_steps: str) -> Panel:
    return lines(
        f"Steps blocked by {what} (p99; dashed: mean)",
        About(
            f"{of_steps}: p99 and mean (dashed).",
            "All requests of that step wait, including those that load nothing.",
            "A connector that blocks steps should be fast, or load asynchronously.",
            "No data does not mean zero: async loads never block a step, and full CUDA graphs hide the wait. A p99 "
            "is interpolated within a bucket, which is a factor of two wide from 1 to 67 ms, and four elsewhere. The "
            "mean is exact.",
        ),
        *p99_and_mean(SELECTION, signal),
        unit="s",
    )


def _delay() -> Panel:
    return lines(
        "Lookup delay (mean)",
        About(
            "Mean time from the connector's first 'not yet' for a request to its answer.",
            "It delays the first token of these requests by the same time.",
            "Set lookup_timeout_ms, so that another connector may load instead.",
            "Requests answered immediately are not included.",
        ),
        of_connector(SELECTION.mean(signals.LOOKUP_DELAY, "connector")),
        unit="s",
    )
