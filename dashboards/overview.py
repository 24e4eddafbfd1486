"""The board *Overview*: is KV transfer healthy, which child is guilty, does it cost time to first token."""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, number, of_child
from dashboards.promql import worst
from dashboards.questions import SELECTION, by_child
from dashboards.tables import Column, rows
from kvobs import signals

TO_CHILD = frame.to_board(frame.CONNECTOR, "${__value.raw}")


def overview() -> str:
    """Return the board's JSON."""
    return frame.board_text(
        frame.OVERVIEW,
        "kvobs / Overview",
        "Is KV transfer healthy, which child is guilty, does it cost time to first token? Top line: the verdict; "
        "table: the guilty child first.",
        [
            Section("", [(5, [(3, panel) for panel in _verdicts()]), (6, [(24, _children())])]),
            Section(
                "When did it begin?",
                [
                    (9, [(8, _failing()), (8, _slow()), (8, _ttft())]),
                    (9, [(8, _brought()), (8, _open()), (8, _bytes())]),
                ],
            ),
        ],
    )


def _verdicts() -> list[Panel]:
    failing = worst(f"({questions.failing_share(*by_child)}) > 0")
    p99 = SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_child)
    stall = SELECTION.quantile(0.99, signals.LOAD_STALL, *by_child)
    return [
        number(
            "Who fails most?",
            About(
                "The child with the greatest share of failures: loads that failed and exceptions, among loads and "
                "exceptions.",
                "Green and 'none': nothing failed in the last minutes. Red: more than 5 %.",
                "Go to that child's row below, and from there to its board.",
                "One failure among few loads is a great share: see the rate beside it.",
            ),
            Query(questions.none_if_empty(failing), "{{connector}}"),
            unit="percentunit",
            verdict=looks.FAILING_SHARE,
            empty=looks.NO_DATA,
        ),
        number(
            "Who is left out?",
            About(
                "A best-effort child in quarantine: it failed, and requests go on without it.",
                "Red: this child is left out. 'none': no child is.",
                "Look at its errors; it is tried again by itself.",
                "Children that are not in the option isolate are never left out: they end the engine instead.",
            ),
            Query(
                questions.none_if_empty(worst(f"{questions.quarantined(*by_child)} > 0")),
                "{{connector}}",
            ),
            unit="short",
            verdict=looks.ANY_IS_BAD,
            words=looks.PARTAKING,
            empty=looks.NO_DATA,
        ),
        number(
            "Slowest loads",
            About(
                "The p99 of load durations of the child that has the greatest.",
                "Amber from 1 s, red from 5 s. The value is a bucket's bound or between two.",
                "Compare with time to first token below; open Slow loads for single ones.",
                "A slow load costs nothing if its requests had been waiting anyway.",
            ),
            Query(worst(f"({p99}) >= 0"), "{{connector}}"),
            unit="s",
            verdict=looks.LOAD_SECONDS,
        ),
        number(
            "Steps wait",
            About(
                "How long a step's forward waits for synchronous loads: p99 of the child that has the greatest.",
                "Everything in that step waits, not only the request that loads. Amber from 50 ms.",
                "Put that child behind a faster one, or load asynchronously.",
                "No value is not zero: asynchronous children let no step wait, and CUDA graphs hide it.",
            ),
            Query(worst(f"({stall}) >= 0"), "{{connector}}"),
            unit="s",
            verdict=looks.STALL_SECONDS,
            empty="No waits",
        ),
        number(
            "Oldest open",
            About(
                "Age of the oldest load or promised save that is still open.",
                "Amber from 10 s, red from 60 s; it grows while the engine hangs.",
                "Look for the rank that has not reported: the board Connector, ranks.",
                "'Nothing open' is the normal state between requests.",
            ),
            Query(worst(questions.oldest(*by_child)), "{{connector}}"),
            unit="s",
            verdict=looks.AGE_SECONDS,
            empty="Nothing open",
        ),
        number(
            "Prompt loaded",
            About(
                "Tokens that children loaded, among all prompt tokens that vLLM took in.",
                "What the children are for: more is better. What is right depends on the traffic.",
                "Where it falls: look at hits, and at forgone tokens.",
                "Tokens in vLLM's own prefix cache are not loaded, so a good local cache lowers this share.",
            ),
            Query(questions.loaded_share()),
            unit="percentunit",
        ),
        number(
            "Forgone",
            About(
                "Tokens that a child offered beyond what the chosen one did, among all offered.",
                "0: the first child with a hit always had the longest. Amber from 30 %.",
                "Try load_policy longest, or change the order of the children.",
                "The longest offer is not always the cheapest one to load.",
            ),
            Query(questions.forgone_share()),
            unit="percentunit",
            verdict=looks.FORGONE_SHARE,
        ),
        number(
            "Bytes loaded",
            About(
                "Bytes per second that all children load into the KV cache, over all ranks.",
                "Compare with what the network or the disk can do.",
                "Near that limit: fewer or shorter loads, or another child first.",
                "Bytes are tokens times their size in the KV cache; a child may move more or fewer.",
            ),
            Query(SELECTION.rate(signals.LOAD_BYTES)),
            unit="Bps",
        ),
    ]


