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
            "Share of time that the scheduler spends in calls into the connector, of the engine with the highest.",
            "No step runs during such a call, so every request of that engine waits. A few percent are normal.",
            "See 'Call duration by hook' for the hook, then the connector's server and its timeouts.",
            "A call is counted when it ends; a call that still blocks shows under 'Call in progress'.",
        ),
        of_connector(worst_engine(questions.scheduler_share(*by_engine))),
        unit="percentunit",
    )


def _lookups() -> Panel:
    return lines(
        "Lookups that requests wait for, and the oldest (dashed, s)",
        About(
            "Requests that wait because the connector answered 'not yet', and the age of the oldest one in seconds.",
            "An age that only rises: the connector never answers, and its request never starts.",
            "Check the connector's server. Set lookup_timeout_ms, so that requests continue without it.",
            "The value is updated in engine steps: an idle engine keeps its last value.",
        ),
        of_connector(SELECTION.gauge(signals.IN_FLIGHT, "connector", kind="lookup"), "lookups"),
        of_connector(questions.oldest("connector", kind="lookup"), "oldest", dashed=True),
        unit="short",
    )


def _call() -> Panel:
    return lines(
        "Call in progress: age",
        About(
            "Age of a call into a connector that an engine's process has been in for more than a second.",
            "No data is normal. A line that rises: the engine runs no step until the call ends.",
            "Check the connector's server: the engine waits for it. See KvobsCallHangs in the runbook.",
            "Each host shows the calls of its own processes.",
        ),
        Query(f"topk(10, {questions.calls()})", "{{connector}} {{hook}} {{instance}} engine {{engine}} {{rank}}"),
        unit="s",
    )


def _resume() -> Panel:
    return lines(
        "Resume delay: from the end of a load to the request's step (p99; dashed: the oldest that waits)",
        About(
            "Time from an async load's end on all ranks to the step that schedules its request, and the age of the "
            "oldest load whose request is not scheduled yet (dashed).",
            "It is part of the request's time to first token, and is not caused by a connector.",
            "High with many waiting requests: the engine is full. High without: a connector blocks the scheduler.",
            "Synchronous loads have no such delay.",
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
            "A line that only rises takes the KV cache away from running requests.",
            "See the age of the oldest transfer; compare with vLLM's KV cache usage.",
            "Blocks that requests share are counted for each. An idle engine keeps its last value.",
        ),
        of_connector(SELECTION.gauge(signals.HELD_TOKENS, "connector", kind="load|awaiting_schedule"), "loads"),
        of_connector(SELECTION.gauge(signals.HELD_TOKENS, "connector", kind="save"), "saves", dashed=True),
        unit="short",
    )
