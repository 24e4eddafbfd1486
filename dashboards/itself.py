"""The board *kvobs itself*: does telemetry run, what does it lose, and what does it cost."""

from __future__ import annotations

from dataclasses import replace

from dashboards import frame, looks, questions
from dashboards.frame import Board, Section
from dashboards.panels import About, Panel, Query, lines, states
from dashboards.questions import SELECTION
from kvobs.schema import signals

_OF_ENGINE = ("instance", "engine")
_ENGINE = "{{instance}} engine {{engine}}"
_EXPORTER = "{{instance}} {{exporter}}"

_OR_OF_NONE = replace(SELECTION, connector='connector=~"$connector|"')
"""The out-of-memory killer may end an engine outside any connector's call."""


def itself() -> Board:
    """Return the board."""
    return Board(
        frame.ITSELF,
        "kvobs / kvobs itself",
        "Whether kvobs's telemetry runs, what it loses, and what it costs. Nothing here is about a connector.",
        [
            Section("", [(8, [(12, _engines()), (12, _faults())])]),
            Section("Spans", [(8, [(12, _dropped()), (12, _lost())])]),
            Section("Cost", [(8, [(24, _self())])]),
        ],
    )


def _engines() -> Panel:
    return states(
        "Engines",
        About(
            "Whether the engines of each exporter run, and the call in which an engine ended unexpectedly.",
            "If it is red, read the log of that engine, and see KvobsEngineEnded in the runbook.",
        ),
        {
            0: ("gone", looks.BAD),
            1: ("running", looks.GOOD),
            2: ("ended", looks.BAD),
            3: ("ended before", looks.WARNING),
        },
        Query(SELECTION.gauge(signals.ENGINE_UP, *_OF_ENGINE, how="min"), _ENGINE),
        Query(
            f"1 + {_OR_OF_NONE.gauge(signals.ENGINE_ENDED, *_OF_ENGINE, 'connector', 'hook', 'reason', how='max')}",
            f"{_ENGINE}: {{{{connector}}}} {{{{hook}}}} {{{{reason}}}}",
        ),
    )


def _faults() -> Panel:
    return lines(
        "Internal errors",
        About(
            "Contained errors in kvobs's telemetry: some metrics are lost, and serving is not affected.",
            "Find the first one with its traceback in vLLM's log, and report it.",
        ),
        Query(SELECTION.count(signals.INTERNAL_ERRORS, "where"), "{{where}}"),
        unit="short",
        stacked=True,
    )


def _dropped() -> Panel:
    return lines(
        "Dropped spans and lines, malformed contexts; queued spans (dashed)",
        About(
            "Spans that were lost, by stage, or are queued (dashed), lines of request_log that were not written, and "
            "requests with a malformed trace context.",
            "Sample less, check the collector, or find the client that sends such contexts; metrics are complete.",
        ),
        Query(SELECTION.count(signals.SPANS_DROPPED, "where"), "spans: {{where}}"),
        Query(f"topk(10, {SELECTION.gauge(signals.SPANS_QUEUED, *_OF_ENGINE)})", f"queued: {_ENGINE}", dashed=True),
        Query(SELECTION.count(signals.REQUEST_LOG_DROPPED), "log lines"),
        Query(SELECTION.count(signals.MALFORMED_CONTEXTS, "source"), "contexts: {{source}}"),
        unit="short",
    )


def _lost() -> Panel:
    return lines(
        "Spans lost in the collector (spans/s)",
        About(
            "Spans that OpenTelemetry collectors of the cluster could not export, or dropped because their queue was "
            "full.",
            "Check Tempo, and the collector's log and memory; no data means that the collector's own metrics are not "
            "scraped.",
        ),
        Query(questions.collector_losses("otelcol_exporter_send_failed_spans"), f"{_EXPORTER} not sent"),
        Query(questions.collector_losses("otelcol_exporter_enqueue_failed_spans"), f"{_EXPORTER} queue full"),
        unit="short",
    )


def _self() -> Panel:
    return lines(
        "CPU time of kvobs's telemetry",
        About(
            "CPU time of kvobs's telemetry as a share of one core, over all processes of these engines; a few percent "
            "are normal under load.",
            "If it is much more, lower tracing.level, and see KvobsTelemetryCost in the runbook.",
        ),
        Query(SELECTION.rate(signals.OVERHEAD_SECONDS, "stage"), "{{stage}}"),
        unit="percentunit",
        stacked=True,
    )
