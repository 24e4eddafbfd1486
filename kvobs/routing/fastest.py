"""Load policy ``fastest``: choose the connector with the lowest predicted time.

An offer of a connector that hands KV over is always taken: another engine has computed it for this request, and may
hold it until it is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from kvobs.children.child import Child
from kvobs.children.specs import HAND_OFF, name_among
from kvobs.faults import contained
from kvobs.prediction.compute_cost import ComputeCost, Estimator, to_compute
from kvobs.prediction.load_choice import HANDED_OVER, Candidate, Decision, LoadChoice
from kvobs.schema.options import Options
from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import Load
from kvobs.telemetry.recording.recorder import wall_ns

if TYPE_CHECKING:
    from vllm.v1.request import Request

_OPEN_AT_MOST = 16  # of a child's loads in progress, the oldest, that are looked at


class Offered(Protocol):
    """The part of an offer that counts here."""

    @property
    def child(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Fastest(TransferListener):
    """The load policy ``fastest``.

    Args:
        children: the children's scheduler-side connectors.
        estimator: of what computing costs.
        listener: receives the decisions.
    """

    def __init__(self, children: Sequence[Child], estimator: Estimator, listener: TransferListener) -> None:
        self._choice = LoadChoice(len(children))
        self._estimator = estimator
        self._listener = listener
        self._hand_offs = {child.index for child in children if name_among(type(child.connector), HAND_OFF)}
        # Of each child, the async loads since the one that ended last: request -> tokens, and when it was allocated.
        self._open: list[dict[str, tuple[int, int]]] = [{} for _ in children]

    @classmethod
    def of(
        cls, options: Options, children: Sequence[Child], estimator: Estimator, listener: TransferListener
    ) -> Fastest | None:
        """Return the policy, if it is the configured one."""
        return cls(children, estimator, listener) if options.load_policy == "fastest" else None

    @contained("record")
    def decide(self, request: Request, local: int, offers: Sequence[Offered]) -> Decision | None:
        """Return the choice with its reason; None if this policy can't decide.

        Args:
            request: vLLM's.
            local: tokens in vLLM's own cache.
            offers: at least one, in the order of the configuration.
        """
        for offer in offers:
            if offer.child in self._hand_offs:
                return Decision(offer.child, HANDED_OVER, offer.child, (offer.child,), {}, None, {})
        cost = self._estimator.cost
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

    @contained("record")
    def taken(self, request_id: str, decision: Decision) -> None:
        """Note, and announce, a decision by which vLLM has allocated."""
        self._choice.taken(decision)
        self._listener.decided(request_id, decision)

    # The router's events

    @contained("record")
    def admitted(self, request_id: str, load: Load) -> None:
        if load.is_async:
            self._open[load.child][request_id] = load.tokens, load.opened_ns

    @contained("record")
    def load_ended(self, request_id: str, load: Load) -> None:
        """Learn the load's duration. The tokens of a failed load are computed afterwards."""
        took_ns = wall_ns() - load.opened_ns if load.is_async else load.duration_ns
        seconds = max(0, took_ns) / 1e9
        if load.failed:
            again_s = _crowded(self._estimator.cost, max(1, load.recomputed_tokens), load.local_tokens)
            seconds = 2 * seconds if again_s is None else seconds + again_s
        self._choice.observe(load.child, load.tokens, seconds)
        # One that it has overtaken says nothing of the connector now: it may be lost.
        begun = self._open[load.child]
        for other in [other for other, (_, since) in begun.items() if since <= load.opened_ns]:
            del begun[other]


def _crowded(cost: ComputeCost, tokens: int, context: int) -> float | None:
    """Return the seconds of computing among the engine's present prefills."""
    seconds = cost.predict(tokens, context)
    return None if seconds is None else seconds * cost.crowding
