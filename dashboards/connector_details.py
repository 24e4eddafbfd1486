"""The rows of the board *Connector* that are closed at first, and panels that *Slow loads* has too."""

from __future__ import annotations

from collections.abc import Callable

from dashboards import looks, questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, of_connector, states
from dashboards.questions import SELECTION
from kvobs.schema import signals
from kvobs.schema.signals import Scope, Signal


def details() -> list[Section]:
    """Return the closed rows."""
    return [
        Section(
            "Ranks (requires more than one rank)",
            [(8, ranks())],
            collapsed=True,
            repeats=True,
        ),
        Section("Calls by hook", [(8, [(12, calls()), (12, slow_calls())])], collapsed=True),
        Section(
            "Bytes, unused offers, and KV events",
            [(8, [(6, _bytes()), (6, _link_share()), (4, _unused()), (4, _saved()), (4, _events())])],
            collapsed=True,
        ),
        Section(
            "Block copies (requires a connector with a host buffer)",
            [(8, [(12, _copy_durations()), (12, _copy_bytes())])],
            collapsed=True,
        ),
        Section(
            "Quarantine and connector faults (quarantine requires the option isolate)",
            [
                (8, [(6, _quarantine()), (6, _quarantines()), (6, _stray()), (6, _failed_sync())]),
                (8, [(24, _verified())]),
            ],
            collapsed=True,
        ),
        Section(
            "kvobs: cost and internal errors",
            [(8, [(6, _self()), (6, _collector()), (6, _faults()), (6, _dropped())])],
            collapsed=True,
        ),
        Section(
            "Exporter (where one runs)",
            [(8, [(12, _engines()), (12, _queued())])],
            collapsed=True,
        ),
    ]


def ranks() -> list[tuple[int, Panel]]:
    """Return the line of panels about ranks."""
    return [
        (
            8,
            lines(
                "Rank skew (p99)",
                About(
                    "By how much the slowest rank took longer than the quickest for a load, or promised save (dashed).",
                    "Close to the load's own duration: one rank makes the load slow.",
                    "See 'Slowest rank' to the right.",
                    "Interpolated in buckets: a factor of two from 67 ms to 1 s, else four. One rank has no skew.",
                ),
                of_connector(SELECTION.quantile(0.99, signals.RANK_SKEW, "connector", kind="load"), "loads"),
                of_connector(
                    SELECTION.quantile(0.99, signals.RANK_SKEW, "connector", kind="save"), "saves", dashed=True
                ),
                unit="s",
            ),
        ),
        (
            8,
            lines(
                "Slowest rank (transfers/s)",
                About(
                    "Loads and promised saves for which this rank took longest, per second.",
                    "Similar rates are normal. One line far above the others is a slow rank.",
                    "Check that worker's machine: PCIe, network, disk, other processes.",
                    "One rank is always the slowest, even with little skew: check the skew first.",
                ),
                Query(
                    f"topk(10, {SELECTION.rate(signals.SLOWEST_RANK, 'connector', 'rank')})",
                    "{{connector}} rank {{rank}}",
                ),
                unit="short",
                stacked=True,
            ),
        ),
        (
            8,
            lines(
                "Stuck transfers by rank",
                About(
                    "Loads and promised saves that this rank had not reported stuck_after_s after another rank.",
                    "Zero is normal. Otherwise blocks are held, and a request may wait for ever.",
                    "Check that worker's log for the connector; restart the engine if the transfer does not finish.",
                    "A transfer is counted once: the line falls although it is still stuck.",
                ),
                Query(
                    f"topk(10, {SELECTION.count(signals.STUCK_TRANSFERS, 'connector', 'rank')})",
                    "{{connector}} rank {{rank}}",
                ),
                unit="short",
            ),
        ),
    ]


def calls() -> Panel:
    """Return the durations of calls by hook."""
    return lines(
        "Call duration by hook (p99)",
        About(
            "p99 of calls into the connector by vLLM's hook: the ten slowest.",
            "Scheduler hooks delay every request; start_load_kv may be the load itself.",
            "Slow calls are spans: see Slow loads.",
            "Values are interpolated within a bucket, a factor of four to 16 wide.",
        ),
        Query(
            # A hook without calls in the window has the quantile NaN, which `>= 0` leaves out.
            f"topk(10, {SELECTION.quantile(0.99, signals.CALL_DURATION, 'connector', 'hook')} >= 0)",
            "{{connector}} {{hook}}",
        ),
        unit="s",
        exemplars=True,
    )


def slow_calls() -> Panel:
    """Return the calls that were slow by hook."""
    return lines(
        "Slow calls by hook",
        About(
            "Calls that took longer than slow_call_ms, by hook: the ten most frequent of each interval.",
            "No data is normal.",
            "Each slow call is a span, sampled or not: see Slow loads.",
            "slow_call_ms is an option: engines with different values are not comparable.",
        ),
        Query(f"topk(10, {SELECTION.count(signals.SLOW_CALLS, 'connector', 'hook')})", "{{connector}} {{hook}}"),
        unit="short",
    )


