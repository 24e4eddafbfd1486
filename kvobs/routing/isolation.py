"""Isolate the engine from failures of best-effort connectors: quarantine, probation, and their open requests.

The scheduler's side decides. Requests that arrive during a quarantine are hidden from the connector completely; those
that it knows are still reported to it, with its failures contained, but it no longer saves them. No cache is reset, and
kvobs makes no call that vLLM does not make: the first request after the back-off begins the probation.

Loads that no worker can have begun fail at once. Any other load is waited for, since the connector may still write into
its blocks: for ``GIVE_UP_NS``; then it counts as failed, and open saves as done.
"""

import pickle
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvobs.clock import wall_ns
from kvobs.connectors.endings import must_pass
from kvobs.connectors.gate import ends_for_good
from kvobs.connectors.sub_connector import SubConnector, Unbuilt
from kvobs.log import line, log
from kvobs.routing.visibility import Visibility
from kvobs.state.events import Observer
from kvobs.state.ledger import Ledger
from kvobs.state.quarantine import FOR_GOOD, NEVER_NS, IsolationState, Quarantine
from kvobs.vllm_api.hooks import HOOKS, Cadence

GIVE_UP_NS = 10 * 10**9

_OPEN: frozenset[str] = frozenset()
_CAN_WAIT = frozenset({"take_events", "get_kv_connector_stats", "has_pending_block_frees"})
"""Hooks of each step whose answer is as good later: a slow connector's are left out."""
_OF_STEPS = _CAN_WAIT | {"build_connector_meta", "update_connector_output", "has_pending_push_work"}
"""Those that are left out once a slow connector has nothing under way."""


