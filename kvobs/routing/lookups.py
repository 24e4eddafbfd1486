"""Look requests up in the connectors, let the load policy choose, and announce what each answered.

Where an option limits the wait, a lookup is left open: it is repeated until the connector answers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvobs.clock import wall_ns
from kvobs.log import once
from kvobs.state.events import Observer, Outcome
from kvobs.state.transfers import NO_RESULT, NOTHING, InProgress, LookupResult, Offer
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvobs.connectors.sub_connector import SubConnector
    from kvobs.routing.isolation import Isolation
    from kvobs.routing.visibility import Visibility
    from kvobs.schema.options import Options

LoadPolicy: TypeAlias = Callable[[Sequence[Offer]], Offer]
"""Returns the offer to load from; there is at least one, and they are in the order of the configuration."""


def longest(offers: Sequence[Offer]) -> Offer:
    """Return the offer with most tokens, the first of equals."""
    return max(offers, key=lambda offer: offer.tokens)


POLICIES: Mapping[str, LoadPolicy] = {"first": itemgetter(0), "longest": longest}
"""The values of the option ``load_policy``; the first is vLLM's."""


class _NoAnswer(Enum):
    """Instead of a connector's answer."""

    NOT_ASKED = auto()
    WAITED_FOR = auto()  # "not yet"
    LEFT_OPEN = auto()  # "not yet", and the lookup continues without it


_NOT_ASKED, _WAITED_FOR, _LEFT_OPEN = _NoAnswer  # members are slow to access
_Answer: TypeAlias = tuple[int, bool] | _NoAnswer  # tokens, whether they are loaded asynchronously
_MISSED: _Answer = (0, False)


@dataclass(slots=True)
class _LookupState:
    """The lookup state of one request, from its first lookup to its end."""

    pending_since: dict[int, int] = field(default_factory=dict)  # connector -> time of its first "not yet", in ns
    last: LookupResult = NO_RESULT
    banned: set[int] = field(default_factory=set)  # connectors whose load of this request has failed, until it runs
    announced: set[tuple[int, Outcome]] = field(default_factory=set)  # of each connector each outcome once
    had_offers: bool = False  # at an allocation
    is_read: bool = True


@lru_cache(1024)
def _shared(answers: tuple[_Answer, ...]) -> list[_Answer]:
    """Return one and the same list for equal answers."""
    return list(answers)


