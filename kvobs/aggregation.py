"""What the workers say in one step, combined for the scheduler: vLLM's ``KVOutputAggregator``, rank by rank.

Stock counts down a number for each request: a rank that reports twice stands for two, and what never completes stays
for ever. Here a rank counts once; what stays open is told of, with the ranks that were not heard from, and forgotten.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.v1.executor import abstract as executors
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs import faults
from kvobs.notices import line, log, once
from kvobs.tallies import FORGET_AFTER, Reports, Rounds, Step, Tally
from kvobs.transfers import Stuck

_KNOWN_FIELDS = {
    "finished_sending", "finished_recving", "kv_connector_stats", "kv_cache_events", "kv_connector_worker_meta",
    "invalid_block_ids", "failed_recving", "expected_finished_count",
}  # fmt: skip
_HOST_FIELDS = {field.name for field in dataclasses.fields(KVConnectorOutput)}
_MISSING_FIELDS = _KNOWN_FIELDS - _HOST_FIELDS  # vLLM before 0.30 has no failed_recving
_HAS_FAILURES = "failed_recving" in _HOST_FIELDS


class Aggregation(NamedTuple):
    """How a connector wants its workers' outputs to be combined; its attribute ``aggregation``."""

    stuck_after_s: float
    on_stuck: Callable[[Stuck], None]


