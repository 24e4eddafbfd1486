"""The board *Overview*: is KV transfer healthy, which connector is guilty, does it cost time to first token.

Verdicts show the worst engine: one of many that fails does not show in a fleet's mean.
"""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.engines import engines, firing_alerts
from dashboards.frame import Board, Section
from dashboards.gains import net_gain
from dashboards.panels import About, Panel, Query, lines, number, of_connector, p99_and_mean
from dashboards.promql import worst
from dashboards.questions import SELECTION, by_connector, by_engine, worst_engine
from dashboards.tables import Column, rows
from kvobs.schema import signals

NAMED = "{{connector}} {{instance}}"

TO_CONNECTOR = frame.to_board(frame.CONNECTOR, connector="${__value.raw}")


def overview() -> Board:
    """Return the board."""
    return Board(
        frame.OVERVIEW,
        "kvobs / Overview",
        "Health of KV transfers, the connector that causes a problem, and the effect on time to first token. Top line: "
        "current state of the worst engine; tables: connectors, and engines, the worst first.",
        [
            Section(
                "",
                [
                    (4, [(4, tile) for tile in _worst()]),
                    (4, [(width, tile) for width, tile in zip((5, 5, 5, 5, 4), _effects(), strict=True)]),
                    (6, [(24, _connectors())]),
                    (8, [(14, engines()), (10, firing_alerts())]),
                ],
            ),
            Section(
                "Over time",
                [
                    (9, [(8, _failing()), (8, _slow()), (8, _ttft())]),
                    (9, [(8, _hits()), (8, _loaded_share()), (8, _open())]),
                ],
            ),
        ],
    )


def _worst() -> list[Panel]:
    """Return the tiles that show where to look first."""
    failing = worst(f"({questions.failing_share(*by_engine)}) > 0")
    p99 = SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_engine)
    return [
        number(
            "Alerts",
            About(
                "How many alerts of kvobs fire, by severity; they wait before they fire, so other tiles change their "
                "colour earlier.",
                "See the table of alerts below, and open the runbook at the alert's name.",
            ),
            Query(questions.alerts_firing(), "{{severity}}"),
            unit="short",
            verdict=looks.ANY_IS_WARNING,
            verdicts={"critical": looks.ANY_IS_BAD, "info": looks.PLAIN},
        ),
        number(
            "Engines down",
            About(
                "How many engines are gone: their target can no longer be scraped, or they ended.",
                "`kvobs top` shows in which call an engine ended; see KvobsEngineEnded in the runbook.",
            ),
            Query(questions.engines_down()),
            unit="short",
            verdict=looks.ANY_IS_BAD,
            words=looks.ALL_UP,
            empty=looks.NO_DATA,
        ),
        number(
            "Failure share",
            About(
                "The connector and engine with the highest share of failed loads and exceptions among all of its "
                "loads and exceptions.",
                "Open that connector's board from its row in the table below, and check there that it is not a single "
                "failure.",
            ),
            Query(questions.none_if_empty(failing), NAMED),
            unit="percentunit",
            verdict=looks.FAILING_SHARE,
            empty=looks.NO_DATA,
        ),
        number(
            "Hangs",
            About(
                "The longest call in progress, or the oldest lookup, load or resume, and its age; 'Nothing hangs' is "
                "normal.",
                "See KvobsCallHangs in the runbook; `kvobs timeline` shows what led to it.",
            ),
            Query(worst(questions.hang_ages()), "{{connector}} {{hook}}{{kind}} {{instance}} {{rank}}"),
            unit="s",
            verdict=looks.HANG_SECONDS,
            empty="Nothing hangs",
        ),
        number(
            "Load p99",
            About(
                "The p99 of load durations, accurate to 10 %, of the connector and engine with the highest.",
                "Compare it with the time to first token below, and open Slow loads for traces of single loads.",
            ),
            Query(worst(f"({p99}) >= 0"), NAMED),
            unit="s",
            verdict=looks.LOAD_SECONDS,
        ),
        number(
            "Scheduler time",
            About(
                "Share of time that the scheduler spends in calls into a connector, of the worst connector and "
                "engine: no step is scheduled during that time.",
                "Open the connector's board, where the row Scheduler shows the hook.",
            ),
            Query(worst(f"({questions.scheduler_share(*by_engine)}) >= 0"), NAMED),
            unit="percentunit",
            verdict=looks.SCHEDULER_SHARE,
        ),
    ]


def _effects() -> list[Panel]:
    """Return the tiles of how many are affected, and of what loads bring."""
    stall = SELECTION.quantile(0.99, signals.LOAD_STALL, *by_engine)
    return [
        number(
            "Wrong bytes",
            About(
                "Blocks that a connector loaded with wrong bytes since its engine's start, of those that "
                "verify.sample_ratio compares.",
                "If it is red, answers may be wrong: take the connector out, as KvobsCorruptLoads in the runbook "
                "describes.",
            ),
            Query(questions.none_if_empty(worst(questions.wrong_blocks(*by_engine))), NAMED),
            unit="short",
            verdict=looks.ANY_IS_BAD,
            empty=looks.NO_DATA,
        ),
        number(
            "Quarantined",
            About(
                "A best-effort connector that failed and is in quarantine: new requests are served without it.",
                "See its exceptions on its board; it is enabled again automatically after its back-off.",
            ),
            Query(
                questions.none_if_empty(worst(f"{questions.quarantine(*by_engine)} > 0")),
                NAMED,
            ),
            unit="short",
            verdict=looks.ANY_IS_BAD,
            words=looks.IN_QUARANTINE,
            empty=looks.NO_DATA,
        ),
        number(
            "Steps blocked",
            About(
                "p99 of the time that a model step waits for synchronous loads, of the worst connector and engine: "
                "all requests of that step wait.",
                "Put that connector after a faster one, or load asynchronously, which never blocks a step.",
            ),
            Query(worst(f"({stall}) >= 0"), NAMED),
            unit="s",
            verdict=looks.STALL_SECONDS,
            empty="No waits",
        ),
        number(
            "Tokens loaded",
            About(
                "Share of all prompt tokens that were loaded from connectors, as vLLM counts them.",
                "If it falls, check hit shares and tokens lost to a shorter offer; what vLLM's own cache serves is "
                "not loaded.",
            ),
            Query(questions.loaded_share()),
            unit="percentunit",
        ),
        net_gain(),
    ]


