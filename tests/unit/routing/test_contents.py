"""Random lives in which blocks have contents: no request is computed on an unfilled block, and none is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvobs import clock as machine_clock
from kvobs.testing import BLOCK
from tests.support.rig import forget_unused
from tests.support.runners import RUNNINGS, TOKEN, Overlapping, Running

LIVES, STEPS, TO_THE_END = 24, 70, 300
EMPTY = -1
LONGEST = 5  # steps after which a transfer has ended
HOOKS = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv")
SEEN = {
    *("synchronous loads", "asynchronous loads", "promised saves", "blocks zeroed"),
    *("unchosen synchronous loads", "unchosen asynchronous loads"),
}
BREAKS = "unchosen loads that break"
Answer = tuple[int | None, bool]


class Move(NamedTuple):
    """Blocks of one request, by group, and what they hold once they are filled."""

    request: str
    keys: list[int]
    blocks: list[list[int]]


@dataclass
class Meta(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    loads_in_step: list[Move] = field(default_factory=list)
    unchosen: list[Move] = field(default_factory=list)
    unchosen_in_step: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    late_saves: list[Move] = field(default_factory=list)


@dataclass
class Table:
    """A request's blocks, by group, and how many of its tokens are computed."""

    blocks: list[list[int]]
    computed: int


