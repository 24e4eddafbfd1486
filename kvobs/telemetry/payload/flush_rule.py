"""Decide in which steps the workers send their numbers.

The scheduler decides for all ranks, through a flag in the metadata. An idle engine has no steps, so the last steps of a
burst must send everything. Numbers are sent:

    every 100 ms of work
    in a step without a forward that passes on finished requests: vLLM runs one after the last request of a burst
    in a step without a forward in which a worker has something to report (the worker decides): a transfer that ended
    while nothing else runs; not a load whose request continues with a forward

After such a step the 100 ms start anew with the next work, so that the next request's first token does not wait for a
flush.
"""

from dataclasses import dataclass

EVERY_NS = 100_000_000


@dataclass(slots=True)
class FlushRule:
    """The scheduler's decision for each step."""

    last_ns: int = -EVERY_NS
    is_flushed: bool = False
    """Whether everything before the next step has been sent."""
    has_forward: bool = False
    """Whether the last built step has a forward."""

    def decide(self, now_ns: int, *, has_forward: bool, has_finished: bool) -> bool:
        """Return whether all ranks flush in the step that is being built.

        Args:
            now_ns: a monotonic time.
            has_forward: whether tokens are scheduled in it.
            has_finished: whether it passes finished requests to the workers.
        """
        if self.is_flushed:
            self.last_ns = now_ns
        is_due = now_ns - self.last_ns >= EVERY_NS or (has_finished and not has_forward)
        if is_due:
            self.last_ns = now_ns
        # A forward may itself take longer than 100 ms: its numbers are sent by the step after it.
        self.is_flushed = is_due and not has_forward
        self.has_forward = has_forward
        return is_due

    def flushed(self) -> None:
        """Note that the workers sent numbers, possibly by their own decision."""
        self.is_flushed = not self.has_forward
