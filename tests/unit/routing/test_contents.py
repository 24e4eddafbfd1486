"""Random lives in which blocks have contents: no request is computed on an unfilled block, and none is saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from kvobs.telemetry.recording import recorder
from kvobs.testing import BLOCK, Rig

LIVES, STEPS, TO_THE_END = 250, 70, 300
EMPTY = -1
HOOKS = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv")
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
    saves: list[Move] = field(default_factory=list)


class Life:
    """An engine's life, which follows from its seed: its shape, its memory by rank, and its children's stores."""

    current: Life

    def __init__(self, seed: int) -> None:
        Life.current = self
        self.random = draw = Random(seed)
        self.ranks, self.groups, children = draw.choice([1, 1, 2]), draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])
        self.is_lone = children == 1
        self.shares = [
            {"late": draw.choice([0, 0.4]), "fails": draw.choice([0, 0.2]), "bad": draw.choice([0, 0.2]),
             draw.choice(HOOKS): draw.choice([0, 0.3, 0.5]), "async": draw.choice([0, 0, 0.5, 1])}
            for _ in range(children)
        ]  # fmt: skip
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in range(self.ranks)]
        self.stores: list[set[int]] = [set() for _ in range(children)]
        self.wrong: list[str] = []
        names = [f"c{i}" for i in range(children)]
        self.isolated = {i for i in range(children) if self.is_lone or draw.random() < 0.5}
        options = {"names": names, "isolate": [names[i] for i in self.isolated]}
        timeout: dict[str, Any] = {"lookup_timeout_ms": 100}
        more = draw.choice([{}, timeout, timeout, {"wait_for": "earlier"}, {"load_policy": "longest"}])
        entry = {"kv_connector": "Storing", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
        self.rig = Filling(
            "kvobs", connectors=[entry | {"kv_connector_extra_config": {"tag": i}} for i in range(children)],
            ranks=self.ranks, groups=self.groups, blocks=draw.choice([16, 24]) * self.groups, kvobs=options | more,
        )  # fmt: skip

    def happens(self, child: int, what: str) -> bool:
        return self.random.random() < self.shares[child].get(what, 0)

    def fill(self, rank: int, move: Move, *, is_good: bool) -> None:
        for group, blocks in enumerate(move.blocks):
            for key, block in zip(move.keys, blocks, strict=True):
                self.memory[rank][group, block] = key if is_good else EMPTY

    def first_unlike(self, rank: int, keys: Iterable[int], blocks: list[list[int]]) -> int | None:
        """Return the position of the first block without this content."""
        held = self.memory[rank]
        for at, key in enumerate(keys):
            if any(held.get((group, of[at]), EMPTY) != key for group, of in enumerate(blocks)):
                return at
        return None


def keys_of(request: Any) -> list[int]:
    """Return what the request's full blocks are to hold: it follows from all tokens before."""
    chain = accumulate(request.all_token_ids, lambda last, token: (last * 1_000_003 + token + 1) % 2**61, initial=7)
    return list(chain)[BLOCK::BLOCK]


class Filling(Rig):
    """Computes blocks' contents, and notes on which of them a request was computed that it should not be."""

    def _forward(self, worker: Any, scheduled: Any) -> None:
        life, rank = Life.current, worker._vllm_config.parallel_config.rank
        worker.start_load_kv(None)
        for request_id, n in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            keys, blocks = keys_of(request), self.scheduler.kv_cache_manager.get_block_ids(request_id)
            first, last = (request.num_computed_tokens - n) // BLOCK, request.num_computed_tokens // BLOCK
            unlike = life.first_unlike(rank, keys[:first], blocks)
            if unlike is not None:
                where = f"{request_id} is computed on its block {unlike} of rank {rank}"
                self.doubtful.append((request, request.num_computed_tokens, where))
            computed = Move(request_id, keys[first:last], [group[first:last] for group in blocks])
            life.fill(rank, computed, is_good=unlike is None)
        worker.wait_for_layer_load("layer.0")
        worker.wait_for_save()

    def step(self) -> Any:
        self.doubtful: list[tuple[Any, int, str]] = []
        output = super().step()
        for request, computed, where in self.doubtful:  # vLLM lowers the number of computed tokens when a load fails
            if request.num_computed_tokens >= computed and "ABORTED" not in request.status.name:
                Life.current.wrong.append(where)
            else:  # its prefix cache keeps the blocks, even if the request is not computed again
                cache = self.scheduler.kv_cache_manager
                cache.evict_blocks({block for group in cache.get_block_ids(request.request_id) for block in group})
        return output


