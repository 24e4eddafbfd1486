"""Estimate a linear cost from a stream of steps: seconds = fixed + tokens * per_token + attended * per_attended.

Least squares over sums of products. Steps of similar size have their own sums, so that a long run of small steps does
not displace the information from a few large ones. Within a size older steps lose weight: quickly at first, because
the first steps are slow, then slowly. Residuals far beyond the usual ones are clipped (Huber). One-sided residuals mean
that the cost has changed: the weight of all earlier steps is then reduced repeatedly until the residuals balance.

A cost may have a floor: on a GPU a step of few tokens takes as long as reading the weights. The line then describes
the cost above the floor only, and steps at the floor are not used to estimate it.
"""

from collections.abc import Sequence
from math import inf

_MEMORY = 48.0  # number of steps of one size over which the sums run
_READY = 6  # number of steps needed for an estimate
_SOLVE_OFTEN, _SOLVE_SELDOM = 4, 48  # steps between two computations of the coefficients: at first, and later
_CLIP = 4.0  # largest residual, in multiples of the usual one
_SPREAD_AT_FIRST, _SPREAD_AT_LEAST = 0.5, 0.02  # the usual residual, as a share of the expected time
_BLEND = 1 / 16  # weight of the last step in running means
_ONE_SIDED = 0.6  # mean residual as a share of the mean absolute one; that of symmetric residuals stays near 0.2
_DISCOUNT, _LEFT_AT_LEAST = 0.5, 0.01  # factor of the sums after a change, and the share of them that is kept
_DISCOUNTED_AFTER = 8  # steps between two discounts: the residuals of fewer may be one-sided by chance
_SHORTEST = 1e-6  # seconds
_LIGHTEST = 1e-9  # least sum of weights from which coefficients are computed
_FALL, _RISE = 0.4, 0.02  # weight of a new cost in the least one, if it is lower, and if it is higher
_AT_FLOOR = 1.25  # steps up to this multiple of the floor are not used to estimate the line
_SUMS, _LEFT = 9, 9  # number of sums of a size, and the index of the share that discounts have left of them

Vector = tuple[float, float, float]
Matrix = tuple[float, float, float, float, float, float]  # symmetric: 00, 01, 02, 11, 12, 22


