"""Panels about what loads gain: time that they save, time that requests wait for them, tokens that are not loaded."""

from __future__ import annotations

from dashboards import looks, questions
from dashboards.frame import Section
from dashboards.panels import About, Panel, Query, lines, number, of_connector
from dashboards.questions import SELECTION
from kvobs.schema import signals


def gains() -> Section:
    """Return the section of the board *Connector*."""
    return Section(
        "Gain: time that loads save, minus time that requests wait for them",
        [
            (8, [(12, _net()), (12, _slower())]),
            (8, [(12, _lost()), (12, _tiers())]),
        ],
        collapsed=True,
    )


def net_gain() -> Panel:
    """Return the tile of the board *Overview*."""
    return number(
        "Net gain",
        About(
            "Computing time that loads save, minus the time that requests wait for them, per second of all engines; "
            "an estimate.",
            "If it is negative, find the connector in the column Net gain below, then open the row Gain of its board.",
        ),
        Query(questions.net_gain_share()),
        unit="percentunit",
        verdict=looks.NET_GAIN,
        least=None,
    )


def _net() -> Panel:
    return lines(
        "Net gain by connector (s/s)",
        About(
            "Time that computing the loaded tokens would have taken, minus the time that requests waited (dashed), "
            "per second; an estimate.",
            "Below 0 computing is faster: put a faster connector first, or load only long prefixes from it.",
        ),
        of_connector(questions.net_gain("connector")),
        of_connector(SELECTION.rate(signals.LOAD_WAITED, "connector"), "waited", dashed=True),
        unit="short",
        least=None,
    )


def _slower() -> Panel:
    return lines(
        "Loads slower than computing (share)",
        About(
            "Share of loads for which requests waited longer than computing would have taken, and of loads with such "
            "an estimate (dashed).",
            "Above 50 % most loads delay their requests: compare load durations with the tokens of a load, since "
            "small loads rarely pay.",
        ),
        of_connector(questions.slower_share("connector"), "slower"),
        of_connector(questions.estimated_share("connector"), "estimated", dashed=True),
        unit="percentunit",
    )


def _lost() -> Panel:
    reasons = " or ".join(signals.UNUSED_HIT_TOKENS.labels["reason"])
    return lines(
        "Offered tokens not loaded (tokens/s)",
        About(
            f"Tokens per second that connectors offered and none loaded, by reason: {reasons}.",
            "With other_chosen try load_policy longest, with not_allocated look at vLLM's KV cache usage, with "
            "declined see best_effort.",
        ),
        Query(
            SELECTION.rate(signals.UNUSED_HIT_TOKENS, "connector", "reason"),
            "{{connector}} {{reason}}",
        ),
        unit="short",
    )


def _tiers() -> Panel:
    return lines(
        "Hit tokens by tier (tokens/s)",
        About(
            "Tokens per second that vLLM decided to load, by connector and by the tier that they were in; vLLM "
            "reports it from 0.33 on.",
            "If they shift from host to disk, memory no longer holds what is asked for: see the curve in the row "
            "Reuse.",
        ),
        Query(SELECTION.rate(signals.HIT_TOKENS, "connector", "source"), "{{connector}} {{source}}"),
        unit="short",
        stacked=True,
    )