def _bytes() -> Panel:
    return lines(
        "Bytes loaded",
        About(
            "Bytes loaded per second over all ranks.",
            "A plateau together with rising durations: the link or store is saturated.",
            "Compare with the bandwidth of the link or store.",
            "Bytes are those of the KV cache blocks that are filled; a connector may transfer more or fewer.",
        ),
        of_connector(SELECTION.rate(signals.LOAD_BYTES, "connector")),
        unit="Bps",
    )


def _link_share() -> Panel:
    return lines(
        "Loads as a share of the link",
        About(
            "Bytes per second while loads were in progress, as a share of the option link_gbps: at least, and at most "
            "(dashed), of the engine where it is lowest.",
            "At most a tenth with large loads: TCP in the place of RDMA, or one rail of several; there is an alert.",
            "Look for the chosen transport in the connector's log at the start; compare engines.",
            "Loads share the link: at least counts them one after the other, at most as many at once as were ever "
            "seen. Short loads end when a step does and are far below any link.",
        ),
        of_connector(questions.link_share()),
        of_connector(questions.link_share(at_most=True), "at most", dashed=True),
        unit="percentunit",
    )


def _unused() -> Panel:
    return _count(
        signals.UNUSED_OFFERS,
        "Unused offers (requests/s)",
        About(
            "Requests per second for which the connector offered tokens and another one was chosen.",
            "High for all but the first connector is normal with load_policy first.",
            "Look at the tokens lost to a shorter offer: they could have been loaded instead of computed.",
            "An unused offer costs its lookup only.",
        ),
    )


def _events() -> Panel:
    return lines(
        "KV events (events/s)",
        About(
            "KV cache events of the connector that vLLM publishes, per second.",
            "A router that knows caches by their events sends requests to engines with a hit.",
            "None while saves end: the router is blind, see the runbook, KvobsKvEventsStopped.",
            "No data: the connector makes no events, or vLLM's --kv-events-config is off.",
        ),
        _by(SELECTION.rate(signals.KV_EVENTS, "connector", "type", "medium"), ("connector", "type", "medium")),
        unit="short",
    )


def _saved() -> Panel:
    return lines(
        "Tokens saved (tokens/s)",
        About(
            "Tokens per second that the connector has stored in each medium, by its KV cache events.",
            "A disk or a remote store wears and fills by them; a token in memory and on disk counts in both.",
            "Far above the tokens that are computed: blocks are stored again and again.",
            "No data: the connector does not say it, or vLLM's --kv-events-config is off.",
        ),
        _by(SELECTION.rate(signals.SAVE_TOKENS, "connector", "medium"), ("connector", "medium")),
        unit="short",
    )


def _copy_durations() -> Panel:
    return lines(
        "Block copy duration (p99)",
        About(
            "Copies between the KV cache and the connector's host buffer: h2d after loads, d2h before saves (dashed).",
            "Included in the connector's own durations.",
            "Rising: PCIe or memory is busy. Compare KVOBS_STOCK=block_copy, vLLM's own operation.",
            "Values are interpolated within a bucket, a factor of four wide.",
        ),
        *_by_direction(lambda way: SELECTION.quantile(0.99, signals.BLOCK_COPY_DURATION, "connector", direction=way)),
        unit="s",
    )


def _copy_bytes() -> Panel:
    return lines(
        "Block copy throughput",
        About(
            "Bytes per second of these copies, over all ranks; d2h is dashed.",
            "Compare with the bandwidth of PCIe or memory.",
            "Far above the bytes loaded: unneeded blocks are copied.",
            "A connector without a host buffer has no block copies.",
        ),
        *_by_direction(lambda way: SELECTION.rate(signals.BLOCK_COPY_BYTES, "connector", direction=way)),
        unit="Bps",
    )


def _by_direction(expr: Callable[[str], str]) -> list[Query]:
    return [of_connector(expr(way), way, dashed=way == "d2h") for way in signals.DIRECTIONS]


def _quarantine() -> Panel:
    return states(
        "Quarantine",
        About(
            "Periods in which a best-effort connector was in quarantine.",
            "Red: new requests were served without it. Alternating bands: it fails in each probation.",
            "See its exceptions. It is enabled again automatically.",
            "A connector that is not in the option isolate has no band.",
        ),
        {0: ("enabled", looks.GOOD), 1: ("in quarantine", looks.BAD)},
        Query(questions.quarantine("connector", "instance", "engine"), "{{connector}} {{instance}} {{engine}}"),
    )


def _quarantines() -> Panel:
    return _rare(
        signals.QUARANTINES,
        "Quarantines begun",
        About(
            "Quarantines of a best-effort connector, begun after a failure or a slow call.",
            "Requests that arrived during each back-off (1 to 60 s) were served without it.",
            "See which hook raised or was slow.",
            "A back-off of one second seldom falls on a scrape: the panel Quarantine misses it.",
        ),
    )


def _stray() -> Panel:
    return _rare(
        signals.STRAY_REPORTS,
        "Stray reports",
        About(
            "Reports about loads or saves that the connector does not own; they are ignored.",
            "Some are normal for connectors that also report the transfers of others.",
            "Many of kind failure: the connector may have a bug, report it to its authors.",
            "With vLLM's own MultiConnector these would free blocks too early; here they have no effect.",
        ),
        "kind",
    )


