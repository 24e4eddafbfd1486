"""The board *kvobs itself*: does telemetry run, what does it lose, and what does it cost."""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.frame import Board, Section
from dashboards.panels import About, Panel, Query, lines, states
from dashboards.questions import SELECTION
from kvobs.schema import signals

_OF_ENGINE = ("instance", "engine")
_ENGINE = "{{instance}} engine {{engine}}"
_EXPORTER = "{{instance}} {{exporter}}"


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
            "Whether the engines of each exporter run, and the call that an engine ended in unexpectedly.",
            "Red: the exporter serves the last metrics of an engine that was killed or crashed.",
            "See the log of that engine, and KvobsEngineEnded in the runbook.",
            "No data without the exporter. It exits with its last engine, so a band that ends also means a gone "
            "engine.",
        ),
        {
            0: ("gone", looks.BAD),
            1: ("running", looks.GOOD),
            2: ("ended", looks.BAD),
            3: ("ended before", looks.WARNING),
        },
        Query(SELECTION.gauge(signals.ENGINE_UP, *_OF_ENGINE, how="min"), _ENGINE),
        Query(
            f"1 + {SELECTION.gauge(signals.ENGINE_ENDED, *_OF_ENGINE, 'connector', 'hook', 'reason', how='max')}",
            f"{_ENGINE}: {{{{connector}}}} {{{{hook}}}} {{{{reason}}}}",
        ),
    )


def _faults() -> Panel:
    return lines(
        "Internal errors",
        About(
            "Contained errors in kvobs's telemetry: serving is not affected.",
            "Zero is normal. Otherwise some metrics are lost. version: processes run different versions of kvobs.",
            "The first error is in vLLM's log with its traceback; report it.",
            "Failures of connectors are not counted here.",
        ),
        Query(SELECTION.count(signals.INTERNAL_ERRORS, "where"), "{{where}}"),
        unit="short",
        stacked=True,
    )


def _dropped() -> Panel:
    return lines(
        "Dropped spans and lines, malformed contexts; queued spans (dashed)",
        About(
            "Lost spans, by stage; lines of request_log that were not written; requests with a malformed trace "
            "context, by source.",
            "rate: more than a process may write. missed: read too late. queue, export: the collector is slow or gone.",
            "Sample less, or fix the collector; find the client that sends such contexts; vLLM's log shows the error "
            "of a file.",
            "Serving is not affected, and metrics are complete: only traces and the log have gaps.",
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
            "Spans that OpenTelemetry collectors could not export, or dropped because their queue was full.",
            "Zero is normal. Otherwise traces have gaps, and some of the loads are missing in these tables.",
            "Check Tempo, and the collector's log and memory. Spans lost before: 'Dropped spans' to the left.",
            "No data: the collector's own metrics are not scraped. Covers the collectors of the whole cluster.",
        ),
        Query(questions.collector_losses("otelcol_exporter_send_failed_spans"), f"{_EXPORTER} not sent"),
        Query(questions.collector_losses("otelcol_exporter_enqueue_failed_spans"), f"{_EXPORTER} queue full"),
        unit="short",
    )


def _self() -> Panel:
    return lines(
        "CPU time of kvobs's telemetry",
        About(
            "CPU time of kvobs's telemetry as a share of one core, over all processes of these engines.",
            "A few percent under load; the alert is at 20 % for an engine.",
            "Much more: lower tracing.level; the label `where` shows which part it is.",
            "For recording calls the value is an estimate.",
        ),
        Query(SELECTION.rate(signals.OVERHEAD_SECONDS, "stage"), "{{stage}}"),
        unit="percentunit",
        stacked=True,
    )
