"""The load policies: each chooses one of the offers of a lookup, or computing.

``first`` and ``longest`` look at the offers alone. ``fastest`` chooses the lowest predicted time, and learns from the
router's events. It always takes an offer of a connector that hands KV over: another engine has computed it for this
request, and may hold it until it is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvobs.clock import wall_ns
from kvobs.connectors.specs import HAND_OFF, name_among
from kvobs.faults import contained
from kvobs.prediction import HANDED_OVER, Candidate, ComputeCost, LoadChoice, to_compute
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.offers import NOTHING, Decision, LookupResult, Offer
from kvobs.state.transfers import Load

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvobs.connectors.child import Child
    from kvobs.schema.options import Options

_OPEN_AT_MOST = 16  # of a child's loads in progress, the oldest, that are looked at


class LoadPolicy:
    """Chooses who loads a request: the first child with a hit, as in vLLM."""

    def choose(self, request: Request, local: int, offers: Sequence[Offer]) -> tuple[Offer, Decision | None]:
        """Return one of the offers, or ``NOTHING``; and the reason, of a policy that predicts.

        There is at least one offer; they are in the order of the configuration. ``local`` tokens are in vLLM's cache.
        """
        return offers[0], None


class Longest(LoadPolicy):
    """The child that offers most, the first of equals."""

    def choose(self, request: Request, local: int, offers: Sequence[Offer]) -> tuple[Offer, Decision | None]:
        return max(offers, key=lambda offer: offer.tokens), None


class Fastest(LoadPolicy, Observer):
    """The child with the lowest predicted time, or computing."""

    def __init__(self, children: Sequence[Child], cost: Callable[[], ComputeCost]) -> None:
        self._choice = LoadChoice(len(children))
        self._cost = cost
        self._hand_offs = {child.index for child in children if name_among(type(child.connector), HAND_OFF)}
        # Of each child, the async loads since the one that ended last: request -> tokens, and when it was allocated.
        self._open: list[dict[str, tuple[int, int]]] = [{} for _ in children]

    def choose(self, request: Request, local: int, offers: Sequence[Offer]) -> tuple[Offer, Decision | None]:
        if (decision := self.decide(request, local, offers)) is None:
            return offers[0], None
        return next((offer for offer in offers if offer.child == decision.child), NOTHING), decision

    @contained("record")
    def decide(self, request: Request, local: int, offers: Sequence[Offer]) -> Decision | None:
        """Return the choice with its reason; None if this policy can't decide."""
        for offer in offers:
            if offer.child in self._hand_offs:
                return Decision(offer.child, HANDED_OVER, offer.child, (offer.child,), {}, None, {})
        cost = self._cost()
        candidates = []
        for offer in offers:
            rest = to_compute(request.num_tokens, local + offer.tokens)
            rest_s = _crowded(cost, rest, request.num_tokens - rest)
            candidates.append(Candidate(offer.child, offer.tokens, rest_s, self._open_loads(offer.child)))
        return self._choice.decide(candidates, _crowded(cost, request.num_tokens - local, local))

    def _open_loads(self, child: int) -> list[tuple[int, float]]:
        if not self._open[child]:
            return []
        now_ns = wall_ns()
        return [(tokens, (now_ns - since) / 1e9) for tokens, since in islice(self._open[child].values(), _OPEN_AT_MOST)]

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        if lookup.decision is not None:
            self._choice.taken(lookup.decision)

    def admitted(self, request_id: str, load: Load) -> None:
        if load.is_async:
            self._open[load.child][request_id] = load.tokens, load.opened_ns

    def load_ended(self, request_id: str, load: Load) -> None:
        """Learn the load's duration. The tokens of a failed load are computed afterwards."""
        took_ns = wall_ns() - load.opened_ns if load.is_async else load.duration_ns
        seconds = max(0, took_ns) / 1e9
        if load.failed:
            again_s = _crowded(self._cost(), max(1, load.recomputed_tokens), load.local_tokens)
            seconds = 2 * seconds if again_s is None else seconds + again_s
        self._choice.observe(load.child, load.tokens, seconds)
        # One that it has overtaken says nothing of the connector now: it may be lost.
        begun = self._open[load.child]
        for other in [other for other, (_, since) in begun.items() if since <= load.opened_ns]:
            del begun[other]


def policy_of(options: Options, children: Sequence[Child], cost: Callable[[], ComputeCost]) -> LoadPolicy:
    """Return the policy that the options name; ``cost`` returns the cost of computing, as far as it is learned."""
    if options.load_policy == "fastest":
        return Fastest(children, cost)
    return Longest() if options.load_policy == "longest" else LoadPolicy()


def _crowded(cost: ComputeCost, tokens: int, context: int) -> float | None:
    """Return the seconds of computing among the engine's present prefills."""
    seconds = cost.predict(tokens, context)
    return None if seconds is None else seconds * cost.crowding
