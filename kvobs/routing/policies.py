"""The load policies: each chooses one of the offers of a lookup."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from kvobs.state.offers import Offer

LoadPolicy = Callable[[Sequence[Offer]], Offer]
"""Returns the offer to load from; there is at least one, and they are in the order of the configuration."""


def longest(offers: Sequence[Offer]) -> Offer:
    """Return the offer with most tokens, the first of equals."""
    return max(offers, key=lambda offer: offer.tokens)


POLICIES: Mapping[str, LoadPolicy] = {"first": itemgetter(0), "longest": longest}
"""The values of the option ``load_policy``; the first is vLLM's."""
