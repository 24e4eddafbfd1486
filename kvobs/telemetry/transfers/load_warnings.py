"""Log what is wrong with a connector's loads: slow ones, late ranks, and synchronous ones that vLLM can't recompute."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from kvobs.log import line, log
from kvobs.schema.findings import Finding
from kvobs.state.events import Observer
from kvobs.state.transfers import Load

RECENT = 20  # loads that are looked at
MANY, FEW = 15, 5  # of these: the rule, and no longer
LATE_NS = 50_000_000  # by which a rank is late


class _Recent:
    """The last good loads of a connector."""

    def __init__(self) -> None:
        self.slow: deque[bool] = deque(maxlen=RECENT)
        self.late: deque[int | None] = deque(maxlen=RECENT)  # the rank that was late, if any
        self.has_been_slow = self.is_slow = False
        self.late_rank: int | None = None


class SlowLoads(Observer):
    """Logs slow loads and late ranks: at the first such load, and when it becomes the rule.

    ``slow_ns`` is the duration above which a load is slow.
    """

    def __init__(self, names: Sequence[str], slow_ns: int) -> None:
        self._slow_ns = slow_ns
        self._of = [(name, _Recent()) for name in names]

    def load_ended(self, request_id: str, load: Load) -> None:
        if load.failed or load.aborted:
            return
        name, recent = self._of[load.connector_index]
        slowest, is_slow = load.slowest, load.duration_ns > self._slow_ns
        late = slowest.rank if slowest is not None and slowest.skew_ns >= LATE_NS else None
        recent.slow.append(is_slow)
        recent.late.append(late)
        if is_slow and not recent.has_been_slow:
            recent.has_been_slow = True
            text = (
                "connector %r took %.3g s to load %d tokens of request %s, longer than slow_load_ms; further slow "
                "loads are only traced"
            )
            log.warning(text, name, load.duration_ns / 1e9, load.tokens, line(request_id))
        if is_slow or recent.is_slow:  # a good load changes no good verdict
            self._judge_slowness(name, recent)
        if late is not None or recent.late_rank is not None:
            self._judge_ranks(name, recent)

    def _judge_slowness(self, name: str, recent: _Recent) -> None:
        slow = sum(recent.slow)
        if not recent.is_slow and slow >= MANY:
            recent.is_slow = True
            log.warning(
                "connector %r is slow: %d of its last %d loads took longer than slow_load_ms", name, slow, RECENT
            )
        elif recent.is_slow and slow <= FEW:
            recent.is_slow = False
            log.info("connector %r is no longer slow", name)

    def _judge_ranks(self, name: str, recent: _Recent) -> None:
        ((rank, times),) = Counter(recent.late).most_common(1)
        if rank is not None and rank != recent.late_rank and times >= MANY:
            recent.late_rank = rank
            text = "rank %d is late: it finished last in %d of the last %d loads from connector %r, by %d ms or more"
            log.warning(text, rank, times, RECENT, name, LATE_NS // 10**6)
        elif recent.late_rank is not None and recent.late.count(recent.late_rank) <= FEW:
            log.info("rank %d is no longer late in loads from connector %r", recent.late_rank, name)
            recent.late_rank = None


class SyncLoadWarnings(Observer):
    """Logs each connector's warning once: a class does not always show before that it loads synchronously."""

    def __init__(self, warnings: Mapping[int, Finding]) -> None:
        self._warnings = dict(warnings)

    def admitted(self, request_id: str, load: Load) -> None:
        if not load.is_async and (warning := self._warnings.pop(load.connector_index, None)) is not None:
            log.warning("%s", warning)
