"""Look requests up in the children, let the load policy choose, and count offered, admitted and unused tokens.

Where an option says not to wait, a lookup is left open: it is repeated until the connector answers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvobs.clock import wall_ns
from kvobs.log import once
from kvobs.routing.policies import NOBODY, NOTHING, LoadPolicy, Offer
from kvobs.schema import signals
from kvobs.state.transfers import InProgress
from kvobs.telemetry.recording.recorder import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvobs.children.child import Child
    from kvobs.prediction.load_choice import Decision
    from kvobs.routing.isolation import Isolation
    from kvobs.routing.visibility import Visibility
    from kvobs.schema.options import Options

_HIT, _MISS, _PENDING, _TIMEOUT = (
    signals.slot(signals.LOOKUPS, outcome) for outcome in ("hit", "miss", "pending", "timeout")
)
_OFFERED = signals.slot(signals.OFFERED_TOKENS)
_ADMITTED = signals.slot(signals.ADMITTED_TOKENS)
_OTHER_CHOSEN, _BELOW_MINIMUM, _DECLINED, _NOT_TAKEN, _NOT_ALLOCATED = (
    signals.slot(signals.UNUSED_HIT_TOKENS, reason)
    for reason in ("other_chosen", "below_minimum", "declined", "not_taken", "not_allocated")
)
_UNUSED_OFFERS = signals.slot(signals.UNUSED_OFFERS)


class Settled(NamedTuple):
    """A complete lookup, until vLLM allocates."""

    offers: Sequence[Offer] = ()
    local: int = 0  # tokens that vLLM had computed itself
    decision: Decision | None = None  # why, with a policy that predicts
    left_open: Sequence[int] = ()  # children for which the lookup did not wait
    chosen: int = NOBODY  # the child whose offer it chose


_UNSETTLED = Settled()


class _Silence(Enum):
    """Instead of a child's answer."""

    NOT_ASKED = auto()
    WAITED_FOR = auto()  # "not yet"
    LEFT_OPEN = auto()  # "not yet", and the lookup goes on without it


_NOT_ASKED, _WAITED_FOR, _LEFT_OPEN = _Silence  # members are slow to access
_Answer: TypeAlias = tuple[int, bool] | _Silence  # tokens, whether they are loaded asynchronously
_MISSED: _Answer = (0, False)


@dataclass(slots=True)
class _Asked:
    """The lookup state of one request, from its first lookup to its end."""

    pending_since: dict[int, int] = field(default_factory=dict)  # child -> time of its first "not yet", in ns
    last: Settled = _UNSETTLED
    banned: set[int] = field(default_factory=set)  # children whose load of this request has failed, until it runs
    outcomes: set[tuple[int, int]] = field(default_factory=set)  # (child, outcome) pairs already counted
    counted: bool = False


@lru_cache(1024)
def _shared(answers: tuple[_Answer, ...]) -> list[_Answer]:
    """Return one and the same list for equal answers."""
    return list(answers)


