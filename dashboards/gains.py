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
            "Computing time that loads save, minus the time that requests wait for them, divided by the time of all "
            "engines: seconds per second and engine.",
            "25 %: loads save a quarter of each GPU's time, beyond the time that requests wait for them. Below 0: "
            "computing would be faster than loading.",
            "If it is negative, find the connector: column Net gain of the Overview, row Gain of the board Connector.",
            "An estimate from the engine's steps. Above 100 % loads save more than the engines could compute. "
            "'No traffic': nothing was loaded, or no step has computed a prompt yet.",
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
            "Time that computing the loaded tokens would have taken, minus the time that requests waited, per second.",
            "Below 0: it would be faster to compute what this connector loads.",
            "Put a faster connector first, look for the cause of slow loads, or load only long prefixes from it.",
            "Requests of one step wait at the same time: the gain may be above 1. An estimate from the engine's steps.",
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
            "Share of loads for which requests waited longer than computing the same tokens would have taken, and of "
            "loads with an estimate of that (dashed).",
            "0: every load pays. Above a half: most loads of this connector delay their requests.",
            "Compare load durations with the tokens of a load: small loads rarely pay.",
            "A load that fails does not pay. Loads without an estimate count as if they paid.",
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
            f"Tokens per second that connectors offered and none loaded: {reasons}.",
            "other_chosen: a connector with fewer tokens was chosen. not_allocated, aborted: the request ended first.",
            "not_allocated: the KV cache is full, or clients give up. declined: see best_effort.",
            "vLLM always computes a prompt's last token, so a little not_taken is normal.",
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
            "Tokens per second that vLLM decided to load, by connector and by the tier that they were in: host memory, "
            "disk, another machine (p2p), or unspecified.",
            "A shift from host to disk: memory no longer holds the requested tokens, and loads take longer.",
            "Compare with the curve in the row Reuse: memory should hold the size at which it rises.",
            "The connector reports the tier; otherwise it is unspecified. No data: vLLM before 0.33, or without its "
            "stat logging.",
        ),
        Query(SELECTION.rate(signals.HIT_TOKENS, "connector", "source"), "{{connector}} {{source}}"),
        unit="short",
        stacked=True,
    )
