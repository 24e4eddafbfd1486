"""Colours and value mappings of boards: colours by meaning, from Okabe and Ito's colour-blind safe palette."""

from __future__ import annotations

from dashboards.sdk import board, model
from kvobs.schema import verdicts
from kvobs.schema.verdicts import Severity

GOOD, WARNING, BAD, IDLE = "#009E73", "#E69F00", "#D55E00", "#8A8A8A"
NONE = "transparent"
VLLM = "#B8B8B8"  # vLLM's numbers, next to ours
OTHER = "#56B4E9"

BY_OUTCOME = {
    "hit": "#009E73",
    "ok": "#009E73",
    "miss": "#8A8A8A",
    "pending": "#56B4E9",
    "timeout": "#E69F00",
    "not_read": "#CC79A7",
    "aborted": "#E69F00",
    "abandoned": "#D55E00",
    "failed": "#D55E00",
}
BY_REASON = {
    "never_seen": "#8A8A8A",
    "beyond_prefix": "#B8B8B8",
    "no_full_block": "#56B4E9",
    "other_connector": "#0072B2",
    "not_stored": "#E69F00",
    "evicted": "#D55E00",
    "unknown": "#CC79A7",
}
BY_QUANTILE = {"p50": "#9AD0F3", "p95": "#56B4E9", "p99": "#0072B2"}
BY_SIDE = {"prefill": "#0072B2", "decode": "#E69F00"}
BY_TOKENS = {
    "offered": "#56B4E9",
    "admitted": "#0072B2",
    "loaded": "#009E73",
    "lost": "#E69F00",
    "recomputed": "#D55E00",
}

BY_INDEX = ("#56B4E9", "#F0E442", "#CC79A7", "#0072B2", "#009E73", "#E69F00", "#D55E00")
"""Colours of connectors by their position in the configuration; the first four mean nothing else."""

NO_TRAFFIC = "No traffic"
NO_DATA = "No data"


def thresholds(*steps: tuple[float, str], first: str = GOOD) -> board.ThresholdsConfig:
    """Return thresholds: colour ``first``, then each step's colour from its value on."""
    marks = [model.Threshold(color=first, value=None), *(model.Threshold(color=c, value=v) for v, c in steps)]
    return board.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(marks)


PLAIN = thresholds(first=OTHER)

# Where there is an alert, a board changes its colour at the alert's threshold; only the alert waits before it fires.
FAILING_SHARE = thresholds((1e-9, WARNING), (verdicts.FAILING.limits["failing_share"], BAD))
# Limits of percentiles are bounds of their histograms. slow_load_ms is 1000.
LOAD_SECONDS = thresholds((verdicts.SLOW.limits["load_p99"], WARNING), (4, BAD))
STALL_SECONDS = thresholds((2**26 / 1e9, WARNING), (2**28 / 1e9, BAD))
SCHEDULER_SHARE = thresholds((verdicts.BLOCKING.limits["scheduler_share"], WARNING), (0.5, BAD))
AGE_SECONDS = thresholds((10, WARNING), (60, BAD))  # stuck_after_s is 60
HANG_SECONDS = thresholds((verdicts.HANGS.limits["call"], BAD))
UNUSED_HIT_SHARE = thresholds((0.3, WARNING))
NET_GAIN = thresholds((0, GOOD), first=WARNING)
ANY_IS_BAD = thresholds((1e-9, BAD))
ANY_IS_WARNING = thresholds((1e-9, WARNING))

_OF_SEVERITIES = {Severity.NONE: IDLE, Severity.GOOD: GOOD, Severity.WARNING: WARNING, Severity.BAD: BAD}
VERDICTS = {i: (state.name, _OF_SEVERITIES[state.severity]) for i, state in enumerate(reversed(verdicts.STATES))}
"""States by their number: the worst has the greatest."""

SEVERITIES = {1: ("info", OTHER), 2: ("warning", WARNING), 3: ("critical", BAD)}

ALL_UP = {0: ("all up", GOOD)}
IN_QUARANTINE = {1: ("in quarantine", BAD)}


def map_values(values: dict[int, tuple[str, str]]) -> model.ValueMap:
    """Return a mapping from numbers to texts with colours."""
    return model.ValueMap(
        options={
            str(value): model.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(values.items())
        }
    )


def not_a_number(text: str, color: str = IDLE) -> model.SpecialValueMap:
    """Return a mapping from null and NaN to a text."""
    return model.SpecialValueMap(
        options=model.DashboardSpecialValueMapOptions(
            match=model.SpecialValueMatch.NULL_AND_NAN, result=model.ValueMappingResult(text=text, color=color)
        )
    )


def fix_color(color: str) -> dict[str, str]:
    """Return a field's property ``color`` for a fixed colour."""
    return {"fixedColor": color, "mode": "fixed"}


def only_what_stands_out(verdict: board.ThresholdsConfig) -> board.ThresholdsConfig:
    """Return the same thresholds without a colour for normal values."""
    first, *rest = verdict.build().steps
    return (
        board.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(color=NONE, value=first.value), *rest])
    )


def bound(verdict: board.ThresholdsConfig, color: str) -> float:
    """Return the value from which a threshold has this colour."""
    return next(step.value for step in verdict.build().steps if step.color == color and step.value is not None)