class Offers:
    """The lookups of all live requests.

    vLLM repeats the lookup of each waiting request in every step. What is counted follows from the first answer of its
    kind, so a repetition with the same answers only calls the children.

    ``isolation`` decides which children are asked, and whose answers count; None if none is isolated. Synchronous
    offers are not used of the children in ``async_only``, and of one that does not see the request, by ``visibility``.
    """

    def __init__(
        self,
        children: Sequence[Child],
        options: Options,
        recorder: Recorder,
        policy: LoadPolicy,
        visibility: Sequence[Visibility],
        *,
        isolation: Isolation | None = None,
        async_only: Collection[int] = (),
    ) -> None:
        self._lookups = [(child.index, child.get_num_new_matched_tokens) for child in children]
        self._names = [child.name for child in children]
        self._visibility = visibility
        self._isolation = isolation
        self._async_only = async_only
        self._policy = policy
        self._compares = options.compares_answers
        self._minimum = [options.min_tokens.get(child.name, 1) for child in children]
        self._waits_for_all = options.wait_for == "all"
        self._timeout_ns = None if options.lookup_timeout_ms is None else options.lookup_timeout_ms * 1e6
        self._waits_always = isolation is None and self._waits_for_all and self._timeout_ns is None
        # The answers after which each request waits. The list is shared by all requests with these answers: where
        # thousands are looked up in a step, nothing that belongs to one of them is in the processor's cache.
        self._waiting: dict[str, list[_Answer]] = {}
        self.may_leave_open = not self._waits_for_all or self._timeout_ns is not None
        """Whether a request may be allocated without every child's answer."""
        self._recorder = recorder
        self._asked: defaultdict[str, _Asked] = defaultdict(_Asked)
        self.waited_for = tuple(InProgress[str]() for _ in children)
        """The lookups that requests wait for, by the child that has not answered yet."""

    def ask(self, request: Request, num_computed_tokens: int) -> Offer | None:
        """Return the offer to load from (``NOTHING`` if there is none), or None if it is not known yet.

        As in vLLM, no child is asked after one that must be waited for, unless the policy compares all answers.
        """
        request_id, isolation = request.request_id, self._isolation
        answers: list[_Answer] = []
        for child, lookup in self._lookups:
            if isolation is not None and not isolation.asks(child, request_id):
                answers.append(_NOT_ASKED)
                continue
            tokens, is_async = lookup(request, num_computed_tokens)
            if tokens is not None:
                # ExampleConnector may answer less than vLLM has itself; a number of numpy's would not be encoded.
                answers.append((int(tokens), bool(is_async)) if tokens > 0 else _MISSED)
            elif self._waits_always or self._is_waited_for(child, request_id, answers):
                answers.append(_WAITED_FOR)
                if not self._compares:
                    break
            else:
                answers.append(_LEFT_OPEN)
        if answers == self._waiting.get(request_id):
            return None
        asked = self._asked[request_id]
        self._count_answers(request_id, asked, answers)
        if _WAITED_FOR in answers:
            asked.last = _UNSETTLED
            self._waiting[request_id] = _shared(tuple(answers))
            return None
        self._waiting.pop(request_id, None)
        offers, usable = self._weighed(request_id, asked, answers)
        best, decision = self._policy.choose(request, num_computed_tokens, usable) if usable else (NOTHING, None)
        left_open = [child for child, answer in enumerate(answers) if answer is _LEFT_OPEN]
        asked.last = Settled(offers, num_computed_tokens, decision, left_open, best.child)
        return best

    def _weighed(self, request_id: str, asked: _Asked, answers: Iterable[_Answer]) -> tuple[list[Offer], list[Offer]]:
        """Return the offers that count, and those of them that may be loaded from."""
        offers, usable = [], []
        for child, answer in enumerate(answers):
            if isinstance(answer, _Silence) or child in asked.banned or self._is_discarded(child, request_id):
                continue  # vLLM would repeat the lookup and fail for ever; or the child is in quarantine
            offer = Offer(child, *answer)
            offers.append(offer)
            if offer.tokens and not offer.is_async and self._is_refused(child, request_id):
                continue
            if offer.tokens >= self._minimum[child]:
                usable.append(offer)
        return offers, usable

    def _count_answers(self, request_id: str, asked: _Asked, answers: Iterable[_Answer]) -> None:
        """Count the outcomes, and how long the request has waited for an answer."""
        for child, answer in enumerate(answers):
            if answer is _WAITED_FOR or answer is _LEFT_OPEN:
                began_ns = asked.pending_since.setdefault(child, wall_ns())
                self._count(asked, child, _PENDING)
                if answer is _WAITED_FOR:
                    self.waited_for[child].begin(request_id, began_ns)
                else:
                    self.waited_for[child].end(request_id)
            elif isinstance(answer, tuple):
                self._count_answer(request_id, asked, child, answer[0])
            elif asked.pending_since.pop(child, None) is not None:  # not asked any more: nobody waits for it
                self.waited_for[child].end(request_id)

    def _count_answer(self, request_id: str, asked: _Asked, child: int, tokens: int) -> None:
        since = asked.pending_since.pop(child, None)
        if since is not None:
            self.waited_for[child].end(request_id)
            self._recorder.observe(child, signals.LOOKUP_DELAY, wall_ns() - since)
        self._count(asked, child, _HIT if tokens > 0 else _MISS)

    def answered_late(self, request_id: str, child: int, tokens: int) -> None:
        """Count the answer to a lookup that was left open."""
        if (asked := self._asked.get(request_id)) is not None:
            self._count_answer(request_id, asked, child, tokens)

    def _count(self, asked: _Asked, child: int, outcome: int) -> None:
        """Count an outcome of a request's lookups once; repeated lookups appear in the calls."""
        if (child, outcome) not in asked.outcomes:
            asked.outcomes.add((child, outcome))
            self._recorder.count(child, outcome)

    def _is_discarded(self, child: int, request_id: str) -> bool:
        return self._isolation is not None and self._isolation.discards(child, request_id)

    def _is_refused(self, child: int, request_id: str) -> bool:
        """Return whether a synchronous offer of this child is not used."""
        if child in self._async_only:
            text = (
                "connector %r is isolated and offers a synchronous load: it is not used, because after a failed load "
                "unfilled blocks would be saved or computed on. Such offers are counted as unused "
                "(kvobs_unused_offers_total)"
            )
            once(f"sync:{self._names[child]}", logging.WARNING, text, self._names[child])
            return True
        # Its earlier lookup was left open: it is not shown this request's steps, and could not load in one.
        return self.may_leave_open and not self._visibility[child].saves(request_id)

    def _is_waited_for(self, child: int, request_id: str, before: Sequence[_Answer]) -> bool:
        """Return whether the lookup waits for a child that has not answered; ``before`` it are these answers."""
        asked = self._asked[request_id]
        since = asked.pending_since.get(child)
        if self._timeout_ns is not None and since is not None and wall_ns() - since >= self._timeout_ns:
            self._count(asked, child, _TIMEOUT)
            return False
        if self._is_discarded(child, request_id):
            return False
        if self._waits_for_all or before.count(_MISSED) == len(before):
            return True
        return not self._weighed(request_id, asked, before)[1]

    def settle(self, request_id: str, owner: int | None, tokens: int) -> Settled:
        """Count the last lookup's offers now that vLLM has allocated ``tokens`` from ``owner``; return it, once.

        The second allocation call of an async load finds no offers and counts nothing.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return _UNSETTLED
        settled, asked.last = asked.last, Settled(local=asked.last.local)
        if owner is not None:
            self._recorder.count(owner, _ADMITTED, tokens)
        if not asked.counted:
            won = next((offer.tokens for offer in settled.offers if offer.child == owner), 0)
            lost = _OTHER_CHOSEN if owner is not None else _NOT_TAKEN if settled.chosen != NOBODY else _DECLINED
            for offer in settled.offers:
                if offer.tokens:
                    asked.counted = True
                    self._recorder.count(offer.child, _OFFERED, offer.tokens)
                    if offer.child == owner:
                        self._recorder.count(offer.child, _NOT_TAKEN, max(0, offer.tokens - tokens))
                    else:
                        self._recorder.count(offer.child, _UNUSED_OFFERS)
                        is_too_small = offer.tokens < self._minimum[offer.child]
                        in_vain = max(0, offer.tokens - won)
                        self._recorder.count(offer.child, _BELOW_MINIMUM if is_too_small else lost, in_vain)
        return settled

    def ban(self, request_id: str, child: int) -> None:
        """Ignore this child's further answers about this request: its load has failed."""
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.banned.add(child)

    def lift_bans(self, request_id: str) -> None:
        """Use all answers about this request again: it runs, and is looked up again only after a preemption."""
        asked = self._asked.get(request_id)
        if asked is not None and asked.banned:
            asked.banned.clear()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; what it was offered since its last allocation is lost."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        self._waiting.pop(request_id, None)
        for child in asked.pending_since:
            self.waited_for[child].end(request_id)
        for offer in asked.last.offers if not asked.counted else ():
            self._recorder.count(offer.child, _OFFERED, offer.tokens)
            self._recorder.count(offer.child, _NOT_ALLOCATED, offer.tokens)