class Lookups:
    """The lookups of all live requests.

    vLLM repeats the lookup of each waiting request in every step. The first answer of its kind is announced, so a
    repetition with the same answers only calls the connectors.

    ``awaited`` has the lookups that requests wait for, by the connector that has not answered yet.

    ``isolation`` decides which connectors are asked, and whose answers count; None without isolated connectors.
    Synchronous offers are not used of the connectors in ``async_only``, and of one that does not see the request, by
    ``visibility``.
    """

    def __init__(
        self,
        connectors: Sequence[SubConnector],
        options: Options,
        observer: Observer,
        visibility: Sequence[Visibility],
        *,
        awaited: Sequence[InProgress[str]],
        isolation: Isolation | None = None,
        async_only: Collection[int] = (),
    ) -> None:
        self._connectors = connectors
        self.bind()
        self._names = [connector.name for connector in connectors]
        self._visibility = visibility
        self._isolation = isolation
        self._async_only = async_only
        self._policy = POLICIES[options.load_policy]
        self._compares = options.compares_answers
        self._may_be_ignored = versions.ignores_answers()
        self._minimum = [options.min_tokens.get(connector.name, 1) for connector in connectors]
        self._waits_for_all = options.wait_for == "all"
        self._timeout_ns = None if options.lookup_timeout_ms is None else options.lookup_timeout_ms * 1e6
        self._waits_always = isolation is None and self._waits_for_all and self._timeout_ns is None
        # The answers after which each request waits. The list is shared by all requests with these answers: where
        # thousands are looked up in a step, nothing that belongs to one of them is in the processor's cache.
        self._waiting: dict[str, list[_Answer]] = {}
        self.may_leave_open = not self._waits_for_all or self._timeout_ns is not None
        """Whether a request may be allocated without every connector's answer."""
        self._observer = observer
        self._asked: defaultdict[str, _LookupState] = defaultdict(_LookupState)
        self._awaited = awaited

    def bind(self) -> None:
        """Bind the connectors' lookups; again when a plug-in has replaced one."""
        self._lookups = [(connector.index, connector.get_num_new_matched_tokens) for connector in self._connectors]

    def look_up(self, request: Request, num_computed_tokens: int) -> Offer | None:
        """Return the offer to load from (``NOTHING`` if there is none), or None if it is not known yet.

        As in vLLM, no connector is asked after one that must be waited for, unless the policy compares all answers.
        """
        request_id, isolation = request.request_id, self._isolation
        answers: list[_Answer] = []
        for index, lookup in self._lookups:
            if isolation is not None and not isolation.asks(index, request_id):
                answers.append(_NOT_ASKED)
                continue
            tokens, is_async = lookup(request, num_computed_tokens)
            if tokens is not None:
                # ExampleConnector may answer less than vLLM has itself; a number of numpy's would not be encoded.
                answers.append((int(tokens), bool(is_async)) if tokens > 0 else _MISSED)
            elif self._waits_always or self._must_wait_for(index, request_id, answers):
                answers.append(_WAITED_FOR)
                if not self._compares:
                    break
            else:
                answers.append(_LEFT_OPEN)
        if answers == self._waiting.get(request_id):
            return None
        asked = self._asked[request_id]
        asked.is_read = not (self._may_be_ignored and request.skip_reading_prefix_cache)
        self._announce_answers(request_id, asked, answers)
        if _WAITED_FOR in answers:
            asked.last = NO_RESULT
            self._waiting[request_id] = _shared(tuple(answers))
            return None
        self._waiting.pop(request_id, None)
        offers, usable = self._weighed(request_id, asked, answers)
        best = self._policy(usable) if usable else NOTHING
        left_open = [index for index, answer in enumerate(answers) if answer is _LEFT_OPEN]
        asked.last = LookupResult(offers, num_computed_tokens, left_open, best.connector_index)
        return best

    def _weighed(
        self, request_id: str, asked: _LookupState, answers: Iterable[_Answer]
    ) -> tuple[list[Offer], list[Offer]]:
        """Return the offers that count, and the ones that may be loaded from."""
        offers, usable = [], []
        for index, answer in enumerate(answers):
            if isinstance(answer, _NoAnswer) or index in asked.banned or self._is_discarded(index, request_id):
                continue  # vLLM would repeat the lookup and fail for ever; or the connector is in quarantine
            offer = Offer(index, *answer)
            offers.append(offer)
            if offer.tokens and not offer.is_async and self._is_refused(index, request_id):
                continue
            if offer.tokens >= self._minimum[index]:
                usable.append(offer)
        return offers, usable

    def _announce_answers(self, request_id: str, asked: _LookupState, answers: Iterable[_Answer]) -> None:
        """Announce the answers, and note whom the request waits for."""
        for index, answer in enumerate(answers):
            if not asked.is_read:  # vLLM does not wait for the answer either
                if answer is not _NOT_ASKED:
                    self._announce(asked, index, "not_read")
            elif answer is _WAITED_FOR or answer is _LEFT_OPEN:
                began_ns = asked.pending_since.setdefault(index, wall_ns())
                self._announce(asked, index, "pending")
                if answer is _WAITED_FOR:
                    self._awaited[index].begin(request_id, began_ns)
                else:
                    self._awaited[index].end(request_id)
            elif isinstance(answer, tuple):
                self._announce_answer(request_id, asked, index, answer[0])
            elif asked.pending_since.pop(index, None) is not None:  # no longer asked: no request waits for it
                self._awaited[index].end(request_id)

    def _announce_answer(self, request_id: str, asked: _LookupState, index: int, tokens: int) -> None:
        if (since := asked.pending_since.pop(index, None)) is not None:
            self._awaited[index].end(request_id)
            self._observer.waited(index, wall_ns() - since)
        self._announce(asked, index, "hit" if tokens > 0 else "miss")

    def answered_late(self, request_id: str, index: int, tokens: int) -> None:
        """Announce the answer to a lookup that was left open."""
        if (asked := self._asked.get(request_id)) is not None:
            self._announce_answer(request_id, asked, index, tokens)

    def _announce(self, asked: _LookupState, index: int, outcome: Outcome) -> None:
        """Announce an outcome of a request's lookups once; repeated lookups appear in the calls."""
        if asked.announced.isdisjoint({(index, outcome), (index, "not_read")}):
            asked.announced.add((index, outcome))
            self._observer.answered(index, outcome)

    def _is_discarded(self, index: int, request_id: str) -> bool:
        return self._isolation is not None and self._isolation.discards(index, request_id)

    def _is_refused(self, index: int, request_id: str) -> bool:
        """Return whether a synchronous offer of this connector is not used."""
        if index in self._async_only:
            text = (
                "best-effort connector %r offers a synchronous load. The load is not used: if it failed, its "
                "unfilled blocks would be saved or computed on. Such offers are counted as unused "
                "(kvobs_unused_offers_total)"
            )
            once(f"sync:{self._names[index]}", logging.WARNING, text, self._names[index])
            return True
        # Its earlier lookup was left open: it is not shown this request's steps, and could not load in one.
        return self.may_leave_open and not self._visibility[index].saves(request_id)

    def _must_wait_for(self, index: int, request_id: str, before: Sequence[_Answer]) -> bool:
        """Return whether the lookup waits for a connector that has not answered; ``before`` it are these answers."""
        asked = self._asked[request_id]
        since = asked.pending_since.get(index)
        if self._timeout_ns is not None and since is not None and wall_ns() - since >= self._timeout_ns:
            self._announce(asked, index, "timeout")
            return False
        if self._is_discarded(index, request_id):
            return False
        if self._waits_for_all or before.count(_MISSED) == len(before):
            return True
        return not self._weighed(request_id, asked, before)[1]

    def resolve(self, request_id: str) -> LookupResult:
        """Return the last lookup's result now that vLLM has allocated, once.

        The second allocation call of an async load finds no offers.
        """
        if (asked := self._asked.get(request_id)) is None:
            return NO_RESULT
        result, asked.last = asked.last, LookupResult(local=asked.last.local)
        if not asked.is_read:
            return result._replace(offers=(), is_read=False)
        if not asked.had_offers and any(offer.tokens for offer in result.offers):
            asked.had_offers = True
            return result._replace(is_first=True)
        return result

    def ban(self, request_id: str, index: int) -> None:
        """Ignore this connector's further answers about this request: its load has failed."""
        if (asked := self._asked.get(request_id)) is not None:
            asked.banned.add(index)

    def lift_bans(self, request_id: str) -> None:
        """Use all answers about this request again: it runs, and is looked up again only after a preemption."""
        if (asked := self._asked.get(request_id)) is not None and asked.banned:
            asked.banned.clear()

    def discard(self, request_id: str) -> None:
        """Forget a request that has ended; what it was offered since its last allocation is lost."""
        if (asked := self._asked.pop(request_id, None)) is None:
            return
        self._waiting.pop(request_id, None)
        for index in asked.pending_since:
            self._awaited[index].end(request_id)
        if asked.last.offers and not asked.had_offers and asked.is_read:
            self._observer.lapsed(asked.last.offers)


