"""The rows of the board *Connector* that are closed at first, and panels that *Slow loads* has too."""

from __future__ import annotations

from dashboards import looks, questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, of_child, states
from dashboards.questions import SELECTION
from kvobs import signals
from kvobs.signals import Scope, Signal


def details() -> list[Section]:
    """Return the closed rows."""
    return [
        Section("Ranks: who is last? (requires more than one rank)", [(8, ranks())], collapsed=True),
        Section("Calls: which hook is slow?", [(8, [(12, calls()), (12, slow_calls())])], collapsed=True),
        Section("Bytes, and offers that were not taken", [(8, [(12, _bytes()), (12, _unclaimed())])], collapsed=True),
        Section(
            "Block copies (requires a child with a host buffer)",
            [(8, [(12, _copy_durations()), (12, _copy_bytes())])],
            collapsed=True,
        ),
        Section(
            "Isolation and mended faults (quarantine requires the option isolate)",
            [(8, [(8, _quarantine()), (8, _foreign()), (8, _failed_sync())])],
            collapsed=True,
        ),
        Section(
            "kvobs itself: cost and faults",
            [(8, [(6, _self()), (6, _faults()), (6, _dropped()), (6, _malformed())])],
            collapsed=True,
        ),
    ]


def ranks() -> list[tuple[int, Panel]]:
    """Return the line of panels about ranks."""
    return [
        (
            8,
            lines(
                "How far apart do ranks end? (p99)",
                About(
                    "Time between the first and the last rank of a load or promised save.",
                    "Near the load's own duration: one rank makes the load slow.",
                    "See which rank is last, beside this.",
                    "Values lie within a bucket, a factor of four wide. With one rank there is nothing to see.",
                ),
                Query(SELECTION.quantile(0.99, signals.RANK_SKEW, "connector", "kind"), "{{connector}} {{kind}}"),
                unit="s",
            ),
        ),
        (
            8,
            lines(
                "Which rank is last? (transfers/s)",
                About(
                    "Loads and promised saves that ended last on this rank, per second.",
                    "Ranks that take turns are well. One line far above the others is a slow rank.",
                    "Look at that worker's machine: PCIe, network, disk, neighbours.",
                    "With little skew somebody is last too: look at the skew first.",
                ),
                Query(
                    f"topk(10, {SELECTION.rate(signals.SLOWEST_RANK, 'connector', 'rank')})",
                    "{{connector}} rank {{rank}}",
                ),
                unit="ops",
                stacked=True,
            ),
        ),
        (
            8,
            lines(
                "Which rank is stuck?",
                About(
                    "Loads and promised saves that this rank had not reported stuck_after_s after another one did.",
                    "Any line is a fault: blocks are held, and a request may wait for ever.",
                    "Look at that worker's log for the child; restart the engine if it does not end.",
                    "It is counted once for each transfer: the line falls although it is still stuck.",
                ),
                Query(
                    f"topk(10, {SELECTION.counted(signals.STUCK_TRANSFERS, 'connector', 'rank')})",
                    "{{connector}} rank {{rank}}",
                ),
                unit="short",
            ),
        ),
    ]


def calls() -> Panel:
    """Return the durations of calls by hook."""
    return lines(
        "Which calls take long? (p99)",
        About(
            "p99 of calls into the child by vLLM's hook: the ten slowest.",
            "Hooks of the scheduler hold up every request; start_load_kv may be the load itself.",
            "Find the slow ones as spans on Slow loads.",
            "Values lie within a bucket, a factor of four wide.",
        ),
        Query(
            f"topk(10, {SELECTION.quantile(0.99, signals.CALL_DURATION, 'connector', 'hook')})",
            "{{connector}} {{hook}}",
        ),
        unit="s",
        exemplars=True,
    )


def slow_calls() -> Panel:
    """Return the calls that were slow by hook."""
    return lines(
        "Which calls were slow?",
        About(
            "Calls that took longer than slow_call_ms, by hook: the ten most frequent of each interval.",
            "No line is health.",
            "Each is a span, whatever was sampled: see Slow loads.",
            "What is slow is an option; where it differs between engines, so do these numbers.",
        ),
        Query(f"topk(10, {SELECTION.counted(signals.SLOW_CALLS, 'connector', 'hook')})", "{{connector}} {{hook}}"),
        unit="short",
    )


def _bytes() -> Panel:
    return lines(
        "How many bytes does it load?",
        About(
            "Bytes loaded per second over all ranks.",
            "A plateau beside rising durations: the path is full.",
            "Compare with what the path can do.",
            "Bytes are tokens times their size in the KV cache; a child may move more or fewer.",
        ),
        of_child(SELECTION.rate(signals.LOAD_BYTES, "connector")),
        unit="Bps",
    )


def _unclaimed() -> Panel:
    return _counted(
        signals.UNCLAIMED_OFFERS,
        "How often was it not chosen?",
        About(
            "Requests per second for which it offered tokens and another child was chosen.",
            "High for all but the first child is what policy first does.",
            "See forgone tokens for what that cost.",
            "An offer that is not taken costs only its lookup.",
        ),
    )


