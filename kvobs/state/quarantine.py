"""The isolation state of a best-effort connector: quarantine after a failure, then probation, then healthy again.

A pure state machine on the scheduler's side, one for each isolated connector. A back-off lasts one second, doubled each
time the following probation fails, up to a minute; after a slow call at least eight times the call's duration, so that
slow probations take little of the time. Only a successful transfer ends a probation: time proves nothing.
"""

from enum import StrEnum
from typing import NamedTuple

FIRST_NS = 10**9
LONGEST_NS = 60 * 10**9
SLOW_SHARE = 8
NEVER_NS = 2**63
FOR_GOOD = 2**62
"""The epoch of a failure at a connector's start or end, after which it stays disabled."""


class State(StrEnum):
    """In FIT and in PROBATION a connector is enabled; they differ only in the consequence of a failure."""

    FIT = "fit"
    OUT = "out"
    PROBATION = "probation"


class IsolationState(NamedTuple):
    """One connector's state, sent to the workers with every step."""

    epoch: int
    is_out: bool


class Quarantine:
    """The state of one connector.

    ``epoch`` counts the quarantines: a worker's failure of an earlier epoch is already known. ``by_slowness``: the last
    failure was a slow call, and another call may block as long.
    """

    def __init__(self) -> None:
        self.state = State.FIT
        self.epoch = 0
        self.by_slowness = False
        self._length_ns = FIRST_NS // 2
        self._ends_ns = 0  # of the back-off, after which the probation begins
        self._probation_ns = 0  # the start of the last probation

    @property
    def is_out(self) -> bool:
        return self.state is State.OUT

    @property
    def is_slow(self) -> bool:
        """Return whether it is in quarantine because of a slow call."""
        return self.is_out and self.by_slowness

    @property
    def length_ns(self) -> int:
        """Return the length of this or the last back-off."""
        return NEVER_NS if self._ends_ns == NEVER_NS else self._length_ns

    def fail(self, now_ns: int, epoch: int | None = None, *, slow_ns: int = 0) -> bool:
        """Process a failure; return whether it begins a quarantine, or makes it permanent.

        ``epoch`` is a worker's, of its failure (an earlier one is already known), or ``FOR_GOOD``. After a slow call
        of ``slow_ns`` a probation may block as long again: the back-off is at least ``SLOW_SHARE`` times that.
        """
        if epoch == FOR_GOOD:
            was_known, self.state, self._ends_ns = self._ends_ns == NEVER_NS, State.OUT, NEVER_NS
            return not was_known
        if self.is_out:
            self.by_slowness |= slow_ns > 0
            return False
        if epoch is not None and epoch < self.epoch:
            return False
        self.state = State.OUT
        self.epoch += 1
        self.by_slowness = slow_ns > 0
        self._length_ns = min(max(2 * self._length_ns, SLOW_SHARE * slow_ns), LONGEST_NS)
        self._ends_ns = now_ns + self._length_ns
        return True

    def look(self, now_ns: int) -> bool:
        """Begin the probation if the back-off is over; return whether it begins."""
        if not self.is_out or now_ns < self._ends_ns:
            return False
        self.state = State.PROBATION
        self._probation_ns = now_ns
        return True

    def succeed(self, began_ns: int) -> bool:
        """End the probation, because a transfer that began at this time succeeded; return whether it ends.

        One that began before the probation proves nothing.
        """
        if self.state is not State.PROBATION or began_ns < self._probation_ns:
            return False
        self.state = State.FIT
        self._length_ns = FIRST_NS // 2
        return True