_WAITING = {"WAITING", "PREEMPTED"}  # by name: this module needs no vLLM


class _Open(NamedTuple):
    """A lookup that was left open: its arguments, the allocated blocks, and the connectors that have not answered."""

    request: Any
    computed: int  # tokens that vLLM had computed itself
    blocks: Any
    unanswered: list[int]


class OpenLookups:
    """The open lookups of all live requests, repeated until the connector answers; then it is given 0 tokens.

    A connector that gets 0 tokens before it has answered keeps the locks of its lookup (LMCache: until a TTL of ten
    minutes). It never sees the request as scheduled, because it does not know its blocks. This is the only call that
    kvobs makes and vLLM does not, and only if an option limits the wait.
    """

    def __init__(
        self,
        connectors: Sequence[SubConnector],
        visibility: Sequence[Visibility],
        answered: Callable[[str, int, int], None],
    ) -> None:
        self._connectors = connectors
        self._visibility = visibility
        self._answered = answered  # receives the request, the connector and the tokens
        self._open: dict[str, _Open] = {}

    def has(self, index: int, request_id: str) -> bool:
        """Return whether a connector has not answered yet."""
        lookup = self._open.get(request_id)
        return lookup is not None and index in lookup.unanswered

    def leave_open(self, request: Any, blocks: Any, computed: int, unanswered: Collection[int]) -> None:
        """Note at a request's allocation which connectors have not answered."""
        for connector in unanswered:
            self._visibility[connector].withhold(request.request_id, taints=False)
        if unanswered:
            self._open[request.request_id] = _Open(request, computed, blocks, [*unanswered])

    def discard(self, request_id: str) -> None:
        """Forget a request that has ended, or is looked up again by vLLM."""
        self._open.pop(request_id, None)

    def poll(self, blocks_step: Callable[[int], bool]) -> None:
        """Repeat the lookups; give 0 tokens to connectors that have answered.

        A request that waits again may have lost its blocks: vLLM looks it up, or allocates, before it runs.
        ``blocks_step`` returns whether a connector is not asked now because its last call took too long.
        """
        for request_id, (request, computed, blocks, unanswered) in list(self._open.items()):
            if request.status.name in _WAITING:
                continue
            for index in unanswered.copy():
                if blocks_step(index):
                    continue
                connector = self._connectors[index]
                tokens, _ = connector.get_num_new_matched_tokens(request, computed)
                if tokens is not None:
                    unanswered.remove(index)
                    self._answered(request_id, index, tokens)
                    connector.update_state_after_alloc(request, blocks, 0)
            if not unanswered:
                del self._open[request_id]