def _failed_sync() -> Panel:
    return _rare(
        signals.FAILED_SYNC_LOADS,
        "Failed synchronous loads",
        About(
            "Failed synchronous loads: other connectors may have saved the unfilled blocks in that step.",
            "Zero is normal. Otherwise a later hit on such blocks gives a wrong answer.",
            "See the runbook, KvobsFailedSyncLoads: clear the caches of the other connectors.",
            "It is not known whether the blocks were saved.",
        ),
    )


def _verified() -> Panel:
    return lines(
        "Verified blocks (blocks/s)",
        About(
            "Loaded blocks that were compared with those computed for the same tokens, by outcome.",
            "match is well; unknown was computed elsewhere or long ago; lossy is near: a compressed or another copy.",
            "mismatch: answers may be wrong. See the runbook, KvobsCorruptLoads: take the connector out.",
            "Without the option verify.share nothing is compared, and this panel is empty.",
        ),
        Query(SELECTION.rate(signals.VERIFIED_BLOCKS, "outcome"), "{{outcome}}"),
        unit="short",
        stacked=True,
    )


def _count(signal: Signal, title: str, about: About) -> Panel:
    return lines(title, about, of_connector(SELECTION.rate(signal, "connector")), unit="short")


def _rare(signal: Signal, title: str, about: About, *labels: str) -> Panel:
    by = ("connector", *labels) if signal.scope is Scope.CHILD else labels
    return lines(title, about, _by(SELECTION.count(signal, *by), by), unit="short", stacked=True)


def _by(expr: str, labels: tuple[str, ...]) -> Query:
    return (
        of_connector(expr) if labels == ("connector",) else Query(expr, " ".join(f"{{{{{name}}}}}" for name in labels))
    )


def _self() -> Panel:
    return lines(
        "CPU time of kvobs's telemetry",
        About(
            "CPU time of kvobs's telemetry as a share of one core, over all processes of these engines.",
            "A few percent under load; the alert is at 20 % for an engine.",
            "Much more: lower tracing.level; the label where shows which part it is.",
            "For recording calls the value is an estimate.",
        ),
        Query(SELECTION.rate(signals.SELF_SECONDS, "where"), "{{where}}"),
        unit="percentunit",
        stacked=True,
    )


def _collector() -> Panel:
    return lines(
        "Pauses of Python's garbage collector",
        About(
            "Share of the time in which Python's garbage collector stops a process, over all workers or schedulers.",
            "Well below a percent: vLLM freezes what it has after its start.",
            "More: a connector that makes many objects, or asks for collections itself.",
            "No call counts as slow because of a pause, but its duration has it.",
        ),
        Query(SELECTION.rate(signals.GC_PAUSES, "process"), "{{process}}"),
        unit="percentunit",
    )


def _faults() -> Panel:
    return _rare(
        signals.INTERNAL_ERRORS,
        "Internal errors",
        About(
            "Contained errors of kvobs's telemetry: serving is not affected.",
            "Zero is normal. Otherwise some numbers are lost. version: processes run different versions of kvobs.",
            "The first error is in vLLM's log with its traceback; report it.",
            "Failures of connectors are not counted here.",
        ),
        "where",
    )


def _dropped() -> Panel:
    return lines(
        "Dropped spans and lines, malformed contexts",
        About(
            "Spans lost, by place; unwritten lines of request_log; requests with a malformed trace context, by source.",
            "rate: more than a process may write. missed: read too late. queue, export: the collector is slow or gone.",
            "Sample less, or fix the collector; find the client of such contexts; vLLM's log has a file's error.",
            "Serving is not affected, and metrics are complete: only traces and the log have gaps.",
        ),
        Query(SELECTION.count(signals.SPANS_DROPPED, "where"), "spans: {{where}}"),
        Query(SELECTION.count(signals.REQUEST_LOG_DROPPED), "log lines"),
        Query(SELECTION.count(signals.MALFORMED_CONTEXTS, "source"), "contexts: {{source}}"),
        unit="short",
    )


_OF_ENGINE = ("instance", "engine")
_ENGINE = "{{instance}} engine {{engine}}"


def _engines() -> Panel:
    return states(
        "Engines",
        About(
            "Whether the engines of each exporter run, and the call that an engine ended in unexpectedly.",
            "Red: the exporter serves the last numbers of an engine that was killed or crashed.",
            "See the log of that engine, and the runbook, KvobsEngineEnded.",
            "No data without the exporter. It ends with its last engine: a band that ends is a gone engine, too.",
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


def _queued() -> Panel:
    return lines(
        "Spans queued",
        About(
            "Spans that wait in the exporter for the collector: the ten highest.",
            "Near zero is normal. Only rising: the collector is slow or gone, and spans will be dropped.",
            "Check the collector; see 'Dropped spans'.",
            "No data without the exporter, where spans wait in the API server.",
        ),
        Query(f"topk(10, {SELECTION.gauge(signals.SPANS_QUEUED, *_OF_ENGINE)})", _ENGINE),
        unit="short",
    )
