"""Weigh each load: the seconds that computing its tokens would have taken, against those that its request waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvobs.faults import contain, contained
from kvobs.prediction.compute_cost import ComputeCost, StepTimes, Work
from kvobs.routing.step_work import work_of
from kvobs.schema import signals
from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import Gain, Load
from kvobs.telemetry.recording.recorder import Recorder, wall_ns

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_LEARNED_FROM = 64  # steps at the latest; usually those of a flush
_STEPS = {kind: signals.slot(signals.STEP_SECONDS, kind) for kind in signals.STEP_SECONDS.labels["kind"]}
_ERRORS = {kind: signals.slot(signals.STEP_ESTIMATE_ERROR, kind) for kind in signals.STEP_ESTIMATE_ERROR.labels["kind"]}


class StepLimits(NamedTuple):
    """Limits of a step: the most tokens of one request that it computes, and the most steps in flight."""

    chunk: int
    in_flight: int

    @classmethod
    def of(cls, vllm_config: Any) -> StepLimits:
        """Read vLLM's configuration."""
        scheduling = vllm_config.scheduler_config
        chunks = (scheduling.max_num_batched_tokens, getattr(scheduling, "long_prefill_token_threshold", 0))
        return cls(min(tokens for tokens in chunks if tokens), getattr(vllm_config, "max_concurrent_batches", 1))


class Gains(TransferListener):
    """Learns the cost of computing from the steps, and announces the gain of each load.

    An async load is weighed when vLLM allocates its request again, for the step that resumes it; a sync load and a
    failed one when they end. Loads of requests that have ended are not weighed.

    Args:
        recorder: receives how good the estimate is.
        listener: receives ``load_weighed``.
        limits: of the engine's steps.
    """

    def __init__(self, recorder: Recorder, listener: TransferListener, limits: StepLimits) -> None:
        self._recorder = recorder
        self._listener = listener
        self._cost = ComputeCost(limits.chunk)
        self._times = StepTimes(limits.in_flight)
        self._ended: list[tuple[int, Work]] = []  # steps that are not learned from yet
        self._resuming: dict[str, tuple[Load, int]] = {}  # requests whose load is in -> the load, when it ended

    def __len__(self) -> int:
        return len(self._resuming)

    # Steps

    def step_begun(self, output: SchedulerOutput, now_ns: int, *, loads: bool) -> None:
        """Note a step that is scheduled. Nothing is learned from one that ``loads`` within it."""
        try:  # `contained` would cost a call more, twice a step
            self._times.steps.append((now_ns, None if loads else work_of(output)))
        except Exception:
            contain("record")

    def step_ended(self) -> None:
        """Note the step whose output has come."""
        try:
            if (ended := self._times.end(wall_ns())) is not None:
                self._ended.append(ended)
                if len(self._ended) >= _LEARNED_FROM:
                    self._learn()
        except Exception:
            contain("record")

    @property
    def cost(self) -> ComputeCost:
        """The cost of computing, learned from all finished steps."""
        self._learn()
        return self._cost

    def _learn(self) -> None:
        """Learn from many steps at once: one in each step costs four times as much, since its code is cold by then."""
        ended, self._ended = self._ended, []
        for spent_ns, work in ended:
            self._cost.observe(spent_ns / 1e9, *work[:4], prefills=work[4])

    @contained("record")
    def flush(self) -> None:
        """Record how good the estimate was since the last time."""
        cost = self.cost
        for kind, errors in (("prefill", cost.prefill_errors), ("decode", cost.decode_errors)):
            observed_s, error_s = errors.take()
            self._recorder.count_own(_STEPS[kind], int(observed_s * 1e9))
            self._recorder.count_own(_ERRORS[kind], int(error_s * 1e9))

    # Loads

    @contained("record")
    def load_ended(self, request_id: str, load: Load) -> None:
        if load.aborted:
            return
        now_ns = wall_ns()
        if load.is_async and not load.failed:
            self._resuming[request_id] = load, now_ns
            return
        waited_ns = now_ns - load.opened_ns if load.is_async else load.duration_ns
        self._listener.load_weighed(request_id, load, Gain(self._saved_ns(load), max(0, waited_ns)))

    @contained("record")
    def allocated(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None:
        """Weigh the load of a request that is scheduled again."""
        if (resumed := self._resuming.pop(request_id, None)) is None:
            return
        load, ended_ns = resumed
        now_ns = wall_ns()
        gain = Gain(self._saved_ns(load), max(0, now_ns - load.opened_ns), max(0, now_ns - ended_ns))
        self._listener.load_weighed(request_id, load, gain)

    @contained("record")
    def request_ended(self, request_id: str) -> None:
        self._resuming.pop(request_id, None)

    def _saved_ns(self, load: Load) -> int | None:
        lost = load.recomputed_tokens if load.failed else 0
        if lost >= load.tokens:
            return 0
        saved_s = self.cost.saved(load.tokens - lost, load.local_tokens, load.rest_tokens + lost)
        return None if saved_s is None else int(saved_s * 1e9)
