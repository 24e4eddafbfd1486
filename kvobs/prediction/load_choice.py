"""Choose for each request the connector with the least predicted time until it resumes, or none.

The predicted time is that of the load, its connector's mean delay beyond earlier predictions, and the computing of the
other tokens. Nothing is loaded if computing everything is predicted to be quicker by a margin. An unknown connector is
tried by one request at a time.

A connector that is not chosen may have become faster, and is tried again at times. Expensive trials are rarer. A former
fastest connector is retried once its expected saving equals the cost of the trial; each failed trial doubles that
threshold. An allowance limits all trials together; a trial after a much quicker one than predicted is exempt. Decisions
are deterministic: they follow from the offers and loads alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvobs.prediction.load_times import LoadTimes
from kvobs.state.offers import Decision

FASTEST, EXPLORED, UNKNOWN, COMPUTING = "predicted_fastest", "explored", "unknown", "computing_is_faster"
HANDED_OVER = "handed_over"
REASONS = (FASTEST, EXPLORED, UNKNOWN, COMPUTING, HANDED_OVER)

_MARGIN, _MARGIN_S = 0.2, 0.002  # how much quicker than loading computing must be: a share of it, and seconds
_ABOUT = 1.05  # times the least are about equal: the first of these is chosen
_TRIAL_COST = 0.05  # of the time of all requests, what the trials of a connector may add
_TRY_AFTER, _TRY_BEFORE = 8, 512  # decisions, however cheap or dear a trial
_ALLOWED, _SAVED_UP = 1 / 60, 2.0  # trials of all connectors: of a decision, and the most at once
_DOUBLED_AT_MOST = 20  # times
_KEEP = 0.99  # of how late a connector's loads were, at each decision
_RELIABLE = 10  # loads that are assumed to have been in time
_LATE_AT_MOST = 20.0  # times what was predicted, that one load counts
_BETTER = 1.5  # times quicker than predicted: worth another trial at once


class Candidate(NamedTuple):
    """An offer that may be loaded."""

    child: int  # that offers
    tokens: int
    rest_s: float | None  # the seconds that computing the tokens after them takes; None if that is not known
    open_loads: Sequence[tuple[int, float]] = ()  # of this child: see ``LoadTimes.predict``


@dataclass(slots=True)
class _Past:
    """The history of a child's offers."""

    passed_over: int = 0  # decisions since the last one for it
    missed_s: float = 0.0  # the seconds that it would have saved in them at its former best speed
    in_vain: int = 0  # failed trials since it was the fastest
    best: tuple[float, float] | None = None  # its fixed seconds and its seconds per token at that time
    is_promising: bool = False  # whether its last load was a trial, and much quicker than predicted
    is_tried: bool = False  # whether a trial is in progress
    loads: float = 0.0  # number of recent loads, with older ones counting less
    late_s: float = 0.0  # total delay of these beyond their predictions


class LoadChoice:
    """Choices among all connectors of an engine, and the knowledge for them."""

    def __init__(self, children: int) -> None:
        self.times = [LoadTimes() for _ in range(children)]
        self._past = [_Past() for _ in range(children)]
        self._allowance = 1.0

    def observe(self, child: int, tokens: int, seconds: float) -> None:
        """Take in a load that has ended: see ``LoadTimes.observe``."""
        times, past = self.times[child], self._past[child]
        expected_s = times.predict(tokens)
        if expected_s is not None:
            past.is_promising, past.is_tried = past.is_tried and seconds * _BETTER < expected_s, False
            past.loads += 1
            past.late_s = max(0.0, past.late_s + min(seconds - expected_s, _LATE_AT_MOST * expected_s))
        times.observe(tokens, seconds)

    def decide(self, candidates: Sequence[Candidate], computing_s: float | None) -> Decision:
        """Return the decision about a request, which changes nothing: vLLM may ask again before it allocates.

        ``candidates`` are at least one, in the order of the configuration; computing everything takes ``computing_s``.
        """
        offered = tuple([candidate.child for candidate in candidates])
        predicted: dict[int, float] = {}
        at_best: dict[int, float] = {}
        untried = None
        for child, tokens, rest_s, open_loads in candidates:
            load_s = self.times[child].predict(tokens, open_loads)
            if load_s is None:
                if untried is None and not open_loads:
                    untried = child
            elif rest_s is not None:
                past = self._past[child]
                predicted[child] = load_s + rest_s
                if (best := past.best) is not None:
                    risk_s = past.late_s / (past.loads + _RELIABLE)  # how late the next load is expected to be
                    at_best[child] = best[0] + tokens * best[1] + rest_s + risk_s
        if untried is not None or not predicted:
            first = offered[0] if untried is None else untried
            hangs = computing_s is not None and any(age > computing_s for _, age in candidates[0].open_loads)
            if untried is None and hangs:
                return Decision(None, COMPUTING, first, offered, predicted, computing_s, {})
            return Decision(first, UNKNOWN, first, offered, predicted, computing_s, {})
        least_s = min(predicted.values())
        quickest = next(child for child, seconds in predicted.items() if seconds <= least_s * _ABOUT)
        spent_s = predicted[quickest]
        chosen: int | None = quickest
        if computing_s is not None and computing_s < spent_s - max(_MARGIN_S, _MARGIN * spent_s):
            spent_s, chosen = computing_s, None
        missed = {child: spent_s - seconds for child, seconds in at_best.items() if seconds < spent_s}
        reason = COMPUTING if chosen is None else FASTEST
        if (trial := self._trial(predicted, chosen, spent_s)) is not None:
            chosen, reason = trial, EXPLORED
        return Decision(chosen, reason, quickest if chosen is None else chosen, offered, predicted, computing_s, missed)

    def _trial(self, predicted: dict[int, float], chosen: int | None, spent_s: float) -> int | None:
        """Return the child to try instead of the chosen one: the one that may save most."""
        others = [child for child in predicted if child != chosen]
        for child in others:
            if self._past[child].is_promising:
                return child
        if self._allowance < 1:
            return None
        due = [child for child in others if self._is_due(child, predicted[child], spent_s)]
        return max(due, key=lambda child: (self._past[child].missed_s, self._past[child].passed_over), default=None)

    def _is_due(self, child: int, seconds: float, spent_s: float) -> bool:
        past, cost_s = self._past[child], seconds - spent_s
        if past.passed_over < _TRY_AFTER:
            return False
        cost_s *= 2.0 ** min(past.in_vain, _DOUBLED_AT_MOST)
        if past.missed_s > 0 and past.missed_s >= cost_s:
            return True
        return past.passed_over >= min(cost_s / max(spent_s, _MARGIN_S) / _TRIAL_COST, _TRY_BEFORE)

    def taken(self, decision: Decision) -> None:
        """Note a decision by which vLLM has allocated."""
        self._allowance = min(_SAVED_UP, self._allowance + _ALLOWED)
        for child in decision.offered:
            past = self._past[child]
            past.passed_over += 1
            past.loads, past.late_s = past.loads * _KEEP, past.late_s * _KEEP
            past.missed_s += decision.missed.get(child, 0.0)
        if decision.child is None:
            return
        past = self._past[decision.child]
        was_promising, past.is_promising = past.is_promising, False
        past.passed_over, past.missed_s = 0, 0.0
        if decision.reason == EXPLORED:
            if not was_promising:
                self._allowance -= 1
                past.in_vain += 1
                past.is_tried = True
        elif decision.reason == FASTEST:
            times = self.times[decision.child]
            past.in_vain, past.best = 0, (times.fixed, times.per_token)