class KVOutputAggregator(stock.KVOutputAggregator):
    """Combines the outputs of all workers into the one that the scheduler sees."""

    _expected_finished_count: int

    def __init__(
        self,
        expected_finished_count: int,
        *,
        stuck_after_s: float = 60,
        on_stuck: Callable[[Stuck], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Expect this many reports of each load and save, as long as no worker says otherwise."""
        if not isinstance(expected_finished_count, int) or expected_finished_count < 1:
            raise ValueError(
                f"expected_finished_count is {expected_finished_count!r}: allowed is the number of ranks that report "
                "each load and save, 1 or more (get_finished_count() of the connector, or the world size)"
            )
        super().__init__(expected_finished_count)
        self._stuck_after_s = stuck_after_s
        self._on_stuck = on_stuck or _log_stuck
        self._clock = clock
        self._loads = Tally()
        self._saves = Tally()
        self._failures = Rounds()
        self._kept = _Combined()  # what has come in since the last result
        self._salvaged: list[KVConnectorOutput] = []
        self._salvaged_before = 0
        self._check_at = clock() + stuck_after_s

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> stock.KVOutputAggregator:
        """Build what the connector asks for: kvobs's aggregator, else vLLM's own."""
        aggregation = getattr(connector, "aggregation", None)
        if aggregation is None or unknown_fields():
            return stock.KVOutputAggregator.from_connector(connector, world_size)
        return cls(connector.get_finished_count() or world_size, **aggregation._asdict())

    def aggregate(self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0) -> ModelRunnerOutput | None:
        """Combine the ranks' outputs into that of ``output_rank``; where that is None, all of it waits for the next."""
        if not any(outputs):
            return None
        now = self._clock()
        self._hear(outputs, now)
        if now >= self._check_at:
            self._check(now)
        output = outputs[output_rank]
        if output is None:
            return None
        combined, self._kept = self._kept, _Combined()
        output.kv_connector_output = self._result(combined)
        return output

    def ft_defer_kv_connector_outputs(self, kv_connector_outputs: Sequence[KVConnectorOutput | None]) -> None:
        """Keep what failed workers had to say for the next ``aggregate``.

        Their events are dropped: replayed, they would count for one more worker than there are; a missed event only
        costs a cache miss.
        """
        for output in kv_connector_outputs:
            if output is not None:
                output.kv_cache_events = None
                self._salvaged.append(output)

    def _hear(self, outputs: Sequence[ModelRunnerOutput | None], now: float) -> None:
        """Take in what every worker says; how many reports are expected may change from one to the next."""
        said = [
            (rank, theirs)
            for rank, output in enumerate(outputs)
            if output is not None and (theirs := output.kv_connector_output) is not None
        ]
        if self._salvaged:
            said = [*self._take_salvaged(len(outputs)), *said]
        sent: list[tuple[int, set[str]]] = []
        received: list[tuple[int, set[str]]] = []
        step = Step(now, self._expected_finished_count, len(outputs))
        for rank, output in said:
            expected = output.expected_finished_count
            if expected > 0 and expected != step.expected:
                self._count(sent, received, step)
                sent, received = [], []
                self._expected_finished_count = expected
                step = step._replace(expected=expected)
            if output.finished_sending:
                sent.append((1 << rank, output.finished_sending))
            if output.finished_recving:
                received.append((1 << rank, output.finished_recving))
            if _HAS_FAILURES and output.failed_recving:
                for request in output.failed_recving:
                    self._failures.hear(request, 1 << rank, step)
                self._failures.trim(but=self._loads.open)
            self._kept.add(rank, output)
        self._count(sent, received, step)

    def _take_salvaged(self, ranks: int) -> list[tuple[int, KVConnectorOutput]]:
        """Return the failed workers' outputs, each with a number above the ranks that nobody else gets."""
        first = ranks + self._salvaged_before
        self._salvaged_before += len(self._salvaged)
        salvaged, self._salvaged = self._salvaged, []
        return list(enumerate(salvaged, first))

    def _count(self, sent: Reports, received: Reports, step: Step) -> None:
        if sent:
            self._kept.sent |= self._saves.hear(sent, step)
        if received:
            self._kept.received |= self._loads.hear(received, step)

    def _result(self, combined: _Combined) -> KVConnectorOutput:
        failed: set[str] = set()
        if self._failures:
            failed = {request for request in combined.received if self._failures.pop(request) is not None}
        fields = {
            "finished_sending": combined.sent or None,
            "finished_recving": combined.received or None,
            "kv_connector_stats": combined.stats,
            "kv_cache_events": combined.all_events(),
            "kv_connector_worker_meta": combined.meta,
            "invalid_block_ids": combined.invalid,
            "failed_recving": failed,
            "expected_finished_count": self._expected_finished_count,
        }
        for name in _MISSING_FIELDS:
            del fields[name]
        return KVConnectorOutput(**fields)

    def _check(self, now: float) -> None:
        """Tell of what is stuck, and forget what is older still or too much."""
        stuck_before = now - self._stuck_after_s
        forget_before = now - FORGET_AFTER * self._stuck_after_s
        loads = self._loads.open
        kinds: tuple[tuple[str, Rounds], ...] = (
            ("load", loads),
            ("save", self._saves.open),
            ("failure", self._failures),
        )
        for kind, rounds in kinds:
            for request, stuck in rounds.find_stuck(stuck_before):
                if kind != "failure" or request not in loads:
                    self._tell(Stuck(kind, request, stuck.missing))
        self._loads.forget(forget_before)
        self._saves.forget(forget_before)
        self._failures.forget(forget_before, but=loads)  # a load must not pass for a good one because it took long
        due = (rounds.next_stuck(self._stuck_after_s) for _, rounds in kinds)
        self._check_at = min((at for at in due if at is not None), default=now + self._stuck_after_s)

    def _tell(self, stuck: Stuck) -> None:
        try:
            self._on_stuck(stuck)
        except Exception:
            faults.contain("record")


class _Combined:
    """What the workers have said since the last result."""

    __slots__ = ("events", "invalid", "meta", "received", "sent", "stats")

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.invalid: set[int] = set()
        self.events: dict[int, Any] = {}  # by rank: an event counts once all ranks have had it
        self.stats: Any = None
        self.meta: Any = None

    def add(self, rank: int, output: KVConnectorOutput) -> None:
        """Take over what this worker has besides finished requests."""
        if (stats := output.kv_connector_stats) is not None:
            output.kv_connector_stats = None  # ours alone: who merges into it later must not find it elsewhere
            self._add_stats(stats)
        if (meta := output.kv_connector_worker_meta) is not None:
            self.meta = meta if self.meta is None else self.meta.aggregate(meta)
        if (events := output.kv_cache_events) is not None:
            if rank in self.events:
                self.events[rank].add_events(_events_of(events, self.events[rank]))
            else:
                self.events[rank] = events
        if output.invalid_block_ids:
            self.invalid |= output.invalid_block_ids

    def _add_stats(self, stats: Any) -> None:
        if self.stats is None:
            self.stats = stats
            return
        try:
            if not isinstance(self.stats, type(stats)):
                raise TypeError(
                    f"a worker's stats are a {type(stats).__name__}, the others' a {type(self.stats).__name__}"
                )
            self.stats = self.stats.aggregate(stats)
        except Exception:
            faults.contain("merge")

    def all_events(self) -> Any:
        """Return the ranks' events in one object, which knows how many ranks they are of."""
        combined = None
        for events in self.events.values():
            if combined is None:
                combined = events
            else:
                combined.add_events(_events_of(events, combined))
                combined.increment_workers(1)
        return combined


def unknown_fields() -> list[str]:
    """Return what vLLM's workers can say that kvobs would not pass on."""
    return sorted(_HOST_FIELDS - _KNOWN_FIELDS)


def install() -> None:
    """Put kvobs's aggregator where vLLM's executors look for theirs, unless this vLLM is not as it is known."""
    found = getattr(executors, "KVOutputAggregator", None)
    if found is KVOutputAggregator:
        return
    if found is None:
        _leave("vllm.v1.executor.abstract has no KVOutputAggregator")
    elif unknown := unknown_fields():
        _leave(f"its KVConnectorOutput has fields that kvobs does not know: {', '.join(unknown)}")
    else:
        executors.KVOutputAggregator = KVOutputAggregator


def _leave(reason: str) -> None:
    once("aggregation", logging.WARNING, "vLLM's own KVOutputAggregator stays in place: %s", reason)


def _events_of(events: Any, others: Any) -> Any:
    if not isinstance(others, type(events)):
        raise TypeError(
            f"a worker's KV cache events are a {type(events).__name__}, another's a {type(others).__name__}: "
            "all workers must run the same connectors"
        )
    return events.get_all_events()


def _log_stuck(stuck: Stuck) -> None:
    missing = f"; not heard from: rank {', '.join(map(str, stuck.missing))}" if stuck.missing else ""
    request = line(stuck.request)
    log.warning("the %s of request '%s' is not reported by every rank that should%s", stuck.kind, request, missing)
