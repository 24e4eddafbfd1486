"""Whether a best-effort child may take part: in quarantine after a failure, on trial after that, and fit again.

A pure state machine on the scheduler's side, one for each isolated child. A quarantine lasts a second, and twice as
long each time that the trial after it fails, up to a minute. A trial lasts as long as the quarantine before it.

While calls into a child fail, it misses what happens to the requests that the calls were about. What it would save of
them later may be wrong, so a quarantine also lasts until they are gone.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

FIRST_NS = 10**9
LONGEST_NS = 60 * 10**9
NEVER_NS = 2**63
FOR_GOOD = 2**62
"""The epoch of a failure at the start or the end of a child's life, after which it can't be tried again."""


class State(StrEnum):
    """FIT and TRIAL differ in what a failure means only: in both a child takes part."""

    FIT = "fit"
    OUT = "out"
    TRIAL = "trial"


class Word(NamedTuple):
    """What the workers are told of a child in each step."""

    epoch: int
    is_out: bool


class Quarantine:
    """The state of one child.

    ``epoch`` counts the quarantines: a worker that has seen its child fail waits for a later one to end.
    """

    def __init__(self) -> None:
        self.state = State.FIT
        self.epoch = 0
        self._length_ns = FIRST_NS // 2
        self._ends_ns = 0
        self._missed: set[str] = set()  # live requests of which the child has missed something

    @property
    def is_out(self) -> bool:
        return self.state is State.OUT

    @property
    def length_ns(self) -> int:
        """Return how long this quarantine, or the last one, is to last at least."""
        return NEVER_NS if self._ends_ns == NEVER_NS else self._length_ns

    def fail(self, now_ns: int, missed: Iterable[str] = (), epoch: int | None = None) -> bool:
        """Note a failure; return whether a quarantine begins with it, or becomes one for good.

        Args:
            now_ns: the time.
            missed: the requests that the call was about.
            epoch: the one in which a worker saw it, a failure of an earlier one being known already; or ``FOR_GOOD``.
        """
        self._missed.update(missed)
        if epoch == FOR_GOOD:
            was_known, self.state, self._ends_ns = self._ends_ns == NEVER_NS, State.OUT, NEVER_NS
            return not was_known
        if self.is_out or (epoch is not None and epoch < self.epoch):
            return False
        self.state = State.OUT
        self.epoch += 1
        self._length_ns = min(2 * self._length_ns, LONGEST_NS)
        self._ends_ns = now_ns + self._length_ns
        return True

    def gone(self, request: str) -> None:
        """Note that a request has ended: what the child missed of it does not matter any more."""
        self._missed.discard(request)

    def look(self, now_ns: int) -> State | None:
        """Move on if it is time; return the new state, or None while nothing changes."""
        if now_ns < self._ends_ns or self.state is State.FIT or (self.is_out and self._missed):
            return None
        if self.is_out:
            self.state = State.TRIAL
            self._ends_ns = now_ns + self._length_ns
        else:
            self.state = State.FIT
            self._length_ns = FIRST_NS // 2
        return self.state
