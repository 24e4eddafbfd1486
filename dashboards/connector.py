"""The board *Connector*: one child, or some beside each other: rate, errors, durations; then use, waiting, backlog."""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.connector_details import details
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, distribution, lines, of_child
from dashboards.questions import SELECTION
from dashboards.tables import Column, rows
from kvobs import signals


def connector() -> str:
    """Return the board's JSON."""
    return frame.board_text(
        frame.CONNECTOR,
        "kvobs / Connector",
        "One child, or some beside each other: what it was asked and brought, how it failed, how long it took, what it "
        "holds. Choose it above.",
        [
            Section("", [(6, [(13, _configured()), (11, _where())])]),
            Section(
                "Asked and brought: rate, errors, duration",
                [
                    (9, [(8, _lookups()), (8, _loads()), (8, _errors())]),
                    (9, [(8, _durations()), (8, _quantiles()), (8, _tokens())]),
                ],
            ),
            Section(
                "Held and waited for: use, backlog",
                [
                    (8, [(8, _in_flight()), (8, _age()), (8, _stalls())]),
                    (8, [(8, _saves()), (8, _hold()), (8, _delay())]),
                ],
            ),
            *details(),
        ],
    )


def _configured() -> Panel:
    return rows(
        "What is configured?",
        About(
            "The children as they are configured, in the order in which they are asked.",
            "Index 0 is asked first. Role and policies are those of the whole engine.",
            "Compare engines: a row more than there are children means that they are configured differently.",
            "That a child is configured does not say that it works.",
        ),
        {
            "index": "Index",
            "connector": "Child",
            "class": "Class",
            "role": "Role",
            "load_policy": "Load policy",
            "failure_policy": "Failure policy",
        },
        [
            Column(
                "",
                SELECTION.gauge(
                    signals.CONNECTOR_INFO, "index", "connector", "class", "role", "load_policy", "failure_policy",
                    how="max",
                ),
            )
        ],
    )  # fmt: skip


def _where() -> Panel:
    by = ("connector", "instance", "engine")
    return rows(
        "Where does it fail?",
        About(
            "Failures by child, instance and engine, the most on top.",
            "One instance only: that machine. All: the child, or what it talks to.",
            "Take the instance that is alone out of the routing, and look at its log.",
            "An instance without traffic has no failures either.",
        ),
        {"connector": "Child", "instance": "Instance", "engine": "Engine"},
        [
            Column("Failures/s", f"topk(10, {questions.failures(*by)})", verdict=looks.ANY_IS_WARNING, decimals=2),
            Column("Failing", f"topk(10, {questions.failing_share(*by)})", "percentunit", looks.FAILING_SHARE),
        ],
    )


def _lookups() -> Panel:
    return lines(
        "What did it answer? (lookups/s)",
        About(
            "Lookups per second by their outcome, as vLLM asked them.",
            "pending: not yet, ask again. timeout: it was passed over after lookup_timeout_ms.",
            "Many misses: is it asked for what it has? Many pending: lookups wait, see the delay below.",
            "A request may be asked about several times; these are not requests.",
        ),
        Query(SELECTION.rate(signals.LOOKUPS, "connector", "outcome"), "{{connector}} {{outcome}}"),
        unit="reqps",
        colors=looks.BY_OUTCOME,
        stacked=True,
    )


def _loads() -> Panel:
    return lines(
        "How did its loads end? (loads/s)",
        About(
            "Loads per second by mode and outcome.",
            "aborted: the request was cancelled. failed: its tokens are computed again, unless the policy is fail.",
            "Failed ones: see errors beside this, and the traces on Slow loads.",
            "A hit without a load was another child's request: see forgone and unclaimed.",
        ),
        Query(SELECTION.rate(signals.LOADS, "connector", "mode", "outcome"), "{{connector}} {{mode}} {{outcome}}"),
        unit="ops",
        colors=looks.BY_OUTCOME,
        stacked=True,
    )


def _errors() -> Panel:
    return lines(
        "What did it raise, and where?",
        About(
            "Exceptions by hook and class: the ten most frequent of each interval.",
            "No line is health.",
            "Look for the class in vLLM's log at that time; a red span has the same error.type.",
            "A child may fail loads without raising anything: see the outcomes of loads.",
        ),
        Query(
            f"topk(10, {SELECTION.counted(signals.CALL_ERRORS, 'connector', 'hook', 'error_type')})",
            "{{connector}} {{hook}}: {{error_type}}",
        ),
        unit="short",
    )


def _durations() -> Panel:
    return distribution(
        "How long did loads take?",
        About(
            "Loads that ended well, by duration; the points are single loads with a trace.",
            "Two bands are two kinds of loads. A point above them is worth a click.",
            "Click a point for its trace (needs Tempo, and the data source's exemplar setting).",
            "Failed and aborted loads are not in it. Choose one child: several are added up here.",
        ),
        SELECTION.increase(signals.LOAD_DURATION, "le", part="_bucket"),
    )


