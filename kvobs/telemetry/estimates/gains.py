"""Weigh each load: the seconds that computing its tokens would have taken, against those that its request waited."""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from kvobs.clock import wall_ns
from kvobs.faults import contain, contained
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.transfers import Gain, Load, LookupResult
from kvobs.telemetry.estimates.compute_cost import ComputeCost, Work
from kvobs.telemetry.events import TelemetryObserver

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_TOKENS_PER_DECODE = 16  # at most, with speculative decoding
_LEARNED_FROM = 512  # steps at the latest; usually the steps of two seconds
_DECODES = 4  # steps that only decode: of more, which are much alike, a few are learned from
_STEPS = signals.slot(signals.STEP_SECONDS)
_PREFILLS = signals.slot(signals.ESTIMATE_PREFILLS)


def step_limits(vllm_config: Any) -> tuple[int, int]:
    """Return the most tokens of one request that a step computes, and the most steps in flight."""
    scheduling = vllm_config.scheduler_config
    chunks = (scheduling.max_num_batched_tokens, getattr(scheduling, "long_prefill_token_threshold", 0))
    return min(filter(None, chunks)), getattr(vllm_config, "max_concurrent_batches", 1)


class Gains(Observer):
    """Learns the cost of computing from the steps, and announces the gain of each load.

    An async load is weighed when vLLM allocates its request again, for the step that resumes it; a sync load and a
    failed one when they end. Loads of requests that have ended are not weighed.

    ``recorder`` receives how much the estimate has seen, ``listener`` ``load_weighed``; ``chunk`` and ``in_flight`` are
    the ``step_limits``.
    """

    def __init__(self, recorder: Recorder, listener: TelemetryObserver, chunk: int, in_flight: int) -> None:
        self._recorder = recorder
        self._listener = listener
        self._cost = ComputeCost(chunk)
        self._times = StepTimes(in_flight)
        self._ended: list[tuple[int, Work]] = []  # steps that are not learned from yet
        self._learn_from = _LEARNED_FROM  # this many of them
        self._prefills = self._step_ns = 0  # those that are recorded
        self._resuming: dict[str, tuple[Load, int]] = {}  # requests whose load is in -> the load, when it ended

    def __len__(self) -> int:
        return len(self._resuming)

    def step_begun(self, output: SchedulerOutput, now_ns: int, *, loads: bool) -> None:
        """Note a step that is scheduled at a monotonic time. Nothing is learned from one that ``loads`` within it."""
        try:  # `contained` would cost a call more, twice a step
            self._times.steps.append((now_ns, None if loads else work_of(output)))
        except Exception:
            contain("record")

    def step_ended(self) -> None:
        """Note the step whose output has come."""
        try:
            if (ended := self._times.end(perf_counter_ns())) is not None:
                self._ended.append(ended)
                if len(self._ended) >= self._learn_from:
                    self._learn()
        except Exception:
            contain("record")

    def _learn(self) -> None:
        """Learn from many steps at once: one in each step costs four times as much, since its code is cold by then."""
        ended, self._ended = self._ended, []
        self._learn_from = _LEARNED_FROM
        every = len(ended) // _DECODES + 1
        for number, (spent_ns, work) in enumerate(ended):
            if work[0] or not number % every:
                self._cost.observe(spent_ns / 1e9, *work)

    @contained("record")
    def look(self, *, goes_on: bool = False) -> None:
        """Record how much more the estimate has seen; if the engine ``goes_on``, the next step learns."""
        self._learn_from = 0
        if not goes_on:
            self._learn()
        if new := self._cost.prefills - self._prefills:
            self._prefills += new
            self._recorder.count(None, _PREFILLS, new)
        if new := int(self._cost.checked_s * 1e9) - self._step_ns:
            self._step_ns += new
            self._recorder.count(None, _STEPS, new)

    def load_ended(self, request_id: str, load: Load) -> None:
        if load.aborted:
            return
        now_ns = wall_ns()
        if load.is_async and not load.failed:
            self._resuming[request_id] = load, now_ns
            return
        waited_ns = now_ns - load.opened_ns if load.is_async else load.duration_ns
        self._listener.load_weighed(
            request_id, load, Gain(self._saved_ns(load), max(0, waited_ns), None, self._cost.prefills)
        )

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Weigh the load of a request that is scheduled again."""
        request_id = request.request_id
        if (resumed := self._resuming.pop(request_id, None)) is None:
            return
        load, ended_ns = resumed
        now_ns = wall_ns()
        waited_ns, resume_ns = max(0, now_ns - load.opened_ns), max(0, now_ns - ended_ns)
        gain = Gain(self._saved_ns(load), waited_ns, resume_ns, self._cost.prefills)
        self._listener.load_weighed(request_id, load, gain)

    def request_ended(self, request: ObservedRequest) -> None:
        self._resuming.pop(request.request_id, None)

    def _saved_ns(self, load: Load) -> int | None:
        lost = load.recomputed_tokens if load.failed else 0
        if lost >= load.tokens:
            return 0
        self._learn()
        saved_s = self._cost.saved(load.tokens - lost, load.local_tokens, load.rest_tokens + lost)
        return None if saved_s is None else int(saved_s * 1e9)


class StepTimes:
    """The steps in flight.

    A step's time is that from the previous output, or from its own scheduling if that came later, to its output: an
    idle engine's pause belongs to no step. With async scheduling and with pipeline parallelism, where the next step is
    scheduled before an output comes, it is the time from output to output: the cost of one more step, not its latency.

    Outputs come in the order of the steps. If one is lost, as by an exception in vLLM, the number of steps that can be
    in flight, ``in_flight``, limits how long the others are assigned wrongly.
    """

    def __init__(self, in_flight: int) -> None:
        # When each step in flight was scheduled, and its work; None if nothing is to be learned from it.
        self.steps: deque[tuple[int, Work | None]] = deque(maxlen=max(1, in_flight))
        self._last_ns = 0

    def end(self, now_ns: int) -> tuple[int, Work] | None:
        """Return the time in ns and the work of the step whose output has come; None if there is nothing to learn."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if not self.steps:
            return None
        began_ns, work = self.steps.popleft()
        return None if work is None else (now_ns - max(began_ns, last_ns), work)