class LinearCost:
    """The running estimate of three coefficients, in seconds; ``largest`` is the most tokens of a step in it.

    Costs that the steps do not separate are attributed to the coefficient with the smallest of the ``penalties``. With
    ``has_floor`` the cost is never less than the least one observed, and ``fixed`` may be negative.
    """

    __slots__ = (
        *("_bins", "_drift", "_has_floor", "_learned", "_least", "_penalties", "_seen", "_since", "_solve_after"),
        *("_floors", "_spread", "_undisturbed"),
        *("fixed", "is_ready", "largest", "per_attended", "per_token"),
    )

    def __init__(self, penalties: Vector, *, has_floor: bool = False) -> None:
        self._penalties = penalties
        self._has_floor = has_floor
        self._bins: list[list[float]] = []
        self._seen: list[int] = []
        self._least: list[float] = []  # the least cost of each size
        self._floors: list[float] = []  # the same of each size and all smaller ones
        self._learned = 0
        self._since = 0
        self._solve_after = _SOLVE_OFTEN
        self._spread = _SPREAD_AT_FIRST
        self._drift = 0.0
        self._undisturbed = 0  # steps since the last discount
        self.fixed = self.per_token = self.per_attended = 0.0
        self.largest = 0
        self.is_ready = False

    def expect(self, tokens: float, attended: float) -> float:
        """Return the seconds of a step, never negative, nor less than the floor."""
        line = self.fixed + tokens * self.per_token + attended * self.per_attended
        return max(line, self.floor(int(tokens)) if self._has_floor else 0.0)

    def floor(self, tokens: int) -> float:
        """Return the least cost of steps with about this many tokens or fewer; 0 if there was none."""
        least = self._least_up_to(tokens)
        return least if 0.0 < least < inf else 0.0

    def knows(self, tokens: int) -> bool:
        """Return whether there was a step with about this many tokens or fewer; with a floor only."""
        return self._least_up_to(tokens) < inf

    def _least_up_to(self, tokens: int) -> float:
        at, floors = _size(tokens), self._floors
        return floors[at] if at < len(floors) else floors[-1] if floors else inf

    def learn(self, tokens: int, attended: int, seconds: float, base: float = 0.0) -> None:
        """Take in a step of ``tokens``, at least one; ``base`` of its ``seconds`` are not part of this cost."""
        at = _size(tokens)
        while at >= len(self._bins):
            self._bins.append([*[0.0] * _SUMS, 1.0])
            self._seen.append(0)
            self._least.append(inf)
            self._floors.append(self._floors[-1] if self._floors else inf)
        seen = self._seen[at]
        self._seen[at] = seen + 1
        if self._has_floor:
            self._note_least(at, seconds - base)
        if not seen:  # the first of its size: kernels are compiled, memory is allocated
            return
        weight = 1.0
        if self.is_ready:
            expected = self.expect(tokens, attended)
            seconds = self._clipped(seconds, base + expected)
            if self._has_floor and expected == self.floor(tokens) and seconds <= (base + expected) * _AT_FLOOR:
                weight = 0.0  # the older steps of this size still lose weight
        cost = seconds - base
        weight /= max(seconds, _SHORTEST)  # the variance grows with the time
        keep = 1.0 - 1.0 / min(_MEMORY, 1.0 + seen / 3)
        sums = self._bins[at]
        of_token, of_attended = weight * tokens, weight * attended
        sums[0] = sums[0] * keep + weight
        sums[1] = sums[1] * keep + of_token
        sums[2] = sums[2] * keep + of_attended
        sums[3] = sums[3] * keep + of_token * tokens
        sums[4] = sums[4] * keep + of_token * attended
        sums[5] = sums[5] * keep + of_attended * attended
        sums[6] = sums[6] * keep + weight * cost
        sums[7] = sums[7] * keep + of_token * cost
        sums[8] = sums[8] * keep + of_attended * cost
        sums[_LEFT] += (1.0 - sums[_LEFT]) * (1.0 - keep)
        self.largest = max(self.largest, tokens)
        self._learned += 1
        self._since += 1
        if self._since >= self._solve_after:
            self._solve_after = min(_SOLVE_SELDOM, _SOLVE_OFTEN + self._learned // 16)
            self._solve()

    def _note_least(self, at: int, cost: float) -> None:
        """Update the least cost of a size, and the floors; a single quick step changes them only in part."""
        least = self._least[at]
        self._least[at] = cost if least == inf else least + (_FALL if cost < least else _RISE) * (cost - least)
        lowest, floors = self._floors[at - 1] if at else inf, self._floors
        for i in range(at, len(floors)):
            lowest = min(lowest, self._least[i])
            if floors[i] == lowest:
                break  # the floors of larger sizes also stay
            floors[i] = lowest

    def _clipped(self, seconds: float, expected: float) -> float:
        """Return the seconds, limited to a few usual residuals from the expected ones; update the residuals."""
        expected = max(expected, _SHORTEST)
        limit = _CLIP * self._spread
        residual = min(max(seconds / expected - 1, -limit), limit)
        self._spread = max(_SPREAD_AT_LEAST, self._spread + _BLEND * (abs(residual) - self._spread))
        self._drift += _BLEND * (residual - self._drift)
        self._undisturbed += 1
        if abs(self._drift) > _ONE_SIDED * self._spread and self._undisturbed >= _DISCOUNTED_AFTER:
            self._discount()
        return expected * (1 + residual)

    def _discount(self) -> None:
        """Reduce the weight of all steps so far; sizes without new steps keep a minimum."""
        for sums in self._bins:
            if sums[_LEFT] > _LEFT_AT_LEAST:
                sums[:] = [number * _DISCOUNT for number in sums]
        self._since = _SOLVE_SELDOM  # compute the coefficients at the end of this step
        self._undisturbed = 0

    def _solve(self) -> None:
        self._since = 0
        w, t, a, tt, ta, aa, y, ty, ay, _ = map(sum, zip(*self._bins, strict=True))
        if self._learned < _READY or w < _LIGHTEST:
            return
        # Scaled to a unit diagonal, so that penalties are shares.
        token, attended = (tt / w) ** 0.5 or 1.0, (aa / w) ** 0.5 or 1.0
        first, second, third = self._penalties
        matrix = (
            *(1 + first, t / w / token, a / w / attended),
            *(tt / w / token**2 + second, ta / w / token / attended),
            aa / w / attended**2 + third,
        )
        fixed, per_token, per_attended = _solution(
            matrix, (y / w, ty / w / token, ay / w / attended), may_save=self._has_floor
        )
        self.fixed, self.per_token, self.per_attended = fixed, per_token / token, per_attended / attended
        self.is_ready = True


def _size(tokens: int) -> int:
    """Return the index of a step's size; each size is up to four times the previous one."""
    return (tokens.bit_length() + 1) >> 1


def _solution(matrix: Matrix, right: Vector, *, may_save: bool) -> Vector:
    """Return the least-squares solution whose coefficients are not negative; the first may be, with ``may_save``."""
    best, explained = (0.0, 0.0, 0.0), 0.0
    for used in _SUBSETS:
        solution = _solved(matrix, right, used)
        if solution is None or solution[1] < 0 or solution[2] < 0 or (solution[0] < 0 and not may_save):
            continue
        if len(used) == len(solution):  # it explains more than any subset
            return solution
        gain = sum(x * y for x, y in zip(solution, right, strict=True))
        if gain > explained:
            best, explained = solution, gain
    return best


_SUBSETS: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
_PLACE = ((0, 1, 2), (1, 3, 4), (2, 4, 5))  # of row and column in a Matrix


def _solved(matrix: Matrix, right: Vector, used: Sequence[int]) -> Vector | None:
    """Solve for these coefficients, the others being 0, by Gaussian elimination; None if singular."""
    rows = [[matrix[_PLACE[i][j]] for j in used] + [right[i]] for i in used]
    n = len(rows)
    for i in range(n):
        pivot = rows[i][i]  # positive, and never small against its row: the matrix is positive definite
        if pivot <= 0:
            return None
        for k in range(i + 1, n):
            factor = rows[k][i] / pivot
            for j in range(i, n + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0, 0.0, 0.0]
    for i in reversed(range(n)):
        rest = sum(rows[i][j] * solution[used[j]] for j in range(i + 1, n))
        solution[used[i]] = (rows[i][n] - rest) / rows[i][i]
    return solution[0], solution[1], solution[2]
