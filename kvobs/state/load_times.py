"""Predict how long a connector's loads take, from its last ones: seconds = fixed + tokens * per_token.

The shape is a robust line (Theil and Sen: the median of the slopes between pairs) through a short window of loads. Its
height is that of the last three, so that one outlier counts for nothing and a change for all from the second load on.
Loads in progress count from the moment at which they are late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations

_WINDOW = 12  # loads
_LAST = 3  # of them that decide how fast the connector is now
_CHANGED = 1.5  # times what was expected, or a part of it, for all of these: the connector has changed
_APART = 1.5  # how much larger a load must be than another one for a slope between them
_FIXED_SHARE = 0.5  # while all loads were of similar size
_SHORTEST = 1e-6  # seconds


class LoadTimes:
    """The last loads of one connector.

    Attributes:
        fixed: seconds of any load.
        per_token: seconds more of each token.
    """

    __slots__ = ("_loads", "fixed", "per_token")

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self.fixed = self.per_token = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a load that has ended.

        Args:
            tokens: loaded.
            seconds: from vLLM's allocation to its end on all ranks; of a synchronous load those that its step waited.
        """
        loads = self._loads
        loads.append((max(1, tokens), max(_SHORTEST, seconds)))
        self._fit()
        ratios = self._last_ratios()
        if len(loads) > _LAST == len(ratios) and (ratios[0] > _CHANGED or ratios[-1] < 1 / _CHANGED):
            # The older ones keep their say about the shape only.
            change = _middle(ratios)
            for i in range(len(loads) - _LAST):
                of, took = loads[i]
                loads[i] = of, took * change
            self._fit()
            ratios = self._last_ratios()
        level = _middle(ratios)
        self.fixed, self.per_token = self.fixed * level, self.per_token * level

    def predict(self, tokens: int, open_loads: Sequence[tuple[int, float]] = ()) -> float | None:
        """Return the seconds that a load would take now; None before the first load has ended.

        Args:
            tokens: to load.
            open_loads: tokens and age in seconds of the loads in progress. If one is late, so may be the next.
        """
        if not self._loads:
            return None
        late = 1.0
        for of, age in open_loads:
            late = max(late, age / self._expect(of))
        return late * self._expect(tokens)

    def _expect(self, tokens: int) -> float:
        return max(_SHORTEST, self.fixed + tokens * self.per_token)

    def _last_ratios(self) -> list[float]:
        """Return how much longer than the line the last loads took, in ascending order."""
        return sorted(seconds / self._expect(tokens) for tokens, seconds in list(self._loads)[-_LAST:])

    def _fit(self) -> None:
        """Put a line through all loads that falls nowhere and begins at 0 or above."""
        slopes = []
        for (a, of_a), (b, of_b) in combinations(self._loads, 2):
            if a >= b * _APART or b >= a * _APART:
                slopes.append((of_a - of_b) / (a - b))
        steepest = _middle(sorted(seconds / tokens for tokens, seconds in self._loads))
        if slopes:
            self.per_token = min(steepest, max(0.0, _middle(sorted(slopes))))
        else:
            self.per_token = (1 - _FIXED_SHARE) * steepest
        rests = sorted(seconds - tokens * self.per_token for tokens, seconds in self._loads)
        self.fixed = max(0.0, _middle(rests))


def _middle(ascending: Sequence[float]) -> float:
    """Return the median; of two, the larger."""
    return ascending[len(ascending) // 2]
