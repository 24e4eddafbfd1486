"""Count what happened, per child, in cumulative slots; hand out the difference since the last time."""

from kvobs.signals import SLOTS

WIDTH = len(SLOTS)


class Recorder:
    """Cumulative counters of one process.

    Counting is one list item's addition. What is shipped is a difference, so that a peer only ever adds.
    """

    __slots__ = ("_counts", "_dirty", "_shipped")

    def __init__(self, children: int) -> None:
        self._counts = [0] * (WIDTH * children)
        self._shipped = [0] * (WIDTH * children)
        self._dirty = False

    def count(self, child: int, slot: int, n: int = 1) -> None:
        """Add ``n`` to a slot (see ``signals.slot``) of the child at this position."""
        self._counts[child * WIDTH + slot] += n
        self._dirty = True

    def take(self) -> list[int]:
        """Return what was counted since the last call: flat pairs (slot, value), zeroes left out."""
        if not self._dirty:
            return []
        self._dirty = False
        pairs: list[int] = []
        for slot, (now, before) in enumerate(zip(self._counts, self._shipped, strict=True)):
            if now != before:
                pairs += (slot, now - before)
        self._shipped[:] = self._counts
        return pairs