def _copy_durations() -> Panel:
    return lines(
        "How long do block copies take? (p99)",
        About(
            "Copies between the KV cache and the child's host buffer: h2d before loads are used, d2h before saves.",
            "Part of the child's own time.",
            "Rising: PCIe or memory is busy. Compare block_copy options.",
            "Values lie within a bucket, a factor of four wide.",
        ),
        Query(
            SELECTION.quantile(0.99, signals.BLOCK_COPY_DURATION, "connector", "direction"),
            "{{connector}} {{direction}}",
        ),
        unit="s",
    )


def _copy_bytes() -> Panel:
    return _counted(
        signals.BLOCK_COPY_BYTES,
        "How much do block copies move?",
        About(
            "Bytes per second that these copies moved, on all ranks.",
            "Compare with PCIe's or the memory's speed.",
            "Much more than the loads' bytes: blocks are copied that nobody needs.",
            "A child without a host buffer has none.",
        ),
        "direction",
        unit="Bps",
    )


def _quarantine() -> Panel:
    return states(
        "When was it left out?",
        About(
            "When a best-effort child was in quarantine.",
            "Red: requests went on without it. Bands that alternate: it fails each time it is tried.",
            "See what it raised; it is tried again by itself.",
            "A child that is not in the option isolate has no band.",
        ),
        Query(questions.quarantined("connector", "instance", "engine"), "{{connector}} {{instance}} {{engine}}"),
        {0: ("takes part", looks.GOOD), 1: ("left out", looks.BAD)},
    )


def _foreign() -> Panel:
    return _rare(
        signals.FOREIGN_REPORTS,
        "What did it report that is not its own?",
        About(
            "Reports about loads or saves that the child does not own; they have no effect.",
            "Some are normal for children that report what a sibling did.",
            "Many failures: the child may be confused about requests, tell its authors.",
            "With vLLM's own MultiConnector these would free blocks too early; here they do nothing.",
        ),
        "kind",
    )


def _failed_sync() -> Panel:
    return _rare(
        signals.FAILED_SYNC_LOADS,
        "Which failed loads may siblings have saved?",
        About(
            "Synchronous loads that failed in a step whose blocks the siblings may have saved.",
            "Any: a sibling may hold what was never loaded.",
            "Mend the failures; empty the siblings' caches if answers look wrong.",
            "That it may have been saved does not say that it was.",
        ),
    )


def _counted(signal: Signal, title: str, about: About, label: str = "", unit: str = "ops") -> Panel:
    by = ("connector", label) if label else ("connector",)
    return lines(title, about, _by(SELECTION.rate(signal, *by), by), unit=unit)


def _rare(signal: Signal, title: str, about: About, *labels: str) -> Panel:
    by = ("connector", *labels) if signal.scope is Scope.CHILD else labels
    return lines(title, about, _by(SELECTION.counted(signal, *by), by), unit="short", stacked=True)


def _by(expr: str, labels: tuple[str, ...]) -> Query:
    return of_child(expr) if labels == ("connector",) else Query(expr, " ".join(f"{{{{{name}}}}}" for name in labels))


def _self() -> Panel:
    return lines(
        "What does kvobs cost?",
        About(
            "The share of one core's time that kvobs's telemetry takes, over all processes of these engines.",
            "A few percent under load; the alert is at 20 % for an engine.",
            "Much more: lower tracing.level; where says which part it is.",
            "Of recording calls this is an estimate.",
        ),
        Query(SELECTION.rate(signals.SELF_SECONDS, "where"), "{{where}}"),
        unit="percentunit",
        stacked=True,
    )


def _faults() -> Panel:
    return _rare(
        signals.INTERNAL_ERRORS,
        "Does kvobs itself fail?",
        About(
            "Faults inside kvobs's telemetry, contained: serving is not touched.",
            "Any line: some numbers are lost. version: processes with different versions of kvobs.",
            "Look in vLLM's log for the first one, logged with its traceback; report it.",
            "Children's own failures are never counted here.",
        ),
        "where",
    )


def _dropped() -> Panel:
    return _rare(
        signals.SPANS_DROPPED,
        "Are spans lost?",
        About(
            "Spans lost, by where.",
            "rate, flush: more spans than are allowed. queue, export: the collector is slow or gone.",
            "Sample less, or mend the collector.",
            "Metrics lose nothing: only traces are incomplete.",
        ),
        "where",
    )


def _malformed() -> Panel:
    return _rare(
        signals.MALFORMED_CONTEXTS,
        "Do clients send broken trace contexts?",
        About(
            "Requests whose traceparent, or kv_transfer_params.kvobs, is no trace context.",
            "Such requests have no spans, unless slow or failed.",
            "Find the client or proxy that makes them.",
            "They are served as all others.",
        ),
        "source",
    )