class Isolation:
    """The isolated connectors on the scheduler's side: those with a gate.

    A call within the scheduler's step that takes longer than ``slow_ns`` is a failure.
    """

    def __init__(
        self,
        connectors: Sequence[SubConnector],
        ledger: Ledger,
        visibility: Sequence[Visibility],
        observer: Observer,
        slow_ns: int,
    ) -> None:
        self._connectors = {connector.index: connector for connector in connectors if connector.gate is not None}
        self._states = {index: Quarantine() for index in self._connectors}
        # Live requests that were looked up -> whether blocks were allocated with the connector's knowledge.
        self._asked: dict[int, dict[str, bool]] = {index: {} for index in self._connectors}
        self._tried = dict.fromkeys(self._connectors, 0)  # requests looked up since the last probation began
        self._has_loaded: set[int] = set()  # connectors with an admitted load
        self._unmade: dict[int, list[str]] = {}  # requests whose allocation call raised in this step
        self._visibility = visibility
        self._ledger = ledger
        self._observer = observer
        # (time, connector) after which transfers that were open then are given up
        self._reviews: deque[tuple[int, int]] = deque()
        for index, connector in self._connectors.items():
            assert connector.gate is not None
            connector.gate.slow_ns = slow_ns
            connector.gate.on_failure = partial(self._failed, index)
            connector.gate.on_slow = partial(self._was_slow, index)
            if isinstance(connector.wrapped, Unbuilt):
                self._fail(index, "to be built", FOR_GOOD)

    def is_out(self, index: int) -> bool:
        """Return whether a connector is in quarantine."""
        return index in self._states and self._states[index].is_out

    def is_slow(self, index: int) -> bool:
        """Return whether a connector is in quarantine because of a slow call."""
        return index in self._states and self._states[index].is_slow

    def states(self) -> Mapping[int, IsolationState]:
        """Return the connectors' isolation states for the workers."""
        return {index: IsolationState(state.epoch, state.is_out) for index, state in self._states.items()}

    def record_failures(self, broken: Iterable[tuple[int, int]]) -> None:
        """Process the connectors that failed on workers, each with the epoch of the failure."""
        for index, epoch in broken:
            if index in self._states:
                self._withhold_all(index)  # the requests of that step are not known here
                self._fail(index, "on a worker", epoch)

    def arrive(self, request_id: str) -> None:
        """Hide a new request from the connectors in quarantine."""
        for index, state in self._states.items():
            if state.is_out and not self._look(index):
                self._visibility[index].hidden.add(request_id)

    def asks(self, index: int, request_id: str) -> bool:
        """Return whether a connector takes part in a lookup of this request.

        During quarantine it still gets repeated lookups of requests it knows, so that it can clean up its state, unless
        the cause was a slow call: another one would block the step again.
        """
        if index not in self._states:
            return True
        visibility, state, asked = self._visibility[index], self._states[index], self._asked[index]
        if not visibility.allocates(request_id):
            return False
        if state.is_out and (state.by_slowness or request_id not in asked):
            visibility.drop(request_id, taints=asked.get(request_id, False))
            return False
        if request_id not in asked:
            asked[request_id] = False
            self._tried[index] += 1
        return True

    def allocated(self, index: int, request_id: str) -> None:
        """Note that a connector has been given a request's blocks."""
        if index in self._asked:
            self._asked[index][request_id] = True

    def discards(self, index: int, request_id: str) -> bool:
        """Return whether a connector's answer to a lookup is ignored."""
        return index in self._states and (self.is_out(index) or not self._visibility[index].saves(request_id))

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for asked in self._asked.values():
            asked.pop(request_id, None)

    def begin_step(self, finished: Collection[str]) -> None:
        """Apply all state changes that are due before a step, which reports these requests as finished."""
        if not self._states:
            return
        now = wall_ns()
        while self._reviews and now >= self._reviews[0][0] + GIVE_UP_NS:
            before, index = self._reviews.popleft()
            self._give_up(before, index, now)
            if self.is_out(index) and all(index != other for _, other in self._reviews):
                self._reviews.append((now, index))  # saves promised during the quarantine
        for index, state in self._states.items():
            self._look(index)
            gate = self._connectors[index].gate
            assert gate is not None
            gate.closed = _OPEN if not state.is_slow else _OF_STEPS if self._is_quiet(index, finished) else _CAN_WAIT

    def _is_quiet(self, index: int, finished: Collection[str]) -> bool:
        """Return whether a connector has nothing under way: no transfer, and no request that it knows.

        Until then it must see each step: it may be saving blocks, and must know when their content changes.
        """
        transfers, hidden = self._ledger.in_flight[index], self._visibility[index].hidden
        is_idle = not transfers["load"] and not transfers["save"]
        return is_idle and hidden.issuperset(finished) and hidden.issuperset(self._ledger)

    def built(self, index: int, metadata: object) -> None:
        """Fail the loads whose allocation call raised, unless the metadata built afterwards orders them anyway.

        To report its end, a worker must know the request's id.
        """
        for request_id in self._unmade.pop(index, ()):
            load = self._ledger.load(request_id)
            if (
                load is not None
                and load.connector_index == index
                and metadata is not None
                and not _names(metadata, request_id)
            ):
                self._ledger.fail(request_id, wall_ns())

    def load_ended(self, index: int, opened_ns: int, *, failed: bool) -> None:
        """Note the end of a load: a good one ends the connector's probation."""
        if index in self._states:
            self._has_loaded.add(index)
            if not failed:
                self._succeed(index, opened_ns)

    def saved(self, index: int, promised_ns: int) -> None:
        """Note a promised save that succeeded; it ends the probation of a connector that never loads."""
        if index in self._states and index not in self._has_loaded:
            self._succeed(index, promised_ns)

    def _succeed(self, index: int, began_ns: int) -> None:
        if self._states[index].succeed(began_ns):
            text = "connector %r left probation after a successful transfer; %d requests were looked up in it"
            log.info(text, self._connectors[index].name, self._tried[index])

    def _look(self, index: int) -> bool:
        """Enable a connector again if its back-off is over; return whether it is enabled."""
        state, now = self._states[index], wall_ns()
        if state.look(now):
            self._tried[index] = 0
            self._reviews.append((now, index))
            self._observer.readmitted(index)
            text = "connector %r left quarantine and is on probation: it receives the requests that arrive from now on"
            log.info(text, self._connectors[index].name)
        return not state.is_out

    def _failed(self, index: int, hook: str, args: tuple[Any, ...], error: BaseException, slow_ns: int) -> None:
        cadence = HOOKS[hook].cadence
        is_new = True
        if cadence is Cadence.REQUEST and args:
            # A consequence of an earlier failure is not a new one.
            is_new = self._visibility[index].saves(args[0].request_id)
            self._visibility[index].withhold(args[0].request_id, taints=True)
            if hook == "update_state_after_alloc":
                self._unmade.setdefault(index, []).append(args[0].request_id)
        elif cadence is Cadence.STEP:
            self._withhold_all(index)
        if is_new or slow_ns:
            epoch = FOR_GOOD if ends_for_good(hook) else None
            after = f" after {slow_ns / 1e9:.3g} s" if slow_ns else ""
            self._fail(index, f"in {hook}{after}: {type(error).__name__}: {line(error)}", epoch, slow_ns=slow_ns)

    def _was_slow(self, index: int, hook: str, spent_ns: int) -> None:
        self._fail(index, f"in {hook}, which took {spent_ns / 1e9:.3g} s", slow_ns=spent_ns)

    def _withhold_all(self, index: int) -> None:
        """Stop a connector from saving the requests it knows: its state of some may be incomplete."""
        for request_id in self._ledger.unfinished():
            self._visibility[index].withhold(request_id, taints=True)

    def _fail(self, index: int, where: str, epoch: int | None = None, *, slow_ns: int = 0) -> None:
        now, state, connector = wall_ns(), self._states[index], self._connectors[index]
        if not state.fail(now, epoch, slow_ns=slow_ns):
            return
        self._observer.quarantined(index)
        self._reviews.append((now, index))
        text = "connector %r failed %s. It is in quarantine: new requests are served without it %s (kvobs_quarantined)"
        until = "until a restart" if state.length_ns == NEVER_NS else f"for {state.length_ns / 1e9:g} s"
        log.warning(text, connector.name, where, until)

    def _give_up(self, before: int, index: int, now: int) -> None:
        loads, saves = self._ledger.give_up(index, before, now)
        if loads or saves:
            text = (
                "connector %r has not reported %d loads and %d saves %.3g s after it failed: the loads count as "
                "failed, and the blocks of the saves are released"
            )
            log.warning(text, self._connectors[index].name, loads, saves, GIVE_UP_NS / 1e9)


def _names(metadata: object, request_id: str) -> bool:
    """Return whether a connector's metadata may contain a request's id."""
    try:
        return request_id.encode(errors="surrogatepass") in pickle.dumps(metadata)
    except BaseException as error:
        if must_pass(error):
            raise
        return True
