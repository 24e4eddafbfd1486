"""Log once that the first requests of a decode engine load nothing from the engines that compute its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvobs.log import log
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.transfers import LookupResult
from kvobs.telemetry.transfers.peers import ASKS, in_id

FIRST = 100  # requests that are looked at


class Silence(Enum):
    """What is logged of an engine that loads nothing."""

    UNANSWERED = (
        "%s loaded nothing for the first %d requests that ask for a remote prefill: this engine computes their "
        "prompts. Check the address that the prefill engine sends, the roles, connectors and block sizes of both "
        "engines (kvobs check compares the engines of one file), and whether the proxy passes on kv_transfer_params"
    )
    UNASKED = (
        "%s only takes KV (kv_consumer), and the first %d requests ask for no remote prefill "
        "(do_remote_prefill in kv_transfer_params): this engine computes their prompts. Check that the proxy passes on "
        "the kv_transfer_params that the prefill engine returns"
    )


class FirstRequests:
    """Looks at requests that no connector loads until ``first`` of them have shown that the engine loads nothing.

    An engine that ``only_takes`` KV should get requests that ask; of others it is not known.
    """

    def __init__(self, *, only_takes: bool, first: int = FIRST) -> None:
        self._only_takes, self._first = only_takes, first
        self._asking: set[str] = set()  # vLLM allocates a request again after a preemption
        self._others: set[str] = set()

    def computed(self, request_id: str, *, asks: bool) -> Silence | None:
        """Note a request whose prompt is computed; return what its engine's requests show, if they do now."""
        if asks:
            self._asking.add(request_id)
            self._others.clear()
        elif self._only_takes and not self._asking:
            self._others.add(request_id)
        if len(self._asking) >= self._first:
            return Silence.UNANSWERED
        return Silence.UNASKED if len(self._others) >= self._first else None


class FirstLoads(Observer):
    """Watches a decode engine's requests until one is loaded from another engine, or enough are not.

    ``takers`` are the connectors that load from others, by their index, and their names.
    """

    def __init__(self, takers: Mapping[int, str], *, only_takes: bool) -> None:
        self._takers, self._only_takes = takers, only_takes
        self._requests: FirstRequests | None = FirstRequests(only_takes=only_takes)  # None: it is known

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        if (requests := self._requests) is None:
            return
        if owner in self._takers:
            self._requests = None
        # Where another connector, or vLLM's own cache, has the prompt there is nothing to compute.
        elif owner is None and lookup.local < request.num_prompt_tokens - 1:
            found = requests.computed(request.request_id, asks=self._asks(request))
            if found is not None:
                self._requests = None
                log.warning(found.value, self._names(), FIRST)

    def _asks(self, request: ObservedRequest) -> bool:
        params = request.kv_transfer_params
        # An engine that also computes for others gets the same ids there.
        by_id = self._only_takes and in_id(request.request_id) is not None
        return by_id or bool(isinstance(params, Mapping) and params.get(ASKS))

    def _names(self) -> str:
        names = ", ".join(map(repr, self._takers.values()))
        return f"connector {names}" if len(self._takers) == 1 else f"connectors {names}"
