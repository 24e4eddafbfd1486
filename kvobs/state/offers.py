"""Hold the offers of a request's lookup, the result that vLLM allocates by, and a predicting policy's decision."""

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


class Decision(NamedTuple):
    """A policy's choice with its reason, one of ``prediction.load_choice.REASONS``."""

    child: int | None  # that loads; None: everything is computed
    reason: str
    about: int  # ``child``; without one, the connector that would have been the quickest
    offered: tuple[int, ...]  # the connectors with an offer
    predicted: dict[int, float]  # the seconds until the request resumes, by known connector
    computing_s: float | None  # the seconds without a load; None if unknown
    missed: dict[int, float]  # the seconds that a former fastest connector would have saved at its former speed


class LookupResult(NamedTuple):
    """A complete lookup, until vLLM allocates."""

    offers: Sequence[Offer] = ()
    local: int = 0  # tokens that vLLM had computed itself
    decision: Decision | None = None  # of a policy that predicts
    left_open: Sequence[int] = ()  # connectors for which the lookup did not wait
    chosen: int = NOBODY  # the connector whose offer it chose
    is_first: bool = False  # no allocation of this request before had an offer
    is_read: bool = True  # False: vLLM ignores what the connectors answer about this request


NO_RESULT = LookupResult()
