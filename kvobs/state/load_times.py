"""Predict how long a connector's loads take, from its last ones: seconds = fixed + tokens * per_token.

The shape is a line through a short window of loads, in which outliers have little weight. Its height is that of the
last three: one outlier counts for nothing, and a change for all from the second load on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_WINDOW = 12  # loads
_LAST = 3  # of them that decide how fast the connector is now
_CHANGED = 1.5  # times what was expected, or a part of it, for all of these: the connector has changed
_USUAL = 0.2  # how far off a load may be, as a share, before it loses weight
_ROUNDS = 3
# Loads that are assumed beside the observed ones: while all are of similar size, so much of their time is fixed.
_FIXED_SHARE, _GUESS = 0.5, 0.02
_SHORTEST = 1e-6  # seconds


class LoadTimes:
    """The last loads of one connector.

    Attributes:
        fixed: seconds of any load.
        per_token: seconds more of each token.
    """

    __slots__ = ("_line", "_loads", "fixed", "per_token")

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._line = 0.0, 0.0
        self.fixed = self.per_token = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a load that has ended.

        Args:
            tokens: loaded.
            seconds: from vLLM's allocation to its end on all ranks; of a synchronous load those that its step waited.
        """
        loads = self._loads
        loads.append((max(1, tokens), max(_SHORTEST, seconds)))
        ratios = self._last_ratios()
        if len(loads) > _LAST and (ratios[0] > _CHANGED or ratios[-1] < 1 / _CHANGED):
            # The older ones keep their say about the shape only.
            change = _middle(ratios)
            for i in range(len(loads) - _LAST):
                of, took = loads[i]
                loads[i] = of, took * change
            self._line = self._line[0] * change, self._line[1] * change
        self._fit()
        level = _middle(self._last_ratios())
        self.fixed, self.per_token = self._line[0] * level, self._line[1] * level

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
        fixed, per_token = self._line
        last = list(self._loads)[-_LAST:]
        return sorted([seconds / max(_SHORTEST, fixed + tokens * per_token) for tokens, seconds in last])

    def _fit(self) -> None:
        """Improve the line: least squares of shares, in which loads far from the line have little weight."""
        tokens, seconds = _middle(sorted(self._loads))
        fixed, per_token = self._line
        if not (fixed or per_token):
            fixed, per_token = _FIXED_SHARE * seconds, (1 - _FIXED_SHARE) * seconds / tokens
        guesses = [
            (tokens * far, seconds * (_FIXED_SHARE + (1 - _FIXED_SHARE) * far), _GUESS) for far in (1 / 4, 1.0, 4.0)
        ]
        loads = [*guesses, *[(of, took, 1.0) for of, took in self._loads]]
        for _ in range(_ROUNDS):
            w = wt = wtt = ws = wts = 0.0
            for t, s, weight in loads:
                expected = fixed + t * per_token
                expected = max(expected, _SHORTEST)
                off = (s / expected if s > expected else expected / s) - 1
                share = weight / (expected * expected * (1 + (off / _USUAL) ** 2))
                w, wt, wtt = w + share, wt + share * t, wtt + share * t * t
                ws, wts = ws + share * s, wts + share * s * t
            spread = w * wtt - wt * wt
            if spread <= _SHORTEST * w * wtt:
                break
            per_token = max(0.0, (w * wts - wt * ws) / spread)
            fixed = (ws - per_token * wt) / w
            if fixed < 0:
                fixed, per_token = 0.0, wts / wtt
        self._line = fixed, per_token


def _middle(ascending: Sequence[T]) -> T:
    """Return the median; of two, the larger."""
    return ascending[len(ascending) // 2]
