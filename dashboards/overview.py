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
from kvobs.schema import signals, verdicts

NAMED = "{{connector}} {{instance}}"

TO_CHILD = frame.to_board(frame.CONNECTOR, connector="${__value.raw}")


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
                "How many kvobs alerts are firing, by severity.",
                "'none' is normal, red is critical. Alerts wait before they fire: other tiles change colour earlier.",
                "The table of alerts below lists them; open the runbook at the alert's name.",
                "Prometheus must evaluate kvobs's rules: without them no alert fires.",
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
                "'all up' is normal.",
                "`kvobs top` shows in which call an engine ended; see KvobsEngineEnded in the runbook.",
                "A removed pod is no longer a target, and is not counted. Without the exporter, the end of an engine "
                "shows only as a target that is down.",
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
                "The connector and engine with the highest share of failures: failed loads and exceptions, among all "
                "loads and exceptions.",
                "Green and 'none': no failures in the last minutes. Red: more than 5 %.",
                "Open that connector's board from its row in the table below.",
                "With few loads, one failure is a large share: see the failures per second below.",
            ),
            Query(questions.none_if_empty(failing), NAMED),
            unit="percentunit",
            verdict=looks.FAILING_SHARE,
            empty=looks.NO_DATA,
        ),
        number(
            "Hangs",
            About(
                "The longest call in progress, or the oldest lookup, load or resume (loaded, not scheduled, and the "
                "engine computes nothing), and its age.",
                "'Nothing hangs' is the normal state. Red from 10 s: the connector's state is then Hangs.",
                "See KvobsCallHangs in the runbook; `kvobs timeline` shows what led to it.",
                "Calls below a second are not shown. Each host shows the calls of its own processes.",
            ),
            Query(worst(questions.hang_ages()), "{{connector}} {{hook}}{{kind}} {{instance}} {{rank}}"),
            unit="s",
            verdict=looks.HANG_SECONDS,
            empty="Nothing hangs",
        ),
        number(
            "Load p99",
            About(
                "The p99 of load durations, of the connector and engine with the highest.",
                "Amber from 1 s, red from 4 s. The value is the middle of its bucket, accurate to 10 %; the mean is "
                "in the tables.",
                "Compare with time to first token below; open Slow loads for traces of single loads.",
                "A slow load does not delay a request that is waiting for another reason anyway.",
            ),
            Query(worst(f"({p99}) >= 0"), NAMED),
            unit="s",
            verdict=looks.LOAD_SECONDS,
        ),
        number(
            "Scheduler time",
            About(
                "Share of time that the scheduler spends in calls into the connector, of the connector and engine with "
                "the highest.",
                "No step is scheduled during that time, so all requests of the engine wait. Amber from 10 %, red "
                "from 50 %.",
                "The connector's board shows which hook, in the row Scheduler. `lookup_timeout_ms` does not "
                "interrupt a call.",
                "While nothing is computed, the scheduler may only be polling for answers.",
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
                "Blocks that a connector loaded with wrong bytes since its engine's start, for the connector and "
                "engine with the most.",
                "Red: answers may be wrong. 'none': no wrong block was found.",
                "See KvobsCorruptLoads in the runbook: take the connector out, restart, clear its store.",
                "Needs the option verify.sample_ratio, and covers only blocks that it compares: 'none' is no proof.",
            ),
            Query(questions.none_if_empty(worst(questions.wrong_blocks(*by_engine))), NAMED),
            unit="short",
            verdict=looks.ANY_IS_BAD,
            empty=looks.NO_DATA,
        ),
        number(
            "Quarantined",
            About(
                "A best-effort connector in quarantine: it failed, and new requests are served without it.",
                "Red: this connector is in quarantine. 'none': no connector is in quarantine.",
                "See its exceptions. It is enabled again automatically after its back-off.",
                "Only connectors in the option best_effort can be quarantined; a failure of another one may crash the "
                "engine.",
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
                "Time that model steps are blocked by synchronous loads: p99, of the connector and "
                "engine with the highest.",
                "All requests of that step wait, not only the one that loads. Amber from 67 ms.",
                "Put that connector after a faster one, or load asynchronously.",
                "No data does not mean zero: async loads never block a step, and full CUDA graphs hide the wait.",
            ),
            Query(worst(f"({stall}) >= 0"), NAMED),
            unit="s",
            verdict=looks.STALL_SECONDS,
            empty="No waits",
        ),
        number(
            "Tokens loaded",
            About(
                "Share of all prompt tokens that were loaded from connectors.",
                "Higher is better; the achievable value depends on the traffic.",
                "If it falls, check hit shares and tokens lost to a shorter offer.",
                "Tokens in vLLM's own prefix cache are not loaded, so a good local cache lowers this share. vLLM "
                "reports this share; it counts a prompt once, without loads after a preemption.",
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
            "One row per configured connector, the worst on top. State, failure share and durations show "
            "its worst engine, all else is the sum of all engines.",
            "State, the worst that applies: "
            + "; ".join(f"{s.name} ({s.condition.format(**s.limits)})" for s in verdicts.STATES)
            + ".",
            "Click a connector for its own board.",
            "A slow connector does no harm unless time to first token rises with it.",
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
        link=TO_CHILD,
    )


def _failing() -> Panel:
    return lines(
        "Failures by connector (failures/s)",
        About(
            "Failed loads and exceptions per second, by connector.",
            "Zero is normal.",
            "Compare the start with restarts and version changes (vertical lines), then open the connector's board.",
            "A failed load is not a failed request: its tokens are recomputed, unless kv_load_failure_policy is fail.",
        ),
        of_connector(questions.connector_or_zero(questions.failures(*by_connector))),
        unit="short",
    )


def _slow() -> Panel:
    return lines(
        "Load duration by connector (p99; dashed: mean)",
        About(
            "The p99 and the mean (dashed) of load durations, by connector.",
            "One line rises alone: that connector. All lines rise together: the machine or the network.",
            "Open Slow loads for traces of such loads.",
            "Synchronous and asynchronous loads are measured differently: see the connector's board.",
        ),
        *p99_and_mean(SELECTION, signals.LOAD_DURATION),
        unit="s",
    )


def _ttft() -> Panel:
    return lines(
        "Time to first token and loads (p95)",
        About(
            "vLLM's time to first token (grey), load durations, and the time steps are blocked (dashed), by "
            "connector: p95.",
            "A connector's line is near the grey one and rises with it: that connector delays the first token.",
            "Compare with the share of prompt tokens loaded: loads also save their computation.",
            "Only requests that load wait for loads; time to first token covers all requests.",
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
            "Share of hits among the requests that each connector answered.",
            "It follows the traffic. A drop after a restart or a new version: the cache lost its content.",
            "Compare with the curve of the row Reuse on the board Connector: what a larger cache would serve.",
            "A hit is an offer: another connector may have loaded instead.",
        ),
        of_connector(questions.hit_share(*by_connector)),
        unit="percentunit",
    )


def _loaded_share() -> Panel:
    return lines(
        "Tokens loaded by connector (tokens/s)",
        About(
            "Tokens loaded per second, by connector.",
            "Tokens that come neither from a connector nor from vLLM's own cache are computed.",
            "A connector that never loads anything just costs lookups: remove it, or change the order.",
            "A connector with few tokens may hold blocks that no other connector has.",
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
            "Up and down is normal. A line that only rises is a backlog, whose blocks are held.",
            "Open the connector's board: age of the oldest transfer, hold, stuck transfers by rank.",
            "The value is updated in engine steps: an idle engine keeps its last value.",
        ),
        of_connector(questions.connector_or_zero(SELECTION.gauge(signals.IN_FLIGHT, *by_connector))),
        unit="short",
    )