class _Open(NamedTuple):
    """A lookup that was left open: its arguments, the allocated blocks, and the children that have not answered."""

    request: Any
    computed: int  # tokens that vLLM had computed itself
    blocks: Any
    children: list[int]


class OpenLookups:
    """The open lookups of all live requests, repeated until the connector answers; then it is given 0 tokens.

    A connector that gets 0 tokens before it has answered keeps the locks of its lookup (LMCache: until a TTL of ten
    minutes). It never sees the request as scheduled, since it knows none of its blocks. This is the only call that
    kvobs makes and vLLM does not, and only if an option says not to wait.
    """

    def __init__(
        self,
        children: Sequence[Child],
        visibility: Sequence[Visibility],
        answered: Callable[[str, int, int], None],
    ) -> None:
        self._children = children
        self._visibility = visibility
        self._answered = answered  # receives the request, the child and the tokens
        self._open: dict[str, _Open] = {}

    def has(self, child: int, request_id: str) -> bool:
        """Return whether a child has not answered yet."""
        lookup = self._open.get(request_id)
        return lookup is not None and child in lookup.children

    def leave_open(self, request: Any, blocks: Any, computed: int, children: Collection[int]) -> None:
        """Note at a request's allocation which children have not answered."""
        for child in children:
            self._visibility[child].withhold(request.request_id, taints=False)
        if children:
            self._open[request.request_id] = _Open(request, computed, blocks, [*children])

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or is looked up again by vLLM."""
        self._open.pop(request_id, None)

    def poll(self, blocks_step: Callable[[int], bool]) -> None:
        """Repeat the lookups; give 0 tokens to children that have answered.

        ``blocks_step`` returns whether a child is not asked now because its last call took too long.
        """
        for request_id, (request, computed, blocks, children) in list(self._open.items()):
            for index in children.copy():
                if blocks_step(index):
                    continue
                child = self._children[index]
                tokens, _ = child.get_num_new_matched_tokens(request, computed)
                if tokens is not None:
                    children.remove(index)
                    self._answered(request_id, index, tokens)
                    child.update_state_after_alloc(request, blocks, 0)
            if not children:
                del self._open[request_id]
