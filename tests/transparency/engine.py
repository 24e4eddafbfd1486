"""Live one life in vLLM's real scheduler, with vLLM's MultiConnector or with kvobs's."""

import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request

from tests.support.rig import assert_nothing_is_left
from tests.support.runners import ATTENTION, LAYERS, TOKEN, Overlapping
from tests.transparency.connectors import CLASSES, STAGES, ConnectorError, Stage
from tests.transparency.life import PLAIN, Life, Plan
from tests.transparency.record import VLLM, Run, counted

STEPS = 220
"""A life is over by then, or hangs."""

ANSWERS = (
    *("get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"),
    *("take_events", "has_pending_block_frees", "has_pending_push_work", "reset_cache"),
)
"""Hooks of the scheduler's side whose answers vLLM acts on: they are compared, besides what follows from them."""

_numbers = itertools.count()


def live(life: Life, router: str, **options: Any) -> Run:
    """Live ``life`` to its end and return what was recorded; what ends the engine is recorded, too."""
    run = Run(router)
    tag = f"stage {next(_numbers)}"
    STAGES[tag] = stage = Stage(life, run)
    try:
        Engine(stage, tag, router, options).live()
    except Exception as error:
        run.error = "".join(traceback.format_exception(error)[-3:])
        run.raised = str(error) if type(error) is ConnectorError else None
    finally:
        del STAGES[tag]
        run.forget()
    return run


class InOrder(set[str]):
    """A set that is read in the order of its names."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def entries_of(life: Life, tag: str) -> list[dict[str, Any]]:
    """Return the entries of ``connectors`` for a life's connectors on the stage of this tag."""
    return [
        {
            "kv_connector": CLASSES[character.shape],
            "kv_connector_module_path": "tests.transparency.connectors",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"stage": tag, "connector": index},
        }
        for index, character in enumerate(life.connectors)
    ]


