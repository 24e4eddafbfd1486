"""Ask the children what they could load, choose by the load policy, and count what was offered, taken and forgone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvobs import signals
from kvobs.children import Child
from kvobs.config import Options
from kvobs.notices import once
from kvobs.recorder import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

_HIT, _MISS, _PENDING, _TIMEOUT = (
    signals.slot(signals.LOOKUPS, outcome) for outcome in ("hit", "miss", "pending", "timeout")
)
_OFFERED = signals.slot(signals.OFFERED_TOKENS)
_ADMITTED = signals.slot(signals.ADMITTED_TOKENS)
_FORGONE = signals.slot(signals.FORGONE_TOKENS)
_UNCLAIMED = signals.slot(signals.UNCLAIMED_OFFERS)


class Offer(NamedTuple):
    """What a child said it could load: ``tokens`` beyond those computed, in the background or within the step."""

    child: int
    tokens: int
    is_async: bool


class Settled(NamedTuple):
    """A lookup that has led to an allocation: where a load begins, in tokens that vLLM had itself, and all offers."""

    local: int
    offers: list[Offer]


NOTHING = Offer(-1, 0, False)


@dataclass(slots=True)
class _Asked:
    """What is remembered of one request between its lookups and its end."""

    pending_since: dict[int, int] = field(default_factory=dict)  # child -> time of its first "not yet", in ns
    offers: list[Offer] = field(default_factory=list)  # of the last complete lookup, until vLLM allocates
    banned: set[int] = field(default_factory=set)  # children whose load of this request has failed
    local: int = 0  # tokens that vLLM had computed itself at that lookup
    counted: bool = False


class Offers:
    """The lookups of all live requests."""

    def __init__(
        self,
        children: Sequence[Child],
        options: Options,
        recorder: Recorder,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._lookups = [child.get_num_new_matched_tokens for child in children]
        self._names = [child.name for child in children]
        self._async_only = {child.index for child in children if child.gate is not None}
        self._longest = options.load_policy == "longest"
        self._timeout_ns = None if options.lookup_timeout_ms is None else options.lookup_timeout_ms * 1e6
        self._recorder = recorder
        self._clock = clock
        self._asked: dict[str, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, request: Request, num_computed_tokens: int) -> Offer | None:
        """Return the offer to load from (``NOTHING`` if there is none), or None while it can't be known yet.

        Policy ``first``: the first child with a hit, whatever those after it say. Policy ``longest``: the child that
        offers most, the first of equals, once all have answered.
        """
        asked = self._asked.setdefault(request.request_id, _Asked())
        asked.offers, asked.local = [], num_computed_tokens
        best = NOTHING
        waits = False
        for child, lookup in enumerate(self._lookups):
            if child in asked.banned:
                continue  # vLLM would look it up, and fail, for ever
            tokens, is_async = lookup(request, num_computed_tokens)
            if tokens is None:
                if self._is_worth_waiting(child, asked):
                    if not self._longest and not best.tokens:
                        return None  # no later child can win before this one has answered
                    waits |= self._longest
                continue
            since = asked.pending_since.pop(child, None)
            if since is not None:
                self._recorder.observe(child, signals.LOOKUP_DELAY, self._clock() - since)
            self._recorder.count(child, _HIT if tokens else _MISS)
            offer = Offer(child, tokens, bool(is_async and tokens))
            asked.offers.append(offer)
            if tokens and not is_async and child in self._async_only:
                self._refuse(child)
            elif tokens > best.tokens and (self._longest or not best.tokens):
                best = offer
        if waits:
            asked.offers = []
            return None
        return best

    def _refuse(self, child: int) -> None:
        once(
            f"sync:{self._names[child]}",
            logging.WARNING,
            "connector %r is isolated and offers a synchronous load: not taken, since siblings would save the blocks "
            "that a failed one leaves unfilled. Such offers are counted as forgone",
            self._names[child],
        )

    def _is_worth_waiting(self, child: int, asked: _Asked) -> bool:
        """Count a "not yet", and tell whether the child still has time to answer."""
        now = self._clock()
        since = asked.pending_since.setdefault(child, now)
        is_late = self._timeout_ns is not None and now - since >= self._timeout_ns
        self._recorder.count(child, _TIMEOUT if is_late else _PENDING)
        return not is_late

    def settle(self, request_id: str, owner: int | None, tokens: int) -> Settled:
        """Count the last lookup's offers now that vLLM has allocated ``tokens`` from ``owner``.

        The second allocation call of an async load finds no offers and counts nothing.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return Settled(0, [])
        offers, asked.offers = asked.offers, []
        if owner is not None:
            self._recorder.count(owner, _ADMITTED, tokens)
        if not asked.counted:
            won = next((offer.tokens for offer in offers if offer.child == owner), 0)
            for offer in offers:
                if offer.tokens:
                    asked.counted = True
                    self._recorder.count(offer.child, _OFFERED, offer.tokens)
                    if offer.child != owner:
                        self._recorder.count(offer.child, _UNCLAIMED)
                        self._recorder.count(offer.child, _FORGONE, max(0, offer.tokens - won))
        return Settled(asked.local, offers)

    def ban(self, request_id: str, child: int) -> None:
        """Ask this child no more about this request, of which its load has failed."""
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.banned.add(child)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._asked.pop(request_id, None)
