"""When numbers travel: often enough to be seen, seldom enough to cost nothing, and never left behind in an idle engine.

The scheduler decides for all ranks, through a flag in the metadata. Once an engine idles nobody is called any more, so
the last steps of a burst must take everything with them:

    every 100 ms of work
    in a step without tokens that hands on finished requests: vLLM runs one after the last request of a burst
    in a step without tokens in which a worker has something to report: a transfer that ended while nothing else runs
"""

from dataclasses import dataclass
from enum import IntEnum

EVERY_NS = 100_000_000


class Flush(IntEnum):
    """What the scheduler says about a step; travels in the connector's metadata."""

    NO = 0
    IF_REPORTING = 1  # a step without tokens: a worker that has something to report flushes
    YES = 2

    def is_due(self, *, is_reporting: bool) -> bool:
        """Return whether a worker flushes in this step."""
        return self is Flush.YES or (self is Flush.IF_REPORTING and is_reporting)


@dataclass(slots=True)
class FlushRule:
    """The scheduler's decision, step by step."""

    last_ns: int = -EVERY_NS

    def decide(self, now_ns: int, *, tokens: int, finished: bool) -> Flush:
        """Return what holds for the step that is being built.

        Args:
            now_ns: a monotonic time.
            tokens: how many are scheduled in the step.
            finished: whether the step tells the workers of finished requests.
        """
        if now_ns - self.last_ns >= EVERY_NS or (not tokens and finished):
            self.last_ns = now_ns
            return Flush.YES
        return Flush.NO if tokens else Flush.IF_REPORTING