class Storing(KVConnectorBase_V1, SupportsHMA):
    """Saves each prompt block as it is computed; loads are late, fail, are bad, or it raises, as its life has it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.life, self.rank = Life.current, vllm_config.parallel_config.rank
        self.index: int = self._kv_transfer_config.get_from_extra_config("tag", 0)
        self.asked: dict[str, tuple[int, bool]] = {}
        self.to_load: list[Move] = []
        self.to_load_in_step: dict[str, Move] = {}
        self.open: list[Move] = []
        self.bad: set[int] = set()

    def _may_raise(self, hook: str) -> None:
        if self.index in self.life.isolated and self.life.happens(self.index, hook):
            raise RuntimeError("as its life has it")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        self._may_raise("get_num_new_matched_tokens")
        if self.life.happens(self.index, "late"):
            return None, False
        store = self.life.stores[self.index]
        known = next((i for i, key in enumerate(keys_of(request)) if key not in store), request.num_prompt_tokens)
        tokens = min(known, (request.num_prompt_tokens - 1) // BLOCK) * BLOCK - num_computed_tokens
        self.asked[request.request_id] = num_computed_tokens // BLOCK, self.life.happens(self.index, "async")
        return (tokens, self.asked[request.request_id][1]) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._may_raise("update_state_after_alloc")
        if num_external_tokens:
            (first, is_async), of = self.asked[request.request_id], request.request_id
            last = first + num_external_tokens // BLOCK
            move = Move(of, keys_of(request)[first:last], [group[first:last] for group in blocks.get_block_ids()])
            if is_async:
                self.to_load.append(move)
            else:
                self.to_load_in_step[of] = move

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        self._may_raise("build_connector_meta")
        scheduled = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        scheduled += scheduler_output.scheduled_cached_reqs.req_ids
        meta = Meta(self.to_load, [self.to_load_in_step.pop(r) for r in scheduled if r in self.to_load_in_step])
        self.to_load = []
        for request_id in scheduled:
            request = self.life.rig.scheduler.requests[request_id]
            last, n = request.num_computed_tokens, scheduler_output.num_scheduled_tokens[request_id]
            first, last = (last - n) // BLOCK, min(last, request.num_prompt_tokens) // BLOCK
            blocks = self.life.rig.scheduler.kv_cache_manager.get_block_ids(request_id)
            meta.saves.append(Move(request_id, keys_of(request)[first:last], [group[first:last] for group in blocks]))
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.to_load_in_step.pop(request.request_id, None)
        return False, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        self._may_raise("start_load_kv")
        for move in meta.loads_in_step:
            # Others would save them in this step, with vLLM's router too.
            is_bad = self.life.is_lone and self.life.groups == 1 and self.life.happens(self.index, "bad")
            self.life.fill(self.rank, move, is_good=not is_bad)
            self.bad.update(move.blocks[0] if is_bad else ())
        self.open += meta.loads

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        for move in meta.saves:
            unlike = self.life.first_unlike(self.rank, move.keys, move.blocks)
            if unlike is not None and not self.bad:
                self.life.wrong.append(f"{move.request}: {self.index} saves an unfilled block of rank {self.rank}")
            self.life.stores[self.index].update(move.keys[:unlike])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = set(), set()
        for move in [move for move in self.open if self.life.random.random() < 0.5]:
            self.open.remove(move)
            received.add(move.request)
            fails, is_bad = (self.life.happens(self.index, what) for what in ("fails", "bad"))
            self.life.fill(self.rank, move, is_good=not fails and not is_bad)
            failed.update([move.request] if fails else [])
            self.bad.update(move.blocks[0] if is_bad and not fails else ())
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [10**15]
    monkeypatch.setattr(recorder, "perf_counter_ns", lambda: now[0])
    return now  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(LIVES))
def test_only_filled_blocks_are_computed_on_and_saved(seed: int, clock: list[int]) -> None:
    life = Life(seed)
    rig, draw = life.rig, life.random
    prompts = [[draw.randrange(200) for _ in range(draw.randrange(10, 120))] for _ in range(6)]
    for step in range(STEPS + TO_THE_END):
        if step < STEPS - 20 and draw.random() < 0.45:
            text = draw.choice(prompts)
            more = [draw.randrange(200) for _ in range(draw.randrange(30))]
            rig.add(f"r{step}", text[: draw.randrange(8, len(text) + 1)] + more, draw.choice([1, 3, 20]))
        live = rig.scheduler.requests
        if live and step < STEPS and draw.random() < 0.1:
            rig.abort(draw.choice(sorted(live)))
        can_preempt = {r.status.name for r in live.values()} == {"RUNNING"}
        if can_preempt and step < STEPS and draw.random() < 0.15:
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        clock[0] += draw.choice([10**7, 4 * 10**8, 10**9])
        rig.step()
        if step >= STEPS and not live:
            break
    assert (life.wrong, sorted(rig.scheduler.requests), rig.held_blocks) == ([], [], 0)