def _connectors() -> Panel:
    every = questions.connector_or_zero
    return rows(
        "Connectors, worst first",
        About(
            "A row for each connector, the worst on top: state, failure share and durations are of its worst engine, "
            "all else is the sum of all engines.",
            "Click a connector for its own board; the runbook has the alert that belongs to its state.",
        ),
        {"connector": "Connector"},
        [
            Column("State", worst_engine(questions.verdict(*by_engine)), words=looks.VERDICTS),
            Column(
                "Failure share",
                worst_engine(questions.failing_share(*by_engine)),
                "percentunit",
                looks.FAILING_SHARE,
                decimals=1,
            ),
            Column("Loads/s", every(SELECTION.rate(signals.LOADS, *by_connector)), decimals=2),
            Column(
                "Load p99",
                worst_engine(SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_engine)),
                "s",
                looks.LOAD_SECONDS,
            ),
            Column("Load mean", worst_engine(SELECTION.mean(signals.LOAD_DURATION, *by_engine)), "s"),
            Column(
                "Scheduler time",
                worst_engine(questions.scheduler_share(*by_engine)),
                "percentunit",
                looks.SCHEDULER_SHARE,
                decimals=1,
            ),
            Column(
                "Steps blocked", worst_engine(SELECTION.mean(signals.LOAD_STALL, *by_engine)), "s", looks.STALL_SECONDS
            ),
            Column("Hit share", questions.hit_share(*by_connector), "percentunit", decimals=0),
            Column("Net gain", questions.net_gain_share(*by_connector), "percentunit", decimals=0),
            Column(
                "Lost to a shorter offer",
                questions.unused_hit_share(*by_connector),
                "percentunit",
                looks.UNUSED_HIT_SHARE,
                width=180,
                decimals=0,
            ),
        ],
        link=TO_CONNECTOR,
    )


def _failing() -> Panel:
    return lines(
        "Failures by connector (failures/s)",
        About(
            "Failed loads and exceptions per second, by connector; zero is normal.",
            "Compare the start with restarts and new versions (vertical lines), then open the connector's board.",
        ),
        of_connector(questions.connector_or_zero(questions.failures(*by_connector))),
        unit="short",
    )


def _slow() -> Panel:
    return lines(
        "Load duration by connector (p99; dashed: mean)",
        About(
            "p99 and mean (dashed) of load durations, by connector.",
            "If one line rises, open that connector's board; if all do, look at the machine or the network.",
        ),
        *p99_and_mean(SELECTION, signals.LOAD_DURATION),
        unit="s",
    )


def _ttft() -> Panel:
    return lines(
        "Time to first token and loads (p95)",
        About(
            "p95 of vLLM's time to first token (grey), of load durations, and of the time that steps are blocked "
            "(dashed), by connector.",
            "A connector's line that is near the grey one and rises with it delays the first token: open its board.",
        ),
        Query(questions.VLLM.vllm_quantile(0.95, "time_to_first_token_seconds"), "TTFT of vLLM", looks.VLLM, 3),
        of_connector(SELECTION.quantile(0.95, signals.LOAD_DURATION, *by_connector), "load"),
        of_connector(SELECTION.quantile(0.95, signals.LOAD_STALL, *by_connector), "steps blocked", dashed=True),
        unit="s",
    )


def _hits() -> Panel:
    return lines(
        "Hit share by connector",
        About(
            "Share of hits among the requests that each connector answered; a hit is an offer, and another connector "
            "may have loaded.",
            "After a drop look for a restart (vertical lines), else compare with the curve in the row Reuse of the "
            "board Connector.",
        ),
        of_connector(questions.hit_share(*by_connector)),
        unit="percentunit",
    )


def _loaded_share() -> Panel:
    return lines(
        "Tokens loaded by connector (tokens/s)",
        About(
            "Tokens loaded per second, by connector.",
            "A connector that never loads anything just costs lookups: remove it, or change the order.",
        ),
        of_connector(questions.connector_or_zero(SELECTION.rate(signals.LOAD_TOKENS, *by_connector))),
        unit="short",
        stacked=True,
    )


def _open() -> Panel:
    return lines(
        "Transfers in progress by connector",
        About(
            "Loads, resumes and promised saves in progress, and lookups that requests wait for, by connector.",
            "A line that only rises is a backlog: see the age of the oldest transfer on the connector's board.",
        ),
        of_connector(questions.connector_or_zero(SELECTION.gauge(signals.IN_FLIGHT, *by_connector))),
        unit="short",
    )
