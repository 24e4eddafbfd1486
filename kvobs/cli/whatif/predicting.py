"""Choose as the load policy ``fastest`` does, with the times of a recording in the place of an engine's."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from kvobs.cli.whatif.history import PastLookup
from kvobs.cli.whatif.times import Times
from kvobs.routing.lookups import Offer
from kvobs.state.load_choice import Candidate, Decision, LoadChoice
from kvobs.state.lookup import NOBODY
from kvobs.telemetry.flight import OWN


class Predicting:
    """Stands for the router's ``Fastest``: the same rule, which learns from the loads that it leads to.

    A load that was made takes what it took, another one what is predicted for it. One that can't be predicted, because
    the engine never loaded from that connector, is never known to end.

    Args:
        places: the recorded place of each connector, in the order in which they are asked.
        times: of the recording.
    """

    def __init__(self, places: Sequence[int], times: Times) -> None:
        self._places = places
        self._times = times
        self._choice = LoadChoice(len(places))
        self._now_ns = 0
        self._open: list[tuple[int, int, int, int, float]] = []  # end, begin, child, tokens, seconds
        self.lookup: PastLookup | None = None

    def begin(self, lookup: PastLookup) -> None:
        """Begin a lookup; take in the loads that have ended by then."""
        self.lookup = lookup
        self._now_ns = lookup.ended_ns
        while self._open and self._open[0][0] <= self._now_ns:
            _, _, child, tokens, seconds = heapq.heappop(self._open)
            self._choice.observe(child, tokens, seconds)

    def decide(self, _request: Any, _local: int, offers: Sequence[Offer]) -> Decision:
        """Return what is loaded."""
        assert self.lookup is not None
        lookup = self.lookup
        candidates = [
            Candidate(one.child, one.tokens, lookup.crowded_s(self._places[one.child]), self._open_loads(one.child))
            for one in offers
        ]
        return self._choice.decide(candidates, lookup.crowded_s(OWN))

    def _open_loads(self, child: int) -> list[tuple[int, float]]:
        return [(tokens, (self._now_ns - begun) / 1e9) for _, begun, of, tokens, _ in self._open if of == child]

    def taken(self, _request_id: str, decision: Decision) -> None:
        self._choice.taken(decision)

    def loads(self, offer: Offer) -> None:
        """Begin the load of an offer of the current lookup."""
        assert self.lookup is not None
        past, place = self.lookup.load, self._places[offer.child]
        was_made = past is not None and past.child == place and past.outcome == "ok"
        seconds = past.seconds if past is not None and was_made else self._times.load_s(place, offer.tokens)
        if seconds is not None:
            end_ns = self._now_ns + int(seconds * 1e9)
            heapq.heappush(self._open, (end_ns, self._now_ns, offer.child, offer.tokens, seconds))


class AsRecorded:
    """Stands for it under the recorded settings: what it had learned before the recording is not known."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self.lookup: PastLookup | None = None

    def begin(self, lookup: PastLookup) -> None:
        """Begin a lookup."""
        self.lookup = lookup

    def decide(self, _request: Any, _local: int, offers: Sequence[Offer]) -> Decision:
        """Return what was loaded."""
        assert self.lookup is not None
        chosen = None if self.lookup.chosen == NOBODY else self._places.index(self.lookup.chosen)
        about = offers[0].child if chosen is None else chosen
        return Decision(chosen, "", about, tuple(offer.child for offer in offers), {}, None, {})

    def taken(self, _request_id: str, decision: Decision) -> None:
        """Learn nothing."""

    def loads(self, offer: Offer) -> None:
        """Learn nothing."""
