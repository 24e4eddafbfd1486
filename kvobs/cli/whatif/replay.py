"""Repeat recorded lookups with the router's own code, under other settings.

The connectors are replaced by their recorded answers, each as late as it was, counted from when it is asked first. The
clock stands still between the moments at which something may change: an answer, or the end of a time limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvobs.cli.whatif.history import History, PastLookup
from kvobs.cli.whatif.predicting import AsRecorded, Predicting
from kvobs.cli.whatif.times import Outcome, Times
from kvobs.options import Options
from kvobs.routing.lookups import Offer, Offers
from kvobs.telemetry.recorder import Recorder


@dataclass(frozen=True)
class Settings:
    """What decides which connector loads: the options of kvobs, and the order of the connectors, by name.

    Connectors that are not in ``order`` are not asked.
    """

    order: Sequence[str]
    options: Options

    @classmethod
    def of(cls, children: Sequence[str], recorded: Mapping[str, Any]) -> Settings:
        """Return the settings of a recording."""
        known = {key: value for key, value in recorded.items() if key in Options.model_fields}
        return cls(tuple(children), Options.model_validate(known))


@dataclass
class _Asked:
    """A lookup that is repeated, and when each child was asked first."""

    lookup: PastLookup
    since: dict[int, int] = field(default_factory=dict)
    is_unknown: bool = False  # one is asked that nobody has waited for so long


class Replay:
    """Repeats the lookups of an engine, in their order.

    Args:
        history: of the engine.
        settings: under which.
        times: of its loads, for the policy that predicts.
    """

    def __init__(self, history: History, settings: Settings, times: Times) -> None:
        self._places = [history.children.index(name) for name in settings.order]  # the recorded place of each child
        children: list[Any] = [
            self._child(place, name) for place, name in zip(self._places, settings.order, strict=True)
        ]
        isolation: Any = SimpleNamespace(asks=self._asks, discards=lambda *_: False)
        self._is_same = settings == Settings.of(history.children, history.settings)
        timeout_ms = settings.options.lookup_timeout_ms
        self._timeout_ns = None if timeout_ms is None else int(timeout_ms * 1e6)
        self._now_ns = 0
        self._asked: _Asked | None = None
        self._fastest: Any = None
        if settings.options.load_policy == "fastest":
            self._fastest = AsRecorded(self._places) if self._is_same else Predicting(self._places, times)
        self._offers = Offers(
            children,
            settings.options,
            Recorder(len(children)),
            isolation=isolation,
            fastest=self._fastest,
            clock=lambda: self._now_ns,
        )

    def _child(self, place: int, name: str) -> Any:
        def answer(_request: Any, _computed: int) -> tuple[int | None, bool]:
            assert self._asked is not None
            since_ns = self._asked.since.setdefault(place, self._now_ns)
            found = self._asked.lookup.answers[place]
            spent_ns = self._now_ns - since_ns
            if found.tokens is None and spent_ns > found.waited_ns:
                self._asked.is_unknown = True
            if found.tokens is None or spent_ns < found.waited_ns:
                return None, False
            return found.tokens, found.is_async

        return SimpleNamespace(name=name, get_num_new_matched_tokens=answer)

    def _asks(self, child: int, _request: str) -> bool:
        assert self._asked is not None
        return self._places[child] in self._asked.lookup.answers

    def repeat(self, lookup: PastLookup) -> Outcome | None:
        """Return what the lookup leads to; None if that depends on an answer which nobody waited for."""
        asked = self._asked = _Asked(lookup)
        if self._fastest is not None:
            self._fastest.begin(lookup)
        request: Any = SimpleNamespace(request_id="", num_tokens=lookup.local + lookup.missing)
        try:
            offer, answered_ns = self._ask(request, asked)
            if offer is None or asked.is_unknown:
                return None
            self._offers.settle(request.request_id, offer.child if offer.tokens else None, offer.tokens)
            if offer.tokens:
                if self._fastest is not None:
                    self._fastest.loads(offer)
                offer = offer._replace(child=self._places[offer.child])
            return Outcome(offer, answered_ns / 1e9)
        finally:
            self._offers.forget(request.request_id)

    def _ask(self, request: Any, asked: _Asked) -> tuple[Offer | None, int]:
        """Ask until there is a choice; return it, and when it was there.

        Without free blocks vLLM asks on, and a late answer may change the choice: it does so as it did.
        """
        offer, answered_ns = None, 0
        later: int | None = 0
        while later is not None and (offer is None or self._is_same):
            self._now_ns = later
            found = self._offers.ask(request, asked.lookup.local)
            if found is not None:
                answered_ns = answered_ns if offer is not None else later
                offer = found
            later = self._next(asked)
        return offer, answered_ns

    def _next(self, asked: _Asked) -> int | None:
        """Return when something may change next."""
        answers = asked.lookup.answers
        moments = [since + answers[place].waited_ns for place, since in asked.since.items()]
        if self._is_same:
            # vLLM asks once a step: an answer that came after the limit but before the next step was in time. When it
            # asked is known; otherwise it is taken to ask at once.
            moments += [answer.since_ns - asked.lookup.began_ns for answer in answers.values()]
        elif self._timeout_ns is not None:
            moments += [since + self._timeout_ns for since in asked.since.values()]
        return min((moment for moment in moments if moment > self._now_ns), default=None)
