"""The rows of the board *Connector* that are closed at first."""

from __future__ import annotations

from dashboards import looks, questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, of_connector, states
from dashboards.questions import SELECTION
from kvobs.schema import signals


def details() -> list[Section]:
    """Return the closed rows."""
    return [
        Section(
            "Ranks (requires more than one rank)",
            [(8, _ranks())],
            collapsed=True,
            repeats=True,
        ),
        Section("Calls by hook", [(8, [(24, _calls())])], collapsed=True),
        Section("Bytes", [(8, [(12, _bytes()), (12, _link_share())])], collapsed=True),
        Section(
            "Quarantine and connector faults (quarantine requires the option best_effort)",
            [
                (8, [(8, _quarantine()), (8, _failed_sync()), (8, _verified())]),
            ],
            collapsed=True,
        ),
    ]


def _ranks() -> list[tuple[int, Panel]]:
    """Return the line of panels about ranks."""
    return [
        (
            8,
            lines(
                "Rank skew (p99)",
                About(
                    "How much longer the slowest rank took than the fastest for a load, or for a promised save "
                    "(dashed).",
                    "If it is close to the load's duration, one rank makes the load slow: see 'Slowest rank' to the "
                    "right.",
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
                    "Transfers per second in which each rank was the slowest; similar rates are normal.",
                    "If one line is far above the others and the skew is large, check that worker's machine: PCIe, "
                    "network, disk, other processes.",
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
                    "Transfers that this rank had not reported stuck_after_s after another rank did, counted once "
                    "each; zero is normal.",
                    "Look for the connector in that worker's log, and restart the engine if the transfer does not "
                    "finish.",
                ),
                Query(
                    f"topk(10, {SELECTION.count(signals.STUCK_TRANSFERS, 'connector', 'rank')})",
                    "{{connector}} rank {{rank}}",
                ),
                unit="short",
            ),
        ),
    ]


def _calls() -> Panel:
    """Return the durations of calls by hook."""
    return lines(
        "Call duration by hook (p99)",
        About(
            "p99 of calls into the connector by vLLM's hook, the ten slowest; hooks of the scheduler delay every "
            "request.",
            "Slow calls are spans: see 'Slow and failed calls' on Slow loads.",
        ),
        Query(
            # A hook without calls in the window has the quantile NaN, which `>= 0` leaves out.
            f"topk(10, {SELECTION.quantile(0.99, signals.CALL_DURATION, 'connector', 'hook')} >= 0)",
            "{{connector}} {{hook}}",
        ),
        unit="s",
        exemplars=True,
    )


def _bytes() -> Panel:
    return lines(
        "Bytes loaded",
        About(
            "Bytes of KV cache blocks that loads filled per second, over all ranks.",
            "If it stays flat while durations rise, compare it with the bandwidth of the link or store.",
        ),
        of_connector(SELECTION.rate(signals.LOAD_BYTES, "connector")),
        unit="Bps",
    )


def _link_share() -> Panel:
    return lines(
        "Loads as a share of the link",
        About(
            "Bytes per second while loads were in progress, as a share of the option link_gbps: lower and upper bound "
            "(dashed) of the engine with the lowest share.",
            "At most a tenth with large loads hints at TCP instead of RDMA: look for the transport in the connector's "
            "startup log.",
        ),
        of_connector(questions.link_share()),
        of_connector(questions.link_share(at_most=True), "at most", dashed=True),
        unit="percentunit",
    )


def _quarantine() -> Panel:
    return states(
        "Quarantine",
        About(
            "Periods in which a best-effort connector was in quarantine: new requests were served without it.",
            "See its exceptions; it is enabled again automatically, and alternating bands mean that each probation "
            "fails.",
        ),
        {0: ("enabled", looks.GOOD), 1: ("in quarantine", looks.BAD)},
        Query(questions.quarantine("connector", "instance", "engine"), "{{connector}} {{instance}} {{engine}}"),
    )


def _failed_sync() -> Panel:
    return lines(
        "Failed synchronous loads",
        About(
            "Failed synchronous loads, whose unfilled blocks other connectors may have saved in that step; zero is "
            "normal.",
            "Clear the caches of the other connectors, as KvobsFailedSyncLoads in the runbook describes: a later hit "
            "may give a wrong answer.",
        ),
        of_connector(SELECTION.count(signals.FAILED_SYNC_LOADS, "connector")),
        unit="short",
        stacked=True,
    )


def _verified() -> Panel:
    return lines(
        "Verified blocks (blocks/s)",
        About(
            "Loaded blocks compared with blocks computed for the same tokens, by outcome, with the option "
            "verify.sample_ratio.",
            "After a mismatch answers may be wrong: take the connector out, as KvobsCorruptLoads in the runbook "
            "describes.",
        ),
        Query(SELECTION.rate(signals.VERIFIED_BLOCKS, "outcome"), "{{outcome}}"),
        unit="short",
        stacked=True,
    )
