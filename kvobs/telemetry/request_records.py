"""Record what ``kvobs whatif`` needs of each request: its lookup's answers, the cost of computing, its first token."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from kvobs.faults import contained
from kvobs.state.compute_cost import Estimator, to_compute
from kvobs.state.lookup import Lookup
from kvobs.state.transfer_listener import LookedUp, TransferListener
from kvobs.state.transfers import Gain, Load
from kvobs.telemetry.flight import OWN, Flight, What, pack
from kvobs.telemetry.ring import OPEN

ASYNC, CHOSEN, UNANSWERED = 1, 2, 4
"""What an answer is, in its record's flags."""
FLAGS_AT = 8
"""Their first bit in the record's word, in the place of a hook."""
CROWDED = 100
"""The place of the flags has this many times the crowding where all tokens are computed: see ``ComputeCost``."""
_CROWDED_AT_MOST = (1 << 16) - 1


class RequestRecords(TransferListener):
    """Writes these records beside those of ``flight``, on the scheduler's side.

    A first token is recorded when the step whose output has it is over: vLLM's request then has an output token.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._asked: dict[str, int] = {}  # request that has no blocks yet -> its first lookup
        self._computing: dict[str, tuple[LookedUp, int]] = {}  # has no token yet -> the request, its first lookup
        self._loading: dict[str, tuple[LookedUp, int]] = {}  # the same, in an asynchronous load

    def __len__(self) -> int:
        return len(self._asked) + len(self._computing) + len(self._loading)

    @contained("record")
    def note_first_tokens(self) -> None:
        """Record the first tokens that have come, when vLLM has read the output of a step."""
        for request_id in [one for one, (request, _) in self._computing.items() if request.num_output_tokens]:
            self._first_token(*self._computing.pop(request_id))

    @contained("record")
    def looked_up(self, request: LookedUp, began_ns: int, ended_ns: int) -> None:
        self._asked.setdefault(request.request_id, began_ns)

    @contained("record")
    def settled(self, request: LookedUp, lookup: Lookup, estimator: Estimator) -> None:
        """Record what the last lookup before an allocation found: the answers, and what computing takes with each.

        That is of the tokens that it does not offer. A request that is resumed after its asynchronous load is allocated
        again: then there is nothing to record.
        """
        request_id = request.request_id
        if (first_ns := self._asked.pop(request_id, None)) is None:
            return
        write, hashed, now_ns = self._flight.of_request, self._flight.hashed(request_id), perf_counter_ns()
        write(pack(What.ANSWER, OWN, n=lookup.local), hashed, now_ns, 0)
        cost, all_tokens = estimator.cost, request.num_tokens
        crowding = min(round(cost.crowding * CROWDED), _CROWDED_AT_MOST)
        choices: list[tuple[int, int]] = [(OWN, 0)]
        for child, tokens, is_async, since_ns, waited_ns in lookup.answers:
            flags = ASYNC * is_async | CHOSEN * (child == lookup.chosen) | UNANSWERED * (tokens is None)
            began_ns = since_ns - self._flight.wall_offset if since_ns else now_ns
            write(pack(What.ANSWER, child, n=tokens or 0) | flags << FLAGS_AT, hashed, began_ns, waited_ns)
            if tokens:
                choices.append((child, tokens))
        for child, tokens in choices:
            rest = to_compute(all_tokens, lookup.local + tokens)
            seconds = cost.predict(rest, all_tokens - rest)
            spent_ns = OPEN if seconds is None else int(seconds * 1e9)
            write(pack(What.COMPUTING, child, n=rest) | crowding << FLAGS_AT, hashed, now_ns, spent_ns)
        if not request.num_output_tokens:
            # After a failed load it is looked up again.
            before = self._loading.pop(request_id, None) or self._computing.get(request_id)
            self._computing[request_id] = request, first_ns if before is None else before[1]

    @contained("record")
    def admitted(self, request_id: str, load: Load) -> None:
        if load.is_async and (waiting := self._computing.pop(request_id, None)) is not None:
            self._loading[request_id] = waiting

    @contained("record")
    def allocated(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None:
        """Look for the first token of a request that is resumed."""
        if (waiting := self._loading.pop(request_id, None)) is not None:
            self._computing[request_id] = waiting

    @contained("record")
    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        """Record what a load has cost its request."""
        started_ns = load.opened_ns - self._flight.wall_offset
        word = pack(What.WAITED, load.child, n=load.tokens)
        self._flight.of_request(word, self._flight.hashed(request_id), started_ns, gain.waited_ns)

    @contained("record")
    def request_ended(self, request_id: str) -> None:
        """Forget it; the first token of a request that generates one only comes at its end."""
        self._asked.pop(request_id, None)
        self._loading.pop(request_id, None)
        if (waiting := self._computing.pop(request_id, None)) is not None and waiting[0].num_output_tokens:
            self._first_token(*waiting)

    def _first_token(self, request: LookedUp, first_lookup_ns: int) -> None:
        """Record the time from the request's arrival; another machine's clock may be ahead of the first lookup."""
        arrived_ns = min(int(request.arrival_time * 1e9), first_lookup_ns) - self._flight.wall_offset
        spent_ns = max(0, perf_counter_ns() - arrived_ns)
        word = pack(What.FIRST_TOKEN, OWN, n=request.num_prompt_tokens)
        self._flight.of_request(word, self._flight.hashed(request.request_id), arrived_ns, spent_ns)