class Tables(dict[str, Table]):
    """The tables of the requests that a scheduler's outputs have shown, kept as one of vLLM's model runners does."""

    def take(self, output: Any, *, is_v2: bool) -> None:
        for request in output.finished_req_ids | (output.preempted_req_ids or set() if is_v2 else set()):
            self.pop(request, None)
        for new in output.scheduled_new_reqs:
            self[new.req_id] = Table([[*group] for group in new.block_ids], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request in cached.resumed_req_ids:
                self[request] = Table([[*group] for group in blocks], computed)
                continue
            table = self[request]
            for group, more in zip(table.blocks, blocks or (), strict=False):
                group.extend(more)
            table.computed = table.computed if is_v2 else computed  # the V2 runner counts on the GPU


class Life:
    """An engine's life, which follows from its seed: its shape, its memory by rank, and its connectors' stores."""

    current: Life

    def __init__(self, running: Running, seed: int) -> None:
        Life.current = self
        self.running, self.random = running, (draw := Random(f"{seed} {running}"))
        self.groups, connectors = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])
        self.may_be_bad = connectors == 1 == self.groups and running.recomputes  # what is loaded in a step
        # What another connector writes in a step into blocks that were loaded in it.
        self.may_break = connectors > 1 == self.groups and running.recomputes
        self.budget = draw.choice([48, 512])  # tokens of a step
        self.shares = [
            {"late": draw.choice([0, 0.4]), "fails": draw.choice([0, 0.2]), "bad": draw.choice([0, 0.2]),
             "promises": draw.choice([0, 0.5]), draw.choice(HOOKS): draw.choice([0, 0.02, 0.3]),
             "async": draw.choice([0, 0.5, 1]), "unchosen": draw.choice([0, 1]), "breaks": draw.choice([0.5, 1])}
            for _ in range(connectors)
        ]  # fmt: skip
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in range(running.ranks)]
        self.stores: list[set[int]] = [set() for _ in range(connectors)]
        self.chains: dict[str, list[int]] = {}
        self.wrong: list[str] = []
        self.broken: list[set[int]] = [set() for _ in range(running.ranks)]  # reported as bad in this step
        self.loads_first = False
        self.arrived: list[dict[str, bool]] = [{} for _ in range(running.ranks)]  # loads, and whether in this step
        self.between: set[str] = set()  # requests with an asynchronous load
        self.may_end = True  # whether requests may still be aborted
        names = [f"c{i}" for i in range(connectors)]
        self.isolated = {i for i in range(connectors) if connectors == 1 or draw.random() < 0.5}
        options = {"names": names, "best_effort": [names[i] for i in self.isolated]}
        timeout: dict[str, Any] = {"lookup_timeout_ms": 100}
        more = draw.choice([{}, timeout, timeout, {"wait_for": "earlier"}, {"load_policy": "longest"}])
        entry = {"kv_connector": "Storing", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
        self.rig = Filling(
            "kvobs", connectors=[entry | {"kv_connector_extra_config": {"tag": i}} for i in range(connectors)],
            running=running, at_once=lambda: draw.random() < 0.5,
            groups=self.groups, blocks=draw.choice([16, 24]) * self.groups,
            kvobs=options | more,
        )  # fmt: skip
        # The workers zero new blocks, as vLLM has it for some models.
        self.rig.scheduler.needs_kv_cache_zeroing = zeroes = draw.random() < 0.5
        for manager in self.rig.scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = zeroes

    def happens(self, index: int, what: str) -> bool:
        return self.random.random() < self.shares[index].get(what, 0)

    def fill(self, rank: int, blocks: list[list[int]], keys: Sequence[int]) -> None:
        held = self.memory[rank]
        for group, of in enumerate(blocks):
            for block, key in zip(of, keys, strict=True):
                held[group, block] = key

    def fill_found(self, rank: int, move: Move) -> None:
        """Fill a request's blocks; if it has computed a part of one, the rest of that is worth nothing yet."""
        held, right = self.memory[rank], set(self.chains[move.request])
        for group, of in enumerate(move.blocks):
            for block, key in zip(of, move.keys, strict=True):
                if held.get((group, block)) not in right:
                    held[group, block] = key

    def first_unlike(self, rank: int, blocks: list[list[int]], keys: Sequence[int]) -> int | None:
        """Return the position of the first block without this content."""
        held = self.memory[rank]
        for at, key in enumerate(keys):
            if any(held.get((group, of[at]), EMPTY) != key for group, of in enumerate(blocks)):
                return at
        return None

    def keys(self, request: str, first: int, end: int) -> list[int]:
        """Return what the request's blocks hold from the first one on, when its tokens before ``end`` are computed.

        It follows from all tokens before; the last block may be filled in part.
        """
        chain = self.chains[request]
        return chain[(first + 1) * BLOCK : end : BLOCK] + ([chain[end]] if end > first * BLOCK else [])


def chain_of(request: Any) -> list[int]:
    """Return by number of tokens what a block holds that ends there; the model only ever samples one token."""
    tokens = [*request.prompt_token_ids, *[TOKEN] * (request.max_tokens + 2)]
    return list(accumulate(tokens, lambda last, token: (last * 1_000_003 + token + 1) % 2**61, initial=7))


class Filling(Overlapping):
    """Computes blocks' contents, and notes on which of them a request was computed that it should not be."""

    def _configure(self, config: Any) -> None:
        super()._configure(config)
        scheduler = config.scheduler_config
        scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens = Life.current.budget, None
        scheduler.enable_chunked_prefill = True

    def _build_worker(self, cls: Any, config: Any, caches: Any) -> Any:
        worker = super()._build_worker(cls, config, caches)
        worker.tables = Tables()
        return worker

    def add(self, request_id: str, *args: Any, **more: Any) -> Any:
        request = super().add(request_id, *args, **more)
        Life.current.chains[request_id] = chain_of(request)
        return request

    def _work(self, worker: Any, scheduled: Any, samples: dict[str, list[int]]) -> Any:
        worker.tables.take(scheduled, is_v2=self.running.is_v2)
        rank = worker._vllm_config.parallel_config.rank
        Life.current.broken[rank].clear()
        Life.current.arrived[rank].update(dict.fromkeys(Life.current.arrived[rank], False))
        Life.current.loads_first = scheduled.has_sync_kv_loads  # else loads begin after the forward
        self.seen["blocks zeroed"] += len(scheduled.new_block_ids_to_zero or ())
        for block in scheduled.new_block_ids_to_zero or ():
            Life.current.memory[rank].update({(group, block): EMPTY for group in range(Life.current.groups)})
        return super()._work(worker, scheduled, samples)

    def _forward(self, worker: Any, scheduled: Any) -> None:
        super()._forward(worker, scheduled)
        life, rank = Life.current, worker._vllm_config.parallel_config.rank
        for request_id, n in scheduled.num_scheduled_tokens.items():
            table = worker.tables[request_id]
            begin, table.computed = table.computed, table.computed + n
            unlike = life.first_unlike(rank, table.blocks, life.keys(request_id, 0, begin))
            if unlike is not None:
                where = f"{request_id} is computed on its block {unlike} of rank {rank}"
                if life.may_be_bad or life.may_break:
                    request = self.scheduler.requests[request_id]
                    self.doubtful.append((request, request.num_computed_tokens, where))
                else:
                    life.wrong.append(where)
            first, last = begin // BLOCK, -(-table.computed // BLOCK)
            keys = life.keys(request_id, first, table.computed)
            computed = [group[first:last] for group in table.blocks]
            life.fill(rank, computed, keys if unlike is None else [EMPTY] * len(keys))

    def _before_read(self) -> None:
        life, live = Life.current, sorted(self.scheduler.requests)
        if live and life.may_end and life.random.random() < 0.05:
            self.abort(life.random.choice(live))

    def step(self) -> Any:
        self.doubtful: list[tuple[Any, int, str]] = []
        self.keep_no_room()
        output = super().step()
        for request, computed, where in self.doubtful:  # vLLM lowers the number of computed tokens when a load fails
            if request.num_computed_tokens >= computed and "ABORTED" not in request.status.name:
                Life.current.wrong.append(where)
            else:  # its prefix cache keeps the blocks, even if the request is not computed again
                cache = self.scheduler.kv_cache_manager
                cache.evict_blocks({block for group in cache.get_block_ids(request.request_id) for block in group})
        return output


class Storing(KVConnectorBase_V1, SupportsHMA):
    """Saves each block that it is shown as computed, and some when their request has ended.

    It knows blocks from what it is given and shown only, as vLLM's own connectors do. Loads are late, fail, are bad, or
    it raises, as its life has it. So it is with loads that it was not chosen for: as UCM and Tair it may load what its
    last lookup found. It reports what breaks.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.life, self.rank = Life.current, vllm_config.parallel_config.rank
        self.index: int = self._kv_transfer_config.get_from_extra_config("tag", 0)
        self.asked: dict[str, tuple[int, int, bool]] = {}
        self.taken: set[str] = set()  # requests of its asynchronous loads that nobody ordered
        self.given: dict[str, list[list[int]]] = {}
        self.tables = Tables()
        self.next = Meta()
        self.to_load_in_step: dict[str, Move] = {}
        self.open: list[tuple[Move, Counter[str]]] = []
        self.open_unchosen: list[tuple[Move, Counter[str]]] = []
        self.saving: list[tuple[Move, Counter[str]]] = []
        self.bad: set[int] = set()

    def _may_raise(self, hook: str) -> None:
        if self.index in self.life.isolated and self.life.happens(self.index, hook):
            raise RuntimeError("as its life has it")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        self._may_raise("get_num_new_matched_tokens")
        if self.life.happens(self.index, "late"):
            return None, False
        if request.request_id in self.taken:  # the end of that load would pass for the next one's
            return 0, False
        store, keys = self.life.stores[self.index], self.life.chains[request.request_id][BLOCK::BLOCK]
        most = (request.num_prompt_tokens - 1) // BLOCK
        known = next((i for i, key in enumerate(keys[:most]) if key not in store), most)
        tokens = known * BLOCK - num_computed_tokens
        is_async = self.life.happens(self.index, "async")
        self.asked[request.request_id] = num_computed_tokens // BLOCK, known, is_async
        return (tokens, is_async) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._may_raise("update_state_after_alloc")
        of = request.request_id
        self.tables.pop(of, None)  # if it was preempted in a step that was not shown
        self.given[of] = given = [[*group] for group in blocks.get_block_ids()]
        if num_external_tokens:
            first, _, is_async = self.asked.pop(of)
            last = first + num_external_tokens // BLOCK
            move = Move(of, self.life.keys(of, first, last * BLOCK), [group[first:last] for group in given])
            self.life.rig.seen[f"{'a' if is_async else ''}synchronous loads"] += 1
            if is_async:
                self.life.between.add(of)
                self.next.loads.append(move)
            else:
                self.to_load_in_step[of] = move
        elif of in self.asked and self.asked[of][2] and (unchosen := self._unchosen(of, given)):
            self.next.unchosen += unchosen
            self.taken.add(of)

    def _unchosen(self, of: str, blocks: list[list[int]]) -> list[Move]:
        """Return the load of what the last lookup found, if there is to be one."""
        first, last, is_async = self.asked.pop(of, (0, 0, False))
        last = min(last, *map(len, blocks))
        if last <= first or not self.life.happens(self.index, "unchosen"):
            return []
        self.life.rig.seen[f"unchosen {'a' if is_async else ''}synchronous loads"] += 1
        return [Move(of, self.life.keys(of, first, last * BLOCK), [group[first:last] for group in blocks])]

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        self._may_raise("build_connector_meta")
        self.tables.take(scheduler_output, is_v2=self.life.running.is_v2)
        for request_id in (scheduler_output.preempted_req_ids or set()) - scheduler_output.num_scheduled_tokens.keys():
            self.tables.pop(request_id, None)
        meta, self.next = self.next, Meta()
        cached = scheduler_output.scheduled_cached_reqs
        begun = [request_id for request_id in cached.req_ids if request_id in cached.resumed_req_ids]
        begun += [new.req_id for new in scheduler_output.scheduled_new_reqs]
        for request_id in begun:
            if self.tables[request_id].blocks != self.given.pop(request_id, None):
                self.life.wrong.append(f"{request_id} has other blocks than {self.index} was given")
            if request_id in self.to_load_in_step:
                meta.loads_in_step.append(self.to_load_in_step.pop(request_id))
            else:
                meta.unchosen_in_step += self._unchosen(request_id, self.tables[request_id].blocks)
        for request_id, n in scheduler_output.num_scheduled_tokens.items():
            table = self.tables[request_id]
            first, table.computed = table.computed // BLOCK, table.computed + n
            last = table.computed // BLOCK
            keys = self.life.keys(request_id, first, last * BLOCK)
            meta.saves.append(Move(request_id, keys, [group[first:last] for group in table.blocks]))
        return meta

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        of = request.request_id
        self.to_load_in_step.pop(of, None)
        table = self.tables.get(of)
        last = min(request.num_computed_tokens, table.computed) // BLOCK if table is not None else 0
        if not last or self.life.may_be_bad or self.life.may_break or not self.life.happens(self.index, "promises"):
            return False, None
        self.life.rig.seen["promised saves"] += 1
        blocks = [[*group[:last]] for group in block_ids]
        self.next.late_saves.append(Move(of, self.life.keys(of, 0, last * BLOCK), blocks))
        return True, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        self._may_raise("start_load_kv")
        for move in meta.loads_in_step:
            # Others would save them in this step, with vLLM's router too.
            is_bad = self.life.may_be_bad and self.life.happens(self.index, "bad")
            self._load(move, is_good=not is_bad)
            self._report_bad(move.blocks[0] if is_bad else ())
        for move in meta.unchosen_in_step:
            # vLLM computes blocks once more that were loaded, and not those that it has just computed.
            is_before = self.life.loads_first and move.request not in self.life.between
            self._load_unchosen(move, may_break=self.life.may_break and is_before)
        self.open_unchosen += [(move, Counter()) for move in meta.unchosen]
        self.open += [(move, Counter()) for move in meta.loads]

    def _load_unchosen(self, move: Move, *, may_break: bool) -> bool:
        """Write what was found; return whether that breaks."""
        is_broken = may_break and self.life.happens(self.index, "breaks")
        self.life.rig.seen[BREAKS] += is_broken
        if is_broken:
            self._load(move, is_good=False)
        else:
            self.life.fill_found(self.rank, move)
        self._report_bad(move.blocks[0] if is_broken and self.life.groups == 1 else ())
        return is_broken

    def _report_bad(self, blocks: Iterable[int]) -> None:
        self.bad.update(blocks)
        self.life.broken[self.rank].update(blocks)

    def _load(self, move: Move, *, is_good: bool) -> None:
        self.life.fill(self.rank, move.blocks, move.keys if is_good else [EMPTY] * len(move.keys))

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        for move in meta.saves:
            self._save(move)
        self.saving += [(move, Counter()) for move in meta.late_saves]

    def _save(self, move: Move) -> None:
        unlike = self.life.first_unlike(self.rank, move.blocks, move.keys)
        if unlike is not None and not self.life.broken[self.rank]:  # others save them in this step, with any router
            self.life.wrong.append(f"{move.request}: {self.index} saves an unfilled block of rank {self.rank}")
        self.life.stores[self.index].update(move.keys[:unlike])

    def _ended(self, transfers: list[tuple[Move, Counter[str]]]) -> Iterator[Move]:
        for move, waits in transfers.copy():
            waits["steps"] += 1
            if waits["steps"] > LONGEST or self.life.random.random() < 0.5:
                transfers.remove((move, waits))
                yield move

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for move in self._ended(self.open):
            results.finished_recving.add(move.request)
            self.life.arrived[self.rank][move.request] = True
            fails, is_bad = (self.life.happens(self.index, what) for what in ("fails", "bad"))
            self._load(move, is_good=not fails and not is_bad)
            results.failed_recving.update([move.request] if fails else [])
            self._report_bad(move.blocks[0] if is_bad and not fails else ())
        for move in self._ended(self.open_unchosen):
            results.finished_recving.add(move.request)
            is_open = self._is_waiting(move) and self.life.arrived[self.rank].get(move.request, True)
            if is_open and self._load_unchosen(move, may_break=True) and self.life.groups > 1:
                results.failed_recving.add(move.request)
        for move in self._ended(self.saving):
            results.finished_sending.add(move.request)
            self._save(move)
        return results

    def _is_waiting(self, move: Move) -> bool:
        """Return whether the request still waits with these blocks: else vLLM takes no more reports about them."""
        scheduler = self.life.rig.scheduler
        request = scheduler.requests.get(move.request)
        if request is None or request.status.name != "WAITING_FOR_REMOTE_KVS":
            return False
        held = scheduler.kv_cache_manager.get_block_ids(move.request)
        return all(set(blocks) <= set(group) for blocks, group in zip(move.blocks, held, strict=True))

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [10**15]
    monkeypatch.setattr(machine_clock, "perf_counter_ns", lambda: now[0])
    return now


@pytest.mark.parametrize("running", RUNNINGS, ids=str)
def test_only_filled_blocks_are_computed_on_and_saved(running: Running, clock: list[int]) -> None:
    seen = Counter[str]()
    for seed in range(LIVES):
        life = Life(running, seed)
        _live(life, clock)
        found = (life.wrong, sorted(life.rig.scheduler.requests), life.rig.held_blocks)
        assert found == ([], [], 0), f"{running}, seed {seed}"
        seen += life.rig.seen
    assert seen.keys() - {BREAKS} == SEEN | running.seen, "the lives have what they are for"
    assert seen[BREAKS] or (running.is_v2 and running.is_async), "there most receipts are under way by then"


def _live(life: Life, clock: list[int]) -> None:
    rig, draw = life.rig, life.random
    prompts = [[draw.randrange(200) for _ in range(draw.randrange(10, 120))] for _ in range(6)]
    live = rig.scheduler.requests
    for step in range(STEPS + TO_THE_END):
        life.may_end = step < STEPS
        if step < STEPS - 20 and draw.random() < 0.45:
            text = draw.choice(prompts)
            more = [draw.randrange(200) for _ in range(draw.randrange(30))]
            rig.add(f"r{step}", text[: draw.randrange(8, len(text) + 1)] + more, draw.choice([1, 3, 20]))
        if live and life.may_end and draw.random() < 0.05:
            rig.abort(draw.choice(sorted(live)))
        if draw.random() < 0.4:
            forget_unused(rig)
        if life.may_end and draw.random() < 0.1:
            with suppress(RuntimeError):  # requests wait for loads, or steps are in flight: they are preempted only
                rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        clock[0] += draw.choice([10**7, 2 * 10**8, 5 * 10**8])
        rig.step()
        if not life.may_end and not rig.is_busy:
            break
