"""Compare what was with what the replay predicts, for the recorded settings and for others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvobs.cli.whatif.history import History, PastLookup
from kvobs.cli.whatif.replay import Replay, Settings
from kvobs.cli.whatif.times import Outcome, Times, saved
from kvobs.state.lookup import NOBODY

_DONE = ("ok", "failed")
P50, P95 = 0.5, 0.95


@dataclass
class Column:
    """The numbers of one way in which all went, or would have gone."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Loaded, by connector."""
    loads: int = 0
    saved_s: float = 0.0
    """Of computing, by these loads."""
    waited_s: float = 0.0
    """For them."""
    first_tokens_s: list[float] = field(default_factory=list)

    def add_load(self, connector: str, tokens: int, saved_s: float | None, waited_s: float | None) -> None:
        self.tokens[connector] += tokens
        self.loads += 1
        self.saved_s += saved_s or 0.0
        self.waited_s += waited_s or 0.0

    def first_token_s(self, share: float) -> float | None:
        """Return a quantile of the times to first token."""
        if not self.first_tokens_s:
            return None
        return sorted(self.first_tokens_s)[math.ceil(share * len(self.first_tokens_s)) - 1]


@dataclass
class Comparison:
    """What was, the model's prediction of just that, and its prediction for other settings.

    Attributes:
        lookups: that are recorded with all their answers, and whose load has ended.
        known: how many of them could be repeated; the others are in no column.
        unknown: connectors that nobody waited for, and how many lookups depend on their answers.
        repeated: how many of the known ones choose, under the recorded settings, as they did.
        changed: how many of the known ones choose otherwise under the others.
        requests: whose only lookup led to a first token.
        predicted: how many of them have a predicted one in both ways.
        unpredicted: connectors without a recorded load, and of how many requests the prediction needs one.
        unestimated: requests before there was an estimate of what computing costs.
    """

    was: Column = field(default_factory=Column)
    model: Column = field(default_factory=Column)
    what_if: Column = field(default_factory=Column)
    lookups: int = 0
    known: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    changed: int = 0
    requests: int = 0
    predicted: int = 0
    unpredicted: Counter[str] = field(default_factory=Counter)
    unestimated: int = 0
    began_ns: int = 0
    ended_ns: int = 0


def compare(histories: Sequence[History], settings: Sequence[Settings]) -> Comparison:
    """Compare each engine's history with what the settings for it lead to."""
    found = Comparison()
    for history, other in zip(histories, settings, strict=True):
        _Engine(history, other, found).run()
    return found


class _Engine:
    """The comparison of one engine."""

    def __init__(self, history: History, settings: Settings, found: Comparison) -> None:
        self._history = history
        self._found = found
        recorded = Settings.of(history.children, history.settings)
        self._times = Times(history)
        self._recorded, self._other = (Replay(history, one, self._times) for one in (recorded, settings))
        self._gone: set[int] = set()  # requests that would not have been looked up again after a failed load

    def run(self) -> None:
        found, lookups = self._found, self._history.lookups
        if lookups:
            began_ns = min(lookup.began_ns for lookup in lookups)
            found.began_ns = min(found.began_ns or began_ns, began_ns)
            found.ended_ns = max(found.ended_ns, lookups[-1].ended_ns)
        for lookup in lookups:
            self._times.until(lookup.ended_ns)
            if lookup.load is None or lookup.load.outcome in _DONE:
                found.lookups += 1
                self._compare(lookup)

    def _compare(self, lookup: PastLookup) -> None:
        found = self._found
        recorded, other = self._recorded.repeat(lookup), self._other.repeat(lookup)
        if recorded is None or other is None:
            found.unknown.update(
                self._history.children[child] for child, answer in lookup.answers.items() if answer.tokens is None
            )
            return
        found.known += 1
        found.repeated += _chosen(recorded) == lookup.chosen
        found.changed += _chosen(other) != _chosen(recorded)
        self._add_past(lookup)
        has_failed = lookup.load is not None and lookup.load.outcome == "failed"
        self._add(lookup, recorded, found.model, has_failed=has_failed)
        if lookup.request not in self._gone:
            is_same = _chosen(other) == _chosen(recorded)
            self._add(lookup, other, found.what_if, has_failed=has_failed and is_same)
            if has_failed and not is_same:
                self._gone.add(lookup.request)
        if lookup.first_token_ns is not None and lookup.is_only:
            self._add_first_token(lookup, recorded, other)

    def _add_past(self, lookup: PastLookup) -> None:
        load = lookup.load
        if load is not None:
            is_good = load.outcome == "ok"
            name, tokens = self._history.children[load.child], load.tokens if is_good else 0
            self._found.was.add_load(name, tokens, saved(lookup, load.child) if is_good else 0.0, load.waited_s)

    def _add(self, lookup: PastLookup, outcome: Outcome, column: Column, *, has_failed: bool) -> None:
        """Add the load of an outcome; one that failed does so again."""
        child, tokens, _ = outcome.offer
        if not tokens:
            return
        load = lookup.load
        if load is None and child == lookup.chosen:
            return  # vLLM has not taken the offer
        if load is not None and load.child == child:
            tokens = load.tokens
        if has_failed:
            column.add_load(self._history.children[child], 0, 0.0, load.waited_s if load is not None else 0.0)
        else:
            waited_s = self._times.waited_s(outcome)
            column.add_load(self._history.children[child], tokens, saved(lookup, child), waited_s)

    def _add_first_token(self, lookup: PastLookup, recorded: Outcome, other: Outcome) -> None:
        found, times = self._found, self._times
        found.requests += 1
        assert lookup.arrived_ns is not None
        assert lookup.first_token_ns is not None
        predicted = [times.first_token_s(lookup, outcome, recorded) for outcome in (recorded, other)]
        model_s, what_if_s = predicted
        if model_s is None or what_if_s is None:
            lacking = {outcome.offer.child for outcome in (recorded, other) if times.waited_s(outcome) is None}
            found.unpredicted.update(self._history.children[child] for child in lacking)
            found.unestimated += not lacking
            return
        found.predicted += 1
        was_s = (lookup.first_token_ns - lookup.arrived_ns) / 1e9
        found.was.first_tokens_s.append(was_s)
        found.model.first_tokens_s.append(model_s)
        found.what_if.first_tokens_s.append(_corrected(what_if_s, was_s, model_s))


def _corrected(predicted_s: float, was_s: float, model_s: float) -> float:
    """Return a prediction with the error that the model makes for the same request as it was.

    What it took longer, by a pause of the machine or behind others, it takes again; it is quicker in proportion.
    """
    return was_s + (predicted_s - model_s) if was_s > model_s else was_s * (predicted_s / model_s)


def _chosen(outcome: Outcome) -> int:
    return outcome.offer.child if outcome.offer.tokens else NOBODY
