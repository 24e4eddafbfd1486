"""Keep the failures of best-effort children from the engine: quarantine, trial, and what becomes of loads and saves.

The scheduler's side decides and tells the workers with each step's metadata; a worker that saw its child fail does not
wait for that. Loads that a child was never told to begin fail at once. Those under way are waited for, since something
may still be writing into their blocks: for ``GIVE_UP_NS``, then they are taken for failed, and open saves for done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvobs import signals
from kvobs.children import Child
from kvobs.gates import ends_for_good
from kvobs.hooks import HOOKS, Cadence
from kvobs.ledger import Ledger
from kvobs.metadata import LoadOrder
from kvobs.notices import line, log
from kvobs.quarantine import FOR_GOOD, NEVER_NS, Quarantine, State, Word
from kvobs.recorder import Recorder, wall_ns

GIVE_UP_NS = 10 * 10**9
_QUARANTINED = signals.slot(signals.QUARANTINED)


class Isolation:
    """The isolated children on the scheduler's side.

    Args:
        children: all children; those with a gate are isolated.
        ledger: their open loads and saves.
        recorder: where the gauge is.
    """

    def __init__(self, children: Sequence[Child], ledger: Ledger, recorder: Recorder) -> None:
        self._children = {child.index: child for child in children if child.gate is not None}
        self._states = {index: Quarantine() for index in self._children}
        self._ledger = ledger
        self._recorder = recorder
        self._failures: deque[tuple[int, int]] = deque()  # (time, child), until what was open then is given up
        for child in self._children.values():
            assert child.gate is not None
            child.gate.on_failure = self._on_failure(child)

    def is_out(self, child: int) -> bool:
        """Return whether a child takes no part."""
        return child in self._states and self._states[child].is_out

    def words(self) -> Mapping[int, Word]:
        """Return what the workers are to know."""
        return {index: Word(state.epoch, state.is_out) for index, state in self._states.items()}

    def hear(self, broken: Iterable[tuple[int, int]]) -> None:
        """Take in which children workers saw fail, each with the epoch in which they did."""
        for index, epoch in broken:
            if index in self._states:
                self._fail(index, "on a worker", epoch=epoch)

    def gone(self, request_id: str) -> None:
        """Note that a request has ended."""
        for state in self._states.values():
            state.gone(request_id)

    def begin_step(self) -> None:
        """Move on whatever is due."""
        if not self._states:
            return
        now = wall_ns()
        while self._failures and now >= self._failures[0][0] + GIVE_UP_NS:
            self._give_up(*self._failures.popleft(), now)
        for index, state in self._states.items():
            change = state.look(now)
            if change is State.TRIAL:
                self._try_again(index)
            elif change is State.FIT:
                log.info("connector %r is fit again", self._children[index].name)

    def drop_orders(self, orders: Mapping[str, LoadOrder], metadata: Sequence[Any]) -> None:
        """Fail the loads that no worker begins, as their child is out or has no metadata."""
        for request_id, order in orders.items() if self._children else ():
            if self.is_out(order.child) or (order.child in self._children and metadata[order.child] is None):
                self._ledger.fail(request_id, wall_ns())

    def _on_failure(self, child: Child) -> Any:
        def failed(hook: str, args: tuple[Any, ...], error: Exception) -> None:
            cadence = HOOKS[hook].cadence
            missed: Iterable[str] = ()
            if cadence is Cadence.REQUEST and args:
                missed = (args[0].request_id,)
            elif cadence is Cadence.STEP:
                missed = self._ledger.unfinished()
            epoch = FOR_GOOD if ends_for_good(hook) else None
            self._fail(child.index, f"in {hook}: {type(error).__name__}: {line(error)}", missed, epoch)

        return failed

    def _fail(self, index: int, where: str, missed: Iterable[str] = (), epoch: int | None = None) -> None:
        now, state, child = wall_ns(), self._states[index], self._children[index]
        if not state.fail(now, missed, epoch):
            return
        assert child.gate is not None
        child.gate.is_shut = True
        self._recorder.set_gauge(index, _QUARANTINED, 1)
        self._failures.append((now, index))
        log.warning(
            "connector %r failed %s. It is isolated: serving goes on without it, %s (kvobs_quarantined)",
            child.name,
            where,
            "for good" if state.length_ns == NEVER_NS else f"for {state.length_ns / 1e9:g} s at least",
        )

    def _try_again(self, index: int) -> None:
        """Let a child take part again; what it holds may be wrong, as saves of it were left out meanwhile."""
        child = self._children[index]
        assert child.gate is not None
        child.gate.is_shut = False
        was_reset = child.reset_cache() is True
        if self._states[index].is_out:
            return  # that failed too
        self._recorder.set_gauge(index, _QUARANTINED, 0)
        log.info(
            "connector %r takes part again, on trial; %s",
            child.name,
            "its cache was reset" if was_reset else "its cache can't be reset, what it missed it must notice itself",
        )

    def _give_up(self, before: int, index: int, now: int) -> None:
        loads, saves = self._ledger.give_up(index, before, now)
        if loads or saves:
            log.warning(
                "connector %r has not reported %d loads and %d saves %.3g s after it failed: the loads are taken for "
                "failed, the saves' blocks are released",
                self._children[index].name,
                loads,
                saves,
                GIVE_UP_NS / 1e9,
            )