def work_of(output: SchedulerOutput) -> Work | None:
    """Return the work of a step; None without work, or with an encoder's input or recomputation after a preemption.

    Both cost more than their tokens, and vLLM lists the recomputation like a decode. A prefill is a request without
    output tokens. Decodes, up to hundreds, are counted and not visited: a prefill with one token left is counted as a
    decode.
    """
    total = output.total_num_scheduled_tokens
    if not total or output.scheduled_encoder_inputs:
        return None
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    if not output.scheduled_new_reqs and total == len(cached.num_output_tokens):  # most steps take this path
        return 0, 0, total, sum(cached.num_computed_tokens)
    tokens = pairs = 0
    for new in output.scheduled_new_reqs:
        n = scheduled[new.req_id]
        tokens += n
        pairs += _pairs(n, new.num_computed_tokens)
    before, outputs = cached.num_computed_tokens, cached.num_output_tokens
    context, decoding, at = sum(before), len(outputs), -1
    for _ in range(0 if all(outputs) else outputs.count(0)):
        at = outputs.index(0, at + 1)
        n = scheduled[cached.req_ids[at]]
        tokens += n
        pairs += _pairs(n, before[at])
        context -= before[at]
        decoding -= 1
    decodes = total - tokens
    return None if decodes > _TOKENS_PER_DECODE * decoding else (tokens, pairs, decodes, context)


def _pairs(tokens: int, before: int) -> int:
    """Return how many tokens each token of a prefill attends to, added up."""
    return tokens * before + tokens * (tokens + 1) // 2
