"""Combine the workers' outputs of one step for the scheduler: a replacement of vLLM's ``KVOutputAggregator``.

vLLM counts reports: a duplicate counts twice, and an incomplete transfer is never forgotten. This class counts ranks:
a duplicate has no effect, and an incomplete transfer is logged with its missing ranks, then forgotten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as StockAggregator
from vllm.v1.executor import abstract as executors
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs import faults
from kvobs.aggregation.rank_tally import FORGET_AFTER, MOST, Reports, Rounds, RoundStart, Tally
from kvobs.log import once
from kvobs.state.transfers import Stuck
from kvobs.vllm_api import versions

_MISSING_FIELDS = versions.OUTPUT_FIELDS - versions.output_fields()
_HAS_FAILURES = "failed_recving" not in _MISSING_FIELDS
_HAS_CHECKPOINTS = "prefix_replay_checkpoints" not in _MISSING_FIELDS


class Aggregation(NamedTuple):
    """A connector's choice of aggregator (its attribute ``aggregation``)."""

    stuck_after_s: float
    on_stuck: Callable[[Stuck], None]


class KVOutputAggregator(StockAggregator):
    """Combine the outputs of all workers into the scheduler's."""

    _expected_finished_count: int

    def __init__(
        self,
        expected_finished_count: int,
        *,
        stuck_after_s: float = 60,
        on_stuck: Callable[[Stuck], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the expected number of reports per load and save; a worker's output may change it."""
        super().__init__(expected_finished_count)
        self._stuck_after_s = stuck_after_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._loads = Tally()
        self._saves = Tally()
        self._failures = Rounds()
        self._checkpoints: dict[str, dict[int, Any]] = {}  # of prefix replays: request -> reporter's bit -> its value
        self._kept = _Combined()  # outputs since the last result
        self._salvaged_outputs: list[KVConnectorOutput] = []
        self._salvaged_before = 0
        self._check_at = clock() + stuck_after_s

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> StockAggregator:
        """Build the aggregator that the connector chooses: kvobs's or vLLM's."""
        aggregation = getattr(connector, "aggregation", None)
        if aggregation is None or obstacle() is not None:
            return StockAggregator.from_connector(connector, world_size)
        return cls(connector.get_finished_count() or world_size, **aggregation._asdict())

    def aggregate(self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0) -> ModelRunnerOutput | None:
        """Combine the ranks' outputs into that of ``output_rank``; if that is None, all of it waits for the next."""
        if not any(outputs):
            return None
        now = self._clock()
        self._read_outputs(outputs, now)
        if now >= self._check_at:
            self._check(now)
        output = outputs[output_rank]
        if output is None:
            return None
        combined, self._kept = self._kept, _Combined()
        output.kv_connector_output = self._result(combined)
        return output

    def ft_defer_kv_connector_outputs(self, kv_connector_outputs: Sequence[KVConnectorOutput | None]) -> None:
        """Keep the outputs of failed workers for the next ``aggregate``.

        Their events are dropped: replayed, they would count for one more worker than there are; a missed event only
        costs a cache miss.
        """
        for output in kv_connector_outputs:
            if output is not None:
                output.kv_cache_events = None
                self._salvaged_outputs.append(output)

    def _read_outputs(self, outputs: Sequence[ModelRunnerOutput | None], now: float) -> None:
        """Merge every worker's output; the expected number of reports may change with each of them."""
        reports = [
            (rank, report)
            for rank, output in enumerate(outputs)
            if output is not None and (report := output.kv_connector_output) is not None
        ]
        if salvaged := self._salvaged_outputs:  # each has a unique reporter number above the ranks
            reports = [*enumerate(salvaged, len(outputs) + self._salvaged_before), *reports]
            self._salvaged_before += len(salvaged)
            self._salvaged_outputs = []
        sent: list[tuple[int, set[str]]] = []
        received: list[tuple[int, set[str]]] = []
        step = RoundStart(now, self._expected_finished_count, len(outputs))
        for rank, output in reports:
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
                    self._failures.count(request, 1 << rank, step)
                self._failures.trim(but=self._loads.open)
            if _HAS_CHECKPOINTS and output.prefix_replay_checkpoints:
                self._note_checkpoints(1 << rank, output.prefix_replay_checkpoints)
            self._kept.add(rank, output)
        if sent or received:
            self._count(sent, received, step)

    def _note_checkpoints(self, reporter: int, checkpoints: Mapping[str, Any]) -> None:
        """Keep a rank's checkpoints until their requests are received on every expected rank."""
        for request, checkpoint in checkpoints.items():
            self._checkpoints.setdefault(request, {})[reporter] = checkpoint
        while len(self._checkpoints) > MOST:
            del self._checkpoints[next(iter(self._checkpoints))]

    def _certified(self, received: Iterable[str]) -> dict[str, Any]:
        """Return the checkpoints of received requests on which every expected rank agrees, and forget all of theirs."""
        certified = {}
        for request in received:
            first, *others = [*self._checkpoints.pop(request, {}).values()] or [None]
            if first is not None and len(others) + 1 >= self._expected_finished_count:
                certified.update({request: first} if all(other == first for other in others) else {})
        return certified

    def _count(self, sent: Reports, received: Reports, step: RoundStart) -> None:
        self._kept.sent |= self._saves.count(sent, step)
        self._kept.received |= self._loads.count(received, step)

    def _result(self, combined: _Combined) -> KVConnectorOutput:
        failed = combined.received & self._failures.keys()
        for request in failed:
            del self._failures[request]
        fields = {
            "finished_sending": combined.sent or None,
            "finished_recving": combined.received or None,
            "kv_connector_stats": combined.stats,
            "kv_cache_events": combined.all_events() if combined.events else None,
            "kv_connector_worker_meta": combined.meta,
            "invalid_block_ids": combined.invalid,
            "failed_recving": failed,
            "prefix_replay_checkpoints": self._certified(combined.received) if self._checkpoints else {},
            "expected_finished_count": self._expected_finished_count,
        }
        for name in _MISSING_FIELDS:
            del fields[name]
        return KVConnectorOutput(**fields)

    def _check(self, now: float) -> None:
        """Report stuck transfers; forget those that are too old or too many."""
        stuck_before = now - self._stuck_after_s
        forget_before = now - FORGET_AFTER * self._stuck_after_s
        loads = self._loads.open
        kinds = (("load", loads), ("save", self._saves.open), ("failure", self._failures))
        for kind, rounds in kinds:
            for request, stuck in rounds.find_stuck(stuck_before):
                if kind != "failure" or request not in loads:
                    self._report_stuck(Stuck(kind, request, stuck.missing))
        self._loads.forget(forget_before)
        self._saves.forget(forget_before)
        # A failed load must not count as successful because its reports came late.
        self._failures.forget(forget_before, but=loads)
        due = (rounds.next_stuck(self._stuck_after_s) for _, rounds in kinds)
        self._check_at = min((at for at in due if at is not None), default=now + self._stuck_after_s)

    @faults.contained("record")
    def _report_stuck(self, stuck: Stuck) -> None:
        self._on_stuck(stuck)


class _Combined:
    """The workers' outputs since the last result."""

    __slots__ = ("events", "invalid", "meta", "received", "sent", "stats")

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.invalid: set[int] = set()
        self.events: dict[int, Any] = {}  # by rank: an event counts once all ranks have had it
        self.stats: Any = None
        self.meta: Any = None

    def add(self, rank: int, output: KVConnectorOutput) -> None:
        """Merge everything of this worker's output except finished requests."""
        if (stats := output.kv_connector_stats) is not None:
            output.kv_connector_stats = None  # a copy: later merges change it in place
            self._add_stats(stats)
        if (meta := output.kv_connector_worker_meta) is not None:
            self.meta = meta if self.meta is None else self.meta.aggregate(meta)
        if (events := output.kv_cache_events) is not None:
            mine = self.events.setdefault(rank, events)
            if hasattr(mine, "add_of_same_rank"):  # its `add_events` counts a further rank
                mine.add_of_same_rank(events)
            elif mine is not events:
                mine.add_events(events.get_all_events())
        if output.invalid_block_ids:
            self.invalid |= output.invalid_block_ids

    @faults.contained("merge")
    def _add_stats(self, stats: Any) -> None:
        self.stats = stats if self.stats is None else self.stats.aggregate(stats)

    def all_events(self) -> Any:
        """Return the events of all ranks, at least one, in one object, with the number of ranks."""
        combined, *others = self.events.values()
        for events in others:
            combined.add_events(events.get_all_events())
            combined.increment_workers(1)
        return combined


def obstacle() -> str | None:
    """Return why kvobs's aggregator can't replace this vLLM's; None if it can."""
    for what, unknown in (
        ("its KVConnectorOutput has fields", versions.unknown_output_fields()),
        ("it has members", versions.unknown_aggregator_members(StockAggregator)),
        ("its methods have parameters", versions.unknown_aggregator_parameters(StockAggregator, KVOutputAggregator)),
    ):
        if unknown:
            return f"{what} that kvobs does not know: {', '.join(unknown)}"
    return None


def install() -> None:
    """Replace the aggregator that vLLM's executors use, unless this vLLM's differs from the known ones."""
    present = getattr(executors, "KVOutputAggregator", None)
    if present is KVOutputAggregator:
        return
    if present is StockAggregator:
        reason = obstacle()
    elif present is None:
        reason = "vllm.v1.executor.abstract has no KVOutputAggregator"
    else:
        reason = f"vllm.v1.executor.abstract has a different one, {present.__module__}.{present.__qualname__}"
    if reason is None:
        executors.KVOutputAggregator = KVOutputAggregator
        return
    once(
        "aggregation", logging.WARNING, "vLLM's KVOutputAggregator stays in use instead of kvobs's, because %s", reason
    )
