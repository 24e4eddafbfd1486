"""The load policies choose among offers."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from kvobs.routing.policies import POLICIES
from kvobs.schema.options import Options
from kvobs.state.offers import Offer

OFFERS = st.lists(st.builds(Offer, st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1)


@given(OFFERS)
def test_first_and_longest_are_offers_of_the_list(offers: list[Offer]) -> None:
    assert POLICIES["first"](offers) is offers[0]
    chosen = POLICIES["longest"](offers)
    at = next(i for i, offer in enumerate(offers) if offer is chosen)
    assert all(offer.tokens < chosen.tokens for offer in offers[:at])
    assert all(offer.tokens <= chosen.tokens for offer in offers)


def test_each_value_of_the_option_has_a_policy() -> None:
    assert tuple(POLICIES) == get_args(Options.model_fields["load_policy"].annotation)
