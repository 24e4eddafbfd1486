"""The states of a connector on an engine, the worst first: the boards, `kvobs top` and `kvobs check` judge by them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """How bad a state is."""

    NONE = "idle"
    GOOD = "good"
    WARNING = "warn"  # requests are served as they should be, only later
    BAD = "bad"


class State(NamedTuple):
    """A state that a connector is in if one of its measures has at least this limit."""

    name: str
    limits: Mapping[str, float]
    """By measure, which the boards ask Prometheus for and `kvobs top` computes; of what hangs, the age in seconds."""
    condition: str
    """For people, with the limits in braces."""
    severity: Severity = Severity.BAD


ENDED = State("Ended the engine", {"ended": 1}, "it ended during a call into this connector")
HANGS = State(
    "Hangs",
    # A loaded request may wait for others that compute: only where nothing does, a resume has an age here.
    {"call": 10, "lookup": 15, "load": 15, "awaiting_schedule": 15},
    "a call takes {call} s, a lookup or load {load} s, or a resume {awaiting_schedule} s while nothing is computed",
)
CORRUPT = State("Corrupt", {"corrupt_blocks": 1}, "it loaded a block whose bytes differ from the computed ones")
QUARANTINED = State("Quarantined", {"quarantined": 1}, "it gets no new requests")
FAILING = State(
    "Failing", {"failing_share": 0.05}, "{failing_share:.0%} or more of its loads fail, exceptions included"
)
BLOCKING = State(
    "Blocks steps",
    {"scheduler_share": 0.1},
    "calls into it take {scheduler_share:.0%} or more of the scheduler's time; short polls do not count",
)
POLL_S = 0.01
"""Seconds. While requests wait and nothing is computed, the scheduler polls: shorter calls block no step then."""
SLOW = State(
    "Slow",
    {"load_p99": 1},  # a bound of the histogram
    "the p99 of its loads is {load_p99} s or more",
    Severity.WARNING,
)
THRASHING = State(
    "Thrashes",
    {"thrash_share": 0.3},
    "prompts ask again for {thrash_share:.0%} or more of what it evicts, and it loads less than that",
    Severity.WARNING,
)
FEW_TOKENS = 100
"""Tokens per second: fewer are not worth a change."""
UNSERVED_H, LOADABLE_SHARE = 3, 0.1
UNSERVED = State(
    "Never serves",
    {"never_serves": 1},  # it needs hours: boards show it while the alert of this name fires
    f"nothing was loaded from it in {UNSERVED_H} hours, although prompts evicted from vLLM's cache recur",
    Severity.WARNING,
)
SERVES_OTHERS = "(Nixl|MoRIIO|P2pNccl|HiSparse).*|Mooncake(Hybrid|Layerwise)?Connector(V1)?"
"""Connector classes, as a regular expression, that store nothing for their own engine, whatever their role."""
WELL = State(
    "OK",
    {"time_in_calls": 1e-9, "in_progress": 1, "requests": 1},
    "in use, or the engine has requests",
    Severity.GOOD,
)
IDLE = State("Idle", {"configured": 0}, "nothing to do", Severity.NONE)

ALERTS = {
    "ended": "KvobsEngineEnded",
    "call": "KvobsCallHangs",
    "lookup": "KvobsLookupUnanswered",
    "load": "KvobsLoadUnfinished",
    "awaiting_schedule": "KvobsRequestsNotResumed",
    "corrupt_blocks": "KvobsCorruptLoads",
    "quarantined": "KvobsConnectorQuarantined",
    "failing_share": "KvobsConnectorFailing",
    "scheduler_share": "KvobsConnectorBlocksScheduler",
    "load_p99": "KvobsLoadsSlow",
    "thrash_share": "KvobsStoreTooSmall",
    "never_serves": "KvobsNeverServes",
}
"""By the measure of a bad state: the alert whose section of the runbook helps."""
RUNBOOK = "https://github.com/kvobs/kvobs/blob/main/dashboards/runbook.md"
"""The address of the runbook, where a site has no copy; each alert is a section."""

# A store that thrashes may also never serve: the state names the cause.
STATES = (ENDED, HANGS, CORRUPT, QUARANTINED, FAILING, BLOCKING, SLOW, THRASHING, UNSERVED, WELL, IDLE)

SEVERITIES = {state.name: state.severity for state in STATES}


def judge(measures: Mapping[str, float | None]) -> tuple[State, str, float]:
    """Return the worst state that is true, the measure by which it is, and its value; None or no value is 0."""
    limits = ((state, measure, limit) for state in STATES for measure, limit in state.limits.items())
    values = ((state, measure, measures.get(measure) or 0.0, limit) for state, measure, limit in limits)
    return next((state, measure, value) for state, measure, value, limit in values if value >= limit)
