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
                    "How much longer the slowest rank took than the fastest for a load, or promised save (dashed).",
                    "Close to the load's own duration: one rank makes the load slow.",
                    "See 'Slowest rank' to the right.",
                    "Interpolated within a bucket, which is a factor of two wide from 67 ms to 1 s, and four "
                    "elsewhere. A single rank has no skew.",
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
                    "Loads and promised saves in which this rank was the slowest, per second.",
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


def _calls() -> Panel:
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


def _bytes() -> Panel:
    return lines(
        "Bytes loaded",
        About(
            "Bytes loaded per second over all ranks.",
            "A plateau together with rising durations: the link or store is saturated.",
            "Compare with the bandwidth of the link or store.",
            "Counts the bytes of the KV cache blocks that are filled; a connector may transfer more or fewer.",
        ),
        of_connector(SELECTION.rate(signals.LOAD_BYTES, "connector")),
        unit="Bps",
    )


def _link_share() -> Panel:
    return lines(
        "Loads as a share of the link",
        About(
            "Bytes per second while loads were in progress, as a share of the option link_gbps: lower and upper "
            "bound (dashed), of the engine with the lowest share.",
            "At most a tenth with large loads: TCP instead of RDMA, or one rail of several; there is an alert.",
            "Look for the chosen transport in the connector's startup log; compare engines.",
            "Loads share the link: the lower bound assumes one load at a time, the upper bound as many at once as "
            "were ever seen. Short loads end when a step ends, and are far below any link.",
        ),
        of_connector(questions.link_share()),
        of_connector(questions.link_share(at_most=True), "at most", dashed=True),
        unit="percentunit",
    )


def _quarantine() -> Panel:
    return states(
        "Quarantine",
        About(
            "Periods in which a best-effort connector was in quarantine.",
            "Red: new requests were served without it. Alternating bands: it fails in each probation.",
            "See its exceptions. It is enabled again automatically.",
            "A connector that is not in the option best_effort has no band.",
        ),
        {0: ("enabled", looks.GOOD), 1: ("in quarantine", looks.BAD)},
        Query(questions.quarantine("connector", "instance", "engine"), "{{connector}} {{instance}} {{engine}}"),
    )


def _failed_sync() -> Panel:
    return lines(
        "Failed synchronous loads",
        About(
            "Failed synchronous loads: other connectors may have saved the unfilled blocks in that step.",
            "Zero is normal. Otherwise, a later hit on such blocks gives a wrong answer.",
            "See KvobsFailedSyncLoads in the runbook: clear the caches of the other connectors.",
            "It is not known whether the blocks were saved.",
        ),
        of_connector(SELECTION.count(signals.FAILED_SYNC_LOADS, "connector")),
        unit="short",
        stacked=True,
    )


def _verified() -> Panel:
    return lines(
        "Verified blocks (blocks/s)",
        About(
            "Loaded blocks compared with the blocks computed for the same tokens, by outcome.",
            "match is good; unknown: computed elsewhere or long ago; lossy: close, for example a compressed copy.",
            "mismatch: answers may be wrong. See KvobsCorruptLoads in the runbook: take the connector out.",
            "Without the option verify.sample_ratio, nothing is compared, and this panel is empty.",
        ),
        Query(SELECTION.rate(signals.VERIFIED_BLOCKS, "outcome"), "{{outcome}}"),
        unit="short",
        stacked=True,
    )
