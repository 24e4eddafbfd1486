"""Count lookups by their outcome, and what became of the tokens that connectors offered."""

from collections.abc import Mapping, Sequence

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.events import ObservedRequest, Observer, Outcome
from kvobs.state.transfers import NOBODY, LookupResult, Offer

_OUTCOMES = signals.slots(signals.LOOKUPS)
_OFFERED = signals.slot(signals.OFFERED_TOKENS)
_ADMITTED = signals.slot(signals.ADMITTED_TOKENS)
_SOURCES = signals.slots(signals.HIT_TOKENS)
_UNUSED = signals.slots(signals.UNUSED_HIT_TOKENS)
_UNUSED_OFFERS = signals.slot(signals.UNUSED_OFFERS)


class OfferCounts(Observer):
    """Counts answers and offers; ``minimum`` are the tokens that each connector must offer to load a request."""

    def __init__(self, recorder: Recorder, minimum: Sequence[int]) -> None:
        self._recorder = recorder
        self._minimum = minimum

    def answered(self, index: int, outcome: Outcome) -> None:
        self._recorder.count(index, _OUTCOMES[outcome])

    def waited(self, index: int, ns: int) -> None:
        self._recorder.observe(index, signals.LOOKUP_DELAY, ns)

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Count the offers once: a lookup after a preemption, or after a failed load, offers the same again."""
        count = self._recorder.count
        if owner is not None:
            count(owner, _ADMITTED, tokens)
        if not lookup.is_first:
            return
        won = next((offer.tokens for offer in lookup.offers if offer.connector_index == owner), 0)
        lost = "other_chosen" if owner is not None else "not_taken" if lookup.chosen != NOBODY else "declined"
        for offer in lookup.offers:
            if not offer.tokens:
                continue
            count(offer.connector_index, _OFFERED, offer.tokens)
            if offer.connector_index == owner:
                count(offer.connector_index, _UNUSED["not_taken"], max(0, offer.tokens - tokens))
            else:
                reason = "below_minimum" if offer.tokens < self._minimum[offer.connector_index] else lost
                count(offer.connector_index, _UNUSED_OFFERS)
                count(offer.connector_index, _UNUSED[reason], max(0, offer.tokens - won))

    def sourced(self, index: int, tokens: int, sources: Mapping[str, int]) -> None:
        """Count tokens by tier; as in vLLM, numbers that do not add up are ignored."""
        if sum(sources.values()) != tokens:
            sources = {"unspecified": tokens}
        for source, n in sources.items():
            self._recorder.count(index, _SOURCES.get(source, _SOURCES["unspecified"]), n)

    def lapsed(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            self._recorder.count(offer.connector_index, _OFFERED, offer.tokens)
            self._recorder.count(offer.connector_index, _UNUSED["not_allocated"], offer.tokens)
