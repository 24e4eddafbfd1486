"""Panels about the engine's loop: time it spends in connectors, lookups it waits for, KV cache that transfers hold."""

from __future__ import annotations

from dashboards import questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, of_connector
from dashboards.questions import SELECTION, by_engine, worst_engine
from kvobs.schema import signals


def scheduling() -> Section:
    """Return the section of the board *Connector*."""
    return Section(
        "Scheduler: time in connectors, lookups that requests wait for, KV cache that is held",
        [(8, [(8, scheduler_time()), (8, _lookups()), (8, _call())]), (8, [(12, _resume()), (12, _held_tokens())])],
        collapsed=True,
    )


def scheduler_time() -> Panel:
    """Return the panel that shows a connector whose calls block the engine."""
    return lines(
        "Scheduler time by connector (share of the loop)",
        About(
            "Share of time that the scheduler spends in calls into the connector, of the engine with the highest; no "
            "step runs during such a call.",
            "See 'Call duration by hook' for the hook, then the connector's server and its timeouts.",
        ),
        of_connector(worst_engine(questions.scheduler_share(*by_engine))),
        unit="percentunit",
    )


def _lookups() -> Panel:
    return lines(
        "Lookups that requests wait for, and the oldest (dashed, s)",
        About(
            "Requests that wait because the connector answered 'not yet', and the age of the oldest one in seconds "
            "(dashed).",
            "If the age only rises, check the connector's server, and set lookup_timeout_ms, so that requests "
            "continue without it.",
        ),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="lookup"), "lookups"),
        of_connector(questions.oldest("connector", kind="lookup"), "oldest", dashed=True),
        unit="short",
    )


def _call() -> Panel:
    return lines(
        "Call in progress: age",
        About(
            "Age of a call into a connector that an engine's process has been in for more than a second; no data is "
            "normal.",
            "If a line rises, the engine runs no step: check the connector's server, and see KvobsCallHangs in the "
            "runbook.",
        ),
        Query(f"topk(10, {questions.calls()})", "{{connector}} {{hook}} {{instance}} engine {{engine}} {{rank}}"),
        unit="s",
    )


def _resume() -> Panel:
    return lines(
        "Resume delay: from the end of a load to the request's step (p99; dashed: the oldest that waits)",
        About(
            "Time from an async load's end on all ranks to the step that schedules its request, and the oldest load "
            "whose request still waits (dashed).",
            "With many waiting requests the engine is full; without them see the scheduler's time in connectors above.",
        ),
        of_connector(SELECTION.quantile(0.99, signals.LOAD_RESUME_DELAY, "connector"), "delay"),
        of_connector(questions.oldest("connector", kind="awaiting_schedule"), "oldest", dashed=True),
        unit="s",
    )


def _held_tokens() -> Panel:
    return lines(
        "KV cache held by transfers (tokens)",
        About(
            "Tokens whose blocks are held by loads and resumes in progress, and by promised saves (dashed).",
            "A line that only rises takes KV cache away from running requests: see the age of the oldest transfer.",
        ),
        of_connector(SELECTION.gauge(signals.HELD_TOKENS, "connector", kind="load|awaiting_schedule"), "loads"),
        of_connector(SELECTION.gauge(signals.HELD_TOKENS, "connector", kind="save"), "saves", dashed=True),
        unit="short",
    )
