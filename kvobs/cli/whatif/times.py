"""Predict a request's time to first token from what is recorded: the assumptions are in docs/whatif.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvobs.cli.whatif.history import History, PastLoad, PastLookup
from kvobs.routing.lookups import Offer
from kvobs.state.load_times import LoadTimes
from kvobs.telemetry.flight import OWN

_FIRST = 12  # loads of a connector from which those before them are predicted


@dataclass(frozen=True)
class Outcome:
    """What a lookup leads to, after ``waited_s``: an ``offer``, by the recorded child, or ``NOTHING``."""

    offer: Offer
    waited_s: float


class Times:
    """The load times of an engine's connectors, and what computing takes, at each recorded lookup.

    Loads count from when they ended; before a connector's first load, its first loads count.

    Args:
        history: of the engine.
    """

    def __init__(self, history: History) -> None:
        loads = [lookup.load for lookup in history.lookups if lookup.load is not None]
        ended = [load for load in loads if load.outcome == "ok" and load.seconds is not None]
        self._ended: list[PastLoad] = sorted(ended, key=attrgetter("ended_ns"), reverse=True)
        self._of = [LoadTimes() for _ in history.children]
        self._has_some = [False] * len(history.children)
        self._first = [
            _learned([load for load in reversed(self._ended) if load.child == child][:_FIRST])
            for child in range(len(history.children))
        ]
        self.resume_s = statistics.median(history.resumes_s) if history.resumes_s else 0.0
        """From an asynchronous load's end to the step that schedules its request: the median."""

    def until(self, now_ns: int) -> None:
        """Take in the loads that had ended by then."""
        while self._ended and self._ended[-1].ended_ns <= now_ns:
            load = self._ended.pop()
            assert load.seconds is not None
            self._of[load.child].observe(load.tokens, load.seconds)
            self._has_some[load.child] = True

    def load_s(self, child: int, tokens: int) -> float | None:
        """Return the predicted seconds of a load; None if no load of this connector is recorded."""
        return (self._of if self._has_some[child] else self._first)[child].predict(tokens)

    def waited_s(self, outcome: Outcome) -> float | None:
        """Return the predicted seconds that a request waits for its load."""
        child, tokens, is_async = outcome.offer
        if not tokens:
            return 0.0
        load_s = self.load_s(child, tokens)
        return None if load_s is None else load_s + (self.resume_s if is_async else 0.0)

    def first_token_s(self, lookup: PastLookup, outcome: Outcome, recorded: Outcome) -> float | None:
        """Return the predicted time to first token; None if something is missing.

        Args:
            lookup: as it was; what it waited beyond its answers, as for free blocks, stays.
            outcome: under the settings in question.
            recorded: under the recorded ones.
        """
        waited_s, computing_s = self.waited_s(outcome), computing(lookup, outcome)
        if lookup.arrived_ns is None or waited_s is None or computing_s is None:
            return None
        queued_s = (lookup.began_ns - lookup.arrived_ns) / 1e9
        other_s = max(0.0, (lookup.ended_ns - lookup.began_ns) / 1e9 - recorded.waited_s)
        return queued_s + other_s + outcome.waited_s + waited_s + computing_s


def computing(lookup: PastLookup, outcome: Outcome) -> float | None:
    """Return the predicted seconds of computing what the outcome leaves; None if there was no estimate."""
    return lookup.crowded_s(outcome.offer.child if outcome.offer.tokens else OWN)


def saved(lookup: PastLookup, child: int) -> float | None:
    """Return the seconds of computing that this child's offer saves."""
    whole_s, rest_s = lookup.computing.get(OWN), lookup.computing.get(child)
    return None if whole_s is None or rest_s is None else max(0.0, whole_s - rest_s)


def _learned(loads: Sequence[PastLoad]) -> LoadTimes:
    times = LoadTimes()
    for load in loads:
        assert load.seconds is not None
        times.observe(load.tokens, load.seconds)
    return times
