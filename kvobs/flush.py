"""When numbers travel: often enough to be seen, seldom enough to cost nothing, and never left behind in an idle engine.

The scheduler decides for all ranks, through a flag in the metadata. Once an engine idles nobody is called any more, so
the last steps of a burst must take everything with them:

    every 100 ms of work
    in a step without a forward that hands on finished requests: vLLM runs one after the last request of a burst
    in a step without a forward in which a worker has something to report, as the worker sees itself: a transfer that
    ended while nothing else runs; not a load whose request goes on with a forward

The 100 ms count from where the work goes on after such a step: with everything told, however long ago, the next
request's first token need not wait for a flush.
"""

from dataclasses import dataclass

EVERY_NS = 100_000_000


@dataclass(slots=True)
class FlushRule:
    """The scheduler's decision, step by step."""

    last_ns: int = -EVERY_NS
    is_told: bool = False
    """Whether all is told that happened before the step that is built next."""
    has_forward: bool = False
    """Whether the step that was built last has one."""

    def decide(self, now_ns: int, *, has_forward: bool, has_finished: bool) -> bool:
        """Return whether all ranks flush in the step that is being built.

        Args:
            now_ns: a monotonic time.
            has_forward: whether tokens are scheduled in it.
            has_finished: whether it tells the workers of finished requests.
        """
        if self.is_told:
            self.last_ns = now_ns
        is_due = now_ns - self.last_ns >= EVERY_NS or (has_finished and not has_forward)
        if is_due:
            self.last_ns = now_ns
        # A forward may itself take longer than 100 ms: what it says is told by the step after it.
        self.is_told = is_due and not has_forward
        self.has_forward = has_forward
        return is_due

    def told(self) -> None:
        """Take note that numbers came from the workers, which may have decided it themselves."""
        self.is_told = not self.has_forward
