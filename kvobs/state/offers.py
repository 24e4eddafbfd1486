"""Hold the offers of a request's lookup, and the result that vLLM allocates by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offer(NamedTuple):
    """A connector's offer: ``tokens`` beyond those computed, loaded asynchronously or within the step."""

    child: int
    tokens: int
    is_async: bool


NOBODY = -1
"""Instead of the connector that was chosen."""
NOTHING = Offer(NOBODY, 0, False)


class LookupResult(NamedTuple):
    """A complete lookup, until vLLM allocates."""

    offers: Sequence[Offer] = ()
    local: int = 0  # tokens that vLLM had computed itself
    left_open: Sequence[int] = ()  # connectors for which the lookup did not wait
    chosen: int = NOBODY  # the connector whose offer it chose
    is_first: bool = False  # no allocation of this request before had an offer
    is_read: bool = True  # False: vLLM ignores what the connectors answer about this request


NO_RESULT = LookupResult()