def _quantiles() -> Panel:
    return lines(
        "Durations of loads",
        About(
            "p50, p95 and p99 of loads that ended well, by child and mode.",
            "A p99 far from the p50: some loads are much slower, see ranks and traces.",
            "Compare with other children, and with time to first token on the Overview.",
            "Values lie within a bucket, a factor of two wide: small steps mean nothing. Modes are different "
            "durations: async from allocation to the last rank's receipt, sync a part of the step.",
        ),
        *(
            Query(
                SELECTION.quantile(q, signals.LOAD_DURATION, "connector", "mode"),
                f"{{{{connector}}}} {{{{mode}}}} {name}",
                color,
            )
            for (name, color), q in zip(looks.BY_QUANTILE.items(), (0.5, 0.95, 0.99), strict=True)
        ),
        unit="s",
        exemplars=True,
    )


def _tokens() -> Panel:
    asked = {
        "offered": signals.OFFERED_TOKENS,
        "admitted": signals.ADMITTED_TOKENS,
        "loaded": signals.LOAD_TOKENS,
        "forgone": signals.FORGONE_TOKENS,
        "recomputed": signals.RECOMPUTED_TOKENS,
    }
    return lines(
        "What became of the tokens it offered? (tokens/s)",
        About(
            "Tokens per second: offered, of these admitted for loading and loaded; forgone, because another child was "
            "chosen that had fewer; recomputed, because a load failed.",
            "Admitted close to offered: this child is the one that is used.",
            "Much forgone: load_policy longest, or another order. Recomputed: mend the failures.",
            "Offered but not admitted is no loss where another child had the same tokens.",
        ),
        *(
            Query(SELECTION.rate(signal, "connector"), f"{{{{connector}}}} {name}", looks.BY_TOKENS[name])
            for name, signal in asked.items()
        ),
        unit="short",
    )


def _in_flight() -> Panel:
    return lines(
        "What is open?",
        About(
            "Open loads, and open promised saves, whose blocks are held.",
            "A line that only climbs is a backlog.",
            "Saves pile up: the other side is slow or gone. Loads pile up: so are their requests.",
            "The number is as old as the engine's last step: it stands still while the engine is idle.",
        ),
        Query(SELECTION.gauge(signals.IN_FLIGHT, "connector", "kind"), "{{connector}} {{kind}}"),
        unit="short",
    )


def _age() -> Panel:
    return lines(
        "How old is the oldest?",
        About(
            "Age of the oldest open load and promised save.",
            "A saw is normal. A straight line upwards is one that does not end, or an engine that hangs.",
            "See which rank is stuck, below; then that worker's log.",
            "Nothing is shown while nothing is open.",
        ),
        Query(questions.oldest("connector", "kind"), "{{connector}} {{kind}}"),
        unit="s",
    )


def _stalls() -> Panel:
    return lines(
        "How long do steps wait for it? (p99)",
        About(
            "How long a step's forward waited for loads, and how long it spent in saves (dashed).",
            "Everything in that step waits, also requests that load nothing.",
            "A child that lets steps wait should be fast, or asynchronous.",
            "No line is not zero: asynchronous loads let no step wait, and full CUDA graphs hide it.",
        ),
        of_child(SELECTION.quantile(0.99, signals.LOAD_STALL, "connector"), "loads"),
        of_child(SELECTION.quantile(0.99, signals.SAVE_STALL, "connector"), "saves", dashed=True),
        unit="s",
    )


def _saves() -> Panel:
    return lines(
        "How did promised saves end? (saves/s)",
        About(
            "Saves promised at the end of a request and reported since, per second.",
            "abandoned: the child was in quarantine when it should have reported.",
            "None while requests end: the child promises none, which most do not.",
            "Saves that a child makes within a step are not promised, and not counted.",
        ),
        Query(SELECTION.rate(signals.SAVES, "connector", "outcome"), "{{connector}} {{outcome}}"),
        unit="ops",
        colors=looks.BY_OUTCOME,
        stacked=True,
    )


def _hold() -> Panel:
    return lines(
        "How long are blocks held for saves? (p99)",
        About(
            "Time from a request's end to its promised save's completion.",
            "So long its blocks are not free for other requests.",
            "Long, and the KV cache is full: this child costs capacity.",
            "It is not the time of the transfer itself, which may have waited to be fetched.",
        ),
        of_child(SELECTION.quantile(0.99, signals.SAVE_HOLD, "connector")),
        unit="s",
        exemplars=True,
    )


def _delay() -> Panel:
    return lines(
        "How long do lookups wait for an answer?",
        About(
            "Mean time from the child's first 'not yet' about a request to its answer.",
            "All of it is time to first token of these requests.",
            "Set lookup_timeout_ms, so that others may load in its stead.",
            "Requests that were answered at once are not in it.",
        ),
        of_child(SELECTION.mean(signals.LOOKUP_DELAY, "connector")),
        unit="s",
    )
