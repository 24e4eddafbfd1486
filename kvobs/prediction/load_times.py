"""Predict how long a connector's loads take, from its last ones: seconds = fixed + tokens * per_token.

The slope comes from a short window of loads, in which outliers have little weight; the offset from the last three loads
only. One outlier has no effect, and a change is followed from its second load on.
"""

from collections import deque
from collections.abc import Sequence
from math import log1p
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Line: TypeAlias = tuple[float, float]  # seconds of any load, and of each token

_WINDOW = 12  # number of loads from which the slope is estimated
_LAST = 3  # number of loads from which the present speed is estimated
_CHANGED = 1.5  # the connector has changed if its last loads all differ from the line by this factor
_USUAL = 0.2  # usual deviation of a load, as a share; with larger ones a load loses weight
_ROUNDS = 3  # repetitions of the weighted least squares
_FITS = log1p(0.25**2)  # misfit of a load that deviates by a quarter of the usual
_DIFFERENT = 1.25  # ratio of tokens from which two loads of a pair give a slope
# While all loads are of similar size, three assumed ones of a small weight decide which share of their time is fixed.
_FIXED_SHARE, _GUESS = 0.5, 0.02  # that share, and their weight
_SHORTEST = 1e-6  # seconds


class LoadTimes:
    """The last loads of one connector: seconds of any load, ``fixed``, and more for each token, ``per_token``."""

    __slots__ = ("_line", "_loads", "fixed", "per_token")

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._line: Line = (0.0, 0.0)
        self.fixed = self.per_token = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a load: its time from allocation to its end on all ranks; if synchronous, the wait of its step."""
        loads = self._loads
        loads.append((max(1, tokens), max(_SHORTEST, seconds)))
        self._line = self._fitted()
        ratios = self._last_ratios()
        if len(loads) > _LAST and (ratios[0] > _CHANGED or ratios[-1] < 1 / _CHANGED):
            # Older loads are rescaled: they keep their influence on the slope only.
            change = _middle(ratios)
            for i in range(len(loads) - _LAST):
                of, took = loads[i]
                loads[i] = of, took * change
            self._line = self._line[0] * change, self._line[1] * change
            self._line = self._improved(self._line)
        level = _middle(self._last_ratios())
        self.fixed, self.per_token = self._line[0] * level, self._line[1] * level

    def predict(self, tokens: int, open_loads: Sequence[tuple[int, float]] = ()) -> float | None:
        """Return the seconds that a load would take now; None before the first load has ended.

        ``open_loads``: tokens and age in seconds of the loads in progress. If one is late, the next may be, too.
        """
        if not self._loads:
            return None
        late = max((age / self._expect(of) for of, age in open_loads), default=1.0)
        return max(1.0, late) * self._expect(tokens)

    def _expect(self, tokens: int) -> float:
        return max(_SHORTEST, self.fixed + tokens * self.per_token)

    def _last_ratios(self) -> list[float]:
        """Return how much longer than the line the last loads took, in ascending order."""
        fixed, per_token = self._line
        last = list(self._loads)[-_LAST:]
        return sorted([seconds / max(_SHORTEST, fixed + tokens * per_token) for tokens, seconds in last])

    def _fitted(self) -> Line:
        """Return the last line, improved; if it fits badly, the line through most pairs of loads, if that fits better.

        Otherwise a wrong slope would stay, because the loads that contradict it would count as outliers.
        """
        line = self._improved(self._line)
        misfit = self._misfit(line)
        if misfit > _FITS * len(self._loads) and (other := self._through_pairs()) is not None:
            other = self._improved(other)
            if self._misfit(other) < misfit:
                return other
        return line

    def _through_pairs(self) -> Line | None:
        """Return the line with the median slope of all pairs of different size; None if there are none."""
        loads = sorted(self._loads)
        pairs = [(a, b) for i, a in enumerate(loads) for b in loads[i + 1 :] if b[0] >= _DIFFERENT * a[0]]
        if not pairs:
            return None
        slopes = sorted([(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs])
        per_token = max(0.0, _middle(slopes))
        return max(0.0, _middle(sorted([took - of * per_token for of, took in loads]))), per_token

    def _misfit(self, line: Line) -> float:
        """Return the deviation of the loads from a line; outliers count little more than other loads."""
        fixed, per_token = line
        expected = ((seconds, max(_SHORTEST, fixed + tokens * per_token)) for tokens, seconds in self._loads)
        return sum(log1p((_off(*pair) / _USUAL) ** 2) for pair in expected)

    def _improved(self, line: Line) -> Line:
        """Improve a line by least squares of relative deviations; loads far from the line have little weight."""
        tokens, seconds = _middle(sorted(self._loads))
        fixed, per_token = line
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
                share = weight / (expected * expected * (1 + (_off(s, expected) / _USUAL) ** 2))
                w, wt, wtt = w + share, wt + share * t, wtt + share * t * t
                ws, wts = ws + share * s, wts + share * s * t
            spread = w * wtt - wt * wt
            if spread <= _SHORTEST * w * wtt:
                break
            per_token = max(0.0, (w * wts - wt * ws) / spread)
            fixed = (ws - per_token * wt) / w
            if fixed < 0:
                fixed, per_token = 0.0, wts / wtt
        return fixed, per_token


def _off(seconds: float, expected: float) -> float:
    """Return the deviation of a load from its expected time, as a share of the shorter one."""
    return (seconds / expected if seconds > expected else expected / seconds) - 1


def _middle(ascending: Sequence[T]) -> T:
    """Return the median; of two, the larger."""
    return ascending[len(ascending) // 2]
