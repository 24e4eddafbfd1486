"""Estimate the cost of computing tokens from the engine's steps.

A step's time is the sum of two linear costs, each estimated separately:

    decodes    fixed, per token, and per token of context, whose KV cache they read (bound by memory)
    prefills   per token, and per pair of tokens of which one attends to the other (bound by arithmetic)

Until there are steps with decodes only, the fixed cost counts as part of the prefills. A step takes at least as long as
reading the weights, however few its tokens are: the cost of prefills has a floor.
"""

from typing import TypeAlias

from kvobs.telemetry.estimates.linear_cost import LinearCost

_SKIPPED = 8  # first steps, in which kernels are compiled, graphs captured and caches filled
_BLEND = 1 / 16  # weight of the last step in running means
_ENOUGH = 4  # a prefill is predicted up to this multiple of the largest one that was observed

Work: TypeAlias = tuple[int, int, int, int]
"""The work of a step: the arguments of ``ComputeCost.observe`` after the seconds."""


class ComputeCost:
    """The running estimate of a prefill's duration in this engine, among its present decodes.

    ``budget`` is the most tokens of one request that a step computes.
    """

    __slots__ = (
        *("_budget", "_context", "_decode", "_decodes", "_prefill", "_steps"),
        *("checked_s", "prefills"),
    )

    def __init__(self, budget: int) -> None:
        self._budget = max(1, budget)
        self._decode = LinearCost((1e-7, 1e-4, 1e-5))
        self._prefill = LinearCost((1e-4, 1e-7, 1e-5), has_floor=True)
        self._steps = 0
        self.prefills = 0  # steps with prefills that were learned from
        self._decodes = self._context = 0.0  # running means: tokens of decodes, and their context
        self.checked_s = 0.0  # duration of the steps that had an estimate before

    def observe(self, seconds: float, tokens: int, pairs: int, decodes: int, context: int) -> None:
        """Take in a step.

        It has ``tokens`` of prefills, which attend to ``pairs`` tokens in total, and ``decodes`` tokens of decodes,
        which attend to ``context`` tokens in total, counted once for each request.
        """
        self._decodes += _BLEND * (decodes - self._decodes)
        self._context += _BLEND * (context - self._context)
        self._steps += 1
        if self._steps <= _SKIPPED or seconds <= 0 or not (tokens or decodes):
            return
        cost = self._prefill if tokens else self._decode
        if cost.is_ready:
            self.checked_s += seconds
        if tokens:
            cost.learn(tokens, pairs, seconds, self._decode.expect(decodes, context))
            self.prefills += 1
        else:
            cost.learn(decodes, context, seconds)

    def predict(self, tokens: int, context: int = 0) -> float | None:
        """Return the seconds from a prefill's first step to the end of its last one; None if that is not known yet.

        More ``tokens`` than a step may compute are split into chunks; ``context`` are before them.
        """
        prefill = self._prefill
        chunk = max(1, self._budget - round(self._decodes))
        if not prefill.is_ready or min(tokens, chunk) > _ENOUGH * prefill.largest:
            return None
        steps, last = divmod(tokens, chunk)
        if not (self._decode.is_ready or prefill.knows(last or chunk)):
            return None  # the time of the shortest step is unknown
        base = self._decode.expect(self._decodes, self._context)
        seconds = 0.0
        if steps:
            whole = steps * chunk  # the cost is linear: each full chunk may count with the mean of the pairs
            pairs = whole * context + whole * (whole + 1) / 2
            seconds = steps * (base + prefill.expect(chunk, pairs / steps))
        if last:
            before = context + steps * chunk
            seconds += base + prefill.expect(last, last * before + last * (last + 1) / 2)
        return seconds

    def saved(self, tokens: int, context: int, rest: int) -> float | None:
        """Return the seconds that computing loaded tokens would have taken; None if that is not known yet.

        ``context`` are the tokens before them, ``rest`` those after them, which are computed in either case.
        """
        all_of_it, remaining = self.predict(tokens + rest, context), self.predict(rest, context + tokens)
        return None if all_of_it is None or remaining is None else max(0.0, all_of_it - remaining)