def _children() -> Panel:
    every = questions.child_or_zero
    in_flight = SELECTION.gauge(signals.IN_FLIGHT, *by_child)
    return rows(
        "Which child is guilty?",
        About(
            "A row for each configured child, the worst on top.",
            "Verdict: left out (in quarantine); failing (5 % of its loads and calls or more); slow (p99 of 1 s or "
            "more); OK; idle (not called).",
            "Click a child for its own board.",
            "Slow is not guilty where time to first token does not follow.",
        ),
        {"connector": "Child"},
        [
            Column("Verdict", questions.verdict(), words=looks.VERDICTS),
            Column("Failing", questions.failing_share(*by_child), "percentunit", looks.FAILING_SHARE, decimals=1),
            Column("Failures/s", every(questions.failures(*by_child)), verdict=looks.ANY_IS_WARNING, decimals=2),
            Column("Loads/s", every(SELECTION.rate(signals.LOADS, *by_child)), decimals=2),
            Column("Load p99", SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_child), "s", looks.LOAD_SECONDS),
            Column("Step waits", SELECTION.mean(signals.LOAD_STALL, *by_child), "s", looks.STALL_SECONDS),
            Column("Hit share", questions.hit_share(*by_child), "percentunit", decimals=0),
            Column("Open", every(in_flight)),
            Column("Forgone", questions.forgone_share(*by_child), "percentunit", looks.FORGONE_SHARE, decimals=0),
        ],
        link=TO_CHILD,
    )


def _failing() -> Panel:
    return lines(
        "Which child began to fail, and when? (failures/s)",
        About(
            "Loads that failed and exceptions, per second, by child.",
            "A flat zero is health.",
            "Match the beginning with restarts and versions (vertical lines), then open the child.",
            "A failed load is not a failed request: its tokens are computed again, unless the policy is fail.",
        ),
        of_child(questions.child_or_zero(questions.failures(*by_child))),
        unit="ops",
    )


def _slow() -> Panel:
    return lines(
        "Which child loads slowly? (p99)",
        About(
            "The p99 of load durations, by child.",
            "One line that rises alone: that child. All rising together: the machine or the network.",
            "Open Slow loads for the traces of such loads.",
            "Synchronous and asynchronous loads are not the same duration: see the child's board.",
        ),
        of_child(SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_child)),
        unit="s",
    )


def _ttft() -> Panel:
    return lines(
        "Does it cost time to first token?",
        About(
            "vLLM's time to first token (grey), beside it how long loads take and how long steps wait (dashed), by "
            "child: p95.",
            "A child's line near the grey one, rising with it: that child costs time to first token.",
            "Compare with the share of prompt tokens from children: loads also save the computing of them.",
            "Only requests that load pay for loads; time to first token is of all requests.",
        ),
        Query(questions.VLLM.host_quantile(0.95, "time_to_first_token_seconds"), "TTFT of vLLM", looks.HOST, 3),
        of_child(SELECTION.quantile(0.95, signals.LOAD_DURATION, *by_child), "load"),
        of_child(SELECTION.quantile(0.95, signals.LOAD_STALL, *by_child), "step wait", dashed=True),
        unit="s",
    )


def _brought() -> Panel:
    return lines(
        "What do the children bring? (tokens/s)",
        About(
            "Tokens loaded per second, by child.",
            "What does not come from a child, or from vLLM's own cache, is computed.",
            "A child that never brings anything costs lookups: take it out, or move it.",
            "A child with few tokens may be the one that has what no other has.",
        ),
        of_child(questions.child_or_zero(SELECTION.rate(signals.LOAD_TOKENS, *by_child))),
        unit="short",
        stacked=True,
    )


def _open() -> Panel:
    return lines(
        "What is open, and does it pile up?",
        About(
            "Loads and promised saves that are open, by child.",
            "Up and down is normal; a line that only climbs is a backlog, and its blocks are held.",
            "Open the child's board: oldest age, save hold, stuck ranks.",
            "Numbers come while the engine works: an idle engine's last number stays.",
        ),
        of_child(questions.child_or_zero(SELECTION.gauge(signals.IN_FLIGHT, *by_child))),
        unit="short",
    )


def _bytes() -> Panel:
    return lines(
        "How many bytes are loaded?",
        About(
            "Bytes loaded per second over all ranks, by child.",
            "A plateau beside a rising p99: that child's path is full.",
            "Compare with what the path can do; shorten loads or spread them.",
            "Bytes are tokens times their size in the KV cache; a child may move more or fewer.",
        ),
        of_child(questions.child_or_zero(SELECTION.rate(signals.LOAD_BYTES, *by_child))),
        unit="Bps",
        stacked=True,
    )