class Engine(Overlapping):
    """An engine to which happens, step by step, what a life and its plans say."""

    def __init__(
        self, stage: Stage, tag: str, router: str, options: dict[str, Any], at_once: Callable[[], bool] = lambda: True
    ) -> None:
        self._stage, self._life, self._run = stage, stage.life, stage.run
        life = self._life
        self._forwards: Counter[Any] = Counter()  # by worker
        super().__init__(
            router,
            connectors=entries_of(life, tag),
            kvobs=options or None,
            running=life.running,
            at_once=at_once,
            blocks=life.blocks,
            groups=life.groups,
            policy=life.policy,
            context_parallel=life.dcp,
            hybrid=all(connector.shape != PLAIN for connector in life.connectors),
        )
        self._names: set[str] = set()
        self._inputs: list[tuple[int, Plan, Request]] = []  # when they come, to which request
        self.plan(life.plans)

    def plan(self, plans: Sequence[Plan]) -> None:
        """Let these requests come, and no others any more."""
        self._plans, self.to_come = plans, sorted(plans, key=lambda plan: plan.arrives)

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        caches = super()._caches(blocks, groups)
        if self._life.slides:
            _make_slide(caches.kv_cache_groups[-1])
        return caches

    def _configure(self, config: Any) -> None:
        super()._configure(config)
        life, scheduler = self._life, config.scheduler_config
        scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens = life.budget, None
        scheduler.max_num_seqs, scheduler.enable_chunked_prefill = life.most_running, True
        scheduler.policy = "priority" if life.by_priority else "fcfs"

    def _offer_tails(self) -> None:
        """Let this vLLM offer a partial tail at the end of a request; the tiny model's cache has none by itself."""
        manager = self.scheduler.kv_cache_manager
        if hasattr(manager, "finalize_partial_tail_offloads") and any(c.tails for c in self._life.connectors):
            manager.finalize_partial_tail_offloads = lambda request: [(0, 1, 1)] if request.num_computed_tokens else []

    def _note_answers(self) -> None:
        """Note what vLLM is answered."""
        for hook in ANSWERS:
            if hasattr(self.connector, hook):
                setattr(self.connector, hook, functools.partial(self._asked, hook, getattr(self.connector, hook)))

    def _asked(self, hook: str, ask: Any, *arguments: Any) -> Any:
        answer = ask(*arguments)
        if hook == "take_events":
            answer = list(answer)  # vLLM's own class has a generator
        self._run.note(VLLM, f"answer of {hook}", answer)
        return answer

    def _read_in_order(self) -> None:
        """Let vLLM read receipts by name: the order of a set follows from how it was made, which differs."""
        update = self.connector.update_connector_output

        def update_and_order(output: Any) -> None:
            update(output)
            output.finished_recving = InOrder(output.finished_recving or ())

        self.connector.update_connector_output = update_and_order

    def _shake_hands(self) -> None:
        """Do as EngineCore does before its first step."""
        self._offer_tails()
        # The scheduler leaves room for drafts, as it does for a draft model's.
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = self._life.drafts
        self._read_in_order()
        self._note_answers()
        content = {
            (rank, 0) if self._life.running.is_pipeline else (0, rank): shake
            for rank, worker in enumerate(self.workers)
            if (shake := worker.get_handshake_metadata()) is not None
        }
        if content and hasattr(self.connector, "set_xfer_handshake_metadata_pp_aware"):
            self.connector.set_xfer_handshake_metadata_pp_aware(content)
        elif content:
            self.connector.set_xfer_handshake_metadata({rank: shake for (_, rank), shake in content.items()})

    def live(self) -> None:
        life, run = self._life, self._run
        steps = [plan.aborted or plan.arrives for plan in life.plans]
        last = max(steps + [reset.step for reset in life.resets] + [pause.until for pause in life.pauses])
        while run.step < STEPS and (self.is_busy or run.step <= last or self.to_come or self._inputs):
            self.step()
        self._say_what_is_left()
        if run.router == "kvobs" and run.left is None:
            noted, step, self.steps_idle, run.is_over = len(run.entries), run.step, True, True
            assert_nothing_is_left(self)
            del run.entries[noted:]
            run.step = step
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def step(self) -> KVConnectorOutput:
        self._happen(self._run.step, late=False)
        output = super().step()
        self._run.step += 1
        return output

    def _happen(self, step: int, *, late: bool) -> None:
        """Let requests come, and be aborted, the scheduler pause, and caches be reset."""
        for pause in self._life.pauses:
            if step == pause.step:
                self.scheduler.set_pause_state(PauseState.PAUSED_ALL if pause.of_all else PauseState.PAUSED_NEW)
            if step == pause.until:
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
        if not late:
            self._arrive(step)
        for plan in self._plans:
            if plan.aborted == step and plan.aborted_late is late:
                self._abort(plan.name)
        for reset in self._life.resets:
            if reset.step == step and not late:
                try:
                    done = self.scheduler.reset_prefix_cache(reset.running, reset.connector)
                except RuntimeError as error:  # vLLM can't while requests wait for a load
                    done = type(error).__name__
                self._run.note(VLLM, "reset_prefix_cache", done)
                self._run.seen[f"reset, {done}"] += 1

    def _abort(self, name: str) -> None:
        self._run.seen[f"aborted, {self.status(name)}"] += 1
        self.abort(name)

    def _arrive(self, now: int) -> None:
        """Let requests come whose id is free, and the inputs of those that are alive."""
        alive = self.scheduler.requests
        under_way = {name for step in self._steps for name in step.scheduled.num_scheduled_tokens}
        for plan in [*self.to_come]:
            if plan.arrives <= now and plan.name not in alive and plan.name not in under_way:
                self.to_come.remove(plan)
                request = self._request(plan, resumable=bool(plan.inputs))
                self._run.note(VLLM, "a request comes", request)
                self._run.seen["id used again"] += plan.name in self._names
                self._names.add(plan.name)
                self._stage.books.arrive(plan.name)
                self._inputs += [(now + later, plan, request) for later in plan.inputs]
                self.scheduler.add_request(request)
        for due, plan, request in [*self._inputs]:
            if due == now:
                self._inputs.remove((due, plan, request))
                if alive.get(plan.name) is request and not request.is_finished():
                    self._run.seen["input streamed in"] += 1
                    is_last = all(other is not request for _, _, other in self._inputs)
                    self.scheduler.add_request(self._request(plan, resumable=not is_last))

    def _request(self, plan: Plan, *, resumable: bool) -> Request:
        sampling = SamplingParams(
            max_tokens=plan.answer, ignore_eos=True, skip_reading_prefix_cache=None if plan.reads else True
        )
        own = sum(map(ord, plan.name)) * 37
        prompt = [(plan.family * 101 + i * 7 + (own if i >= plan.shared else 0)) % 250 for i in range(plan.prompt)]
        return Request(
            plan.name,
            prompt,
            sampling,
            None,
            arrival_time=float(plan.arrives),
            priority=plan.priority,
            block_hasher=self.hasher,
            resumable=resumable,
        )

    def _schedule(self) -> Any:
        scheduled = super()._schedule()
        self._run.note(VLLM, "scheduled", scheduled)
        self._stage.books.alive = sorted(self.scheduler.requests)
        return scheduled

    def _before_read(self) -> None:
        self._happen(self._run.step, late=True)

    def _update(self, scheduled: Any, combined: Any) -> dict[int, Any]:
        news, drafts = combined.kv_connector_output, self._life.drafts
        if getattr(news, "failed_recving", None):
            news.failed_recving = InOrder(news.failed_recving)
        outputs = super()._update(scheduled, combined)
        for request in news.finished_recving or () if news is not None else ():
            self._stage.books.load_is_received(request)
        if drafts and not self.running.is_async and scheduled.total_num_scheduled_tokens:
            ids = [*scheduled.num_scheduled_tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[TOKEN] * drafts for _ in ids]))
        self._note_state(outputs)
        self._run.seen["step with drafts"] += bool(scheduled.scheduled_spec_decode_tokens)
        self._run.seen["step of a pipeline"] += self.running.is_pipeline
        self._run.seen["step by priority"] += self._life.by_priority
        self._run.seen["step of a sliding window"] += self._life.slides
        step = self._run.step
        self._run.seen["step of a pause"] += any(each.step <= step < each.until for each in self._life.pauses)
        self._run.seen["preempted"] += len(scheduled.preempted_req_ids or ())
        return outputs

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        """Return what is sampled for each request: one token, and some of those that were drafted."""
        return {name: [TOKEN] * self._sampled(name, scheduled) for name in scheduled.num_scheduled_tokens}

    def _sampled(self, name: str, scheduled: Any) -> int:
        if self.scheduler.requests[name].is_prefill_chunk:
            return 0
        drafted = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        return 1 + int(self._life.dice("accepted", name, self._run.step) * (drafted + 1))

    def _forward(self, worker: Any, scheduled: Any) -> None:
        self._forwards[worker] += 1
        more = {"more": ATTENTION} if self._life.happens(0.3, "keywords", self._forwards[worker]) else {}
        for name, cache in LAYERS.items():
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, cache, ATTENTION, **more)

    def _note_state(self, outputs: dict[int, Any]) -> None:
        said = [
            (each.request_id, len(each.new_token_ids), str(each.finish_reason), each.kv_transfer_params)
            for of_client in outputs.values()
            for each in of_client.outputs
        ]
        states = {name: (each.status, each.num_computed_tokens) for name, each in self.scheduler.requests.items()}
        stats = [of_client.scheduler_stats for of_client in outputs.values() if of_client.scheduler_stats is not None]
        counts = [(counted(each.kv_connector_stats), each.connector_prefix_cache_stats) for each in stats]
        self._run.note(VLLM, "stepped", states, self.free_blocks, said, counts)

    def _say_what_is_left(self) -> None:
        requests = {name: each.status.name for name, each in self.scheduler.requests.items()}
        if requests or self.held_blocks:
            self._run.left = f"{requests or 'no requests'}, {self.held_blocks} blocks"


def _make_slide(group: Any) -> None:
    """Let a group of layers attend to the last tokens only: vLLM frees the blocks before them."""
    spec = group.kv_cache_spec
    group.kv_cache_spec = SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=3 * spec.block_size,
    )
