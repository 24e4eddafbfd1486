"""Sample prompt blocks by the hash of their content, and order the workers to read them: on the scheduler's side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvobs.faults import contained
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.events import ObservedRequest, Observer, Params
from kvobs.state.transfers import Load, LookupResult
from kvobs.telemetry.tracing.trace_context import BLOCKS, field_of, into_params
from kvobs.telemetry.verify.noted import BLOCKS_AT_MOST

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

KEY_BYTES = 8
"""Bytes of vLLM's block hash that are compared with the share, and identify a block's content."""
HANDED_AT_MOST = 16  # blocks of a prompt whose fingerprints a decode engine gets

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_ByRank = Annotated[dict[str, Annotated[str, Meta(max_length=64)]], Meta(max_length=1024)]
_Handed = Annotated[list[tuple[_Count, _Count, _Key, _ByRank]], Meta(max_length=HANDED_AT_MOST)]
"""Group, position, key, and fingerprints by rank of each block."""


class Block(NamedTuple):
    """A sampled block; ``position`` is its first token's position in the prompt.

    With ``sent``, the fingerprints by rank of the engine that handed the request over, it is compared with these.
    """

    key: bytes
    group: int
    id: int
    position: int
    sent: Mapping[str, str] | None = None


class LoadedBlocks(NamedTuple):
    """The sampled blocks that a load fills completely.

    ``others`` are the connectors that also had a hit: some load what they were not chosen for.
    """

    connector_index: int
    request: str
    is_async: bool
    blocks: tuple[Block, ...]
    others: tuple[int, ...] = ()
    is_again: bool = False  # after the step in which others may load, into blocks that have been received


class VerifyOrders(NamedTuple):
    """Orders for all ranks: the blocks to note after this step's forward, and the loads to compare from it on.

    ``forgotten`` are group and key of blocks that were noted before, and may be wrong.
    """

    noted: tuple[Block, ...]
    loads: tuple[LoadedBlocks, ...]
    forgotten: frozenset[tuple[int, bytes]] = frozenset()


class NotedBlock(NamedTuple):
    """The fingerprint of a block that one rank has computed, for the scheduler's side."""

    group: int
    key: bytes
    rank: int
    sent: str


class _Prompt:
    """The sampled blocks of a request's prompt."""

    def __init__(self, ends: Sequence[tuple[int, bytes]]) -> None:
        self.ends = ends  # the token after each, and its key
        self.first = 0  # the first token that is computed, and not in a cache
        self.ids: list[list[int]] = []  # per KV cache group; the ids of its blocks, once vLLM has scheduled it


class BlockSample(Observer):
    """Finds the sampled blocks of prompts, as vLLM computes and loads them.

    A block is sampled if its hash is below the share: at every save and load, on every rank and engine with that hash.
    ``share`` is the sampled part of all blocks, ``hash_block_size`` the number of tokens of a hash, ``ranks`` how many
    workers report to this scheduler, ``in_flight`` the most steps in flight.
    """

    def __init__(
        self, share: float, layout: CacheLayout, hash_block_size: int, ranks: int = 1, in_flight: int = 1
    ) -> None:
        whole = 1 << 8 * KEY_BYTES
        self._below = min(int(share * whole), whole - 1).to_bytes(KEY_BYTES, "big")
        self._takes_all = share >= 1
        self._sizes = layout.block_sizes
        self._hash_size = hash_block_size
        self._prompts: dict[str, _Prompt] = {}
        self._unfilled: dict[str, _Prompt] = {}  # those with blocks that are still to be computed
        self._hits: dict[str, list[int]] = {}  # by request: the connectors that had one, until its load is admitted
        self._loads: list[LoadedBlocks] = []
        self._again: dict[str, LoadedBlocks] = {}  # by request: asynchronous ones that others may overwrite
        self._ranks = ranks
        self._noted: dict[tuple[int, bytes], dict[str, str]] = {}  # fingerprints by rank, for decode engines
        self._in_flight = deque[Sequence[Block]](maxlen=in_flight)  # that the last steps were ordered to note
        self._forgotten: set[tuple[int, bytes]] = set()  # of these: to be ordered
        self._doubtful: set[tuple[int, bytes]] = set()  # those that have been forgotten, and not noted again
        self._handed: dict[str, list[Block]] = {}  # by request: those with a prefill engine's fingerprints

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Sample the prompt; after a preemption it is computed again."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None and self._hash_size:
            whole = request.block_hashes[: request.num_prompt_tokens // self._hash_size]
            if sampled := [
                ((i + 1) * self._hash_size, bytes(key[:KEY_BYTES]))
                for i, key in enumerate(whole)
                if self._takes_all or key < self._below
            ]:
                prompt = self._prompts[request.request_id] = _Prompt(sampled)
        if prompt is not None:
            self._unfilled[request.request_id] = prompt
        if owner is not None:
            self._hits[request.request_id] = [offer.connector_index for offer in lookup.offers if offer.tokens]
            if handed := _handed(request.kv_transfer_params):
                self._handed[request.request_id] = handed

    def admitted(self, request_id: str, load: Load) -> None:
        """Order the blocks of a load: with this engine's notes, and again with those that a prefill engine sent."""
        first, end, blocks = load.local_tokens, load.local_tokens + load.tokens, list[Block]()
        prompt, handed = self._prompts.get(request_id), self._handed.get(request_id, ())
        for group, (ids, size) in enumerate(zip(load.blocks, self._sizes, strict=False)):
            sampled = self._of_group(prompt, group, first, end) if prompt is not None else ()
            found = [Block(key, group, 0, position) for position, key in sampled]
            for block in (*found, *[block for block in handed if block.group == group]):
                # Null blocks, which a load does not have, come first.
                at = len(ids) + block.position // size - -(-end // size)
                if first <= block.position <= end - size and at >= 0:
                    blocks.append(block._replace(id=ids[at]))
        others = tuple([index for index in self._hits.pop(request_id, ()) if index != load.connector_index])
        if blocks:
            loaded = LoadedBlocks(load.connector_index, request_id, load.is_async, tuple(blocks), others)
            self._loads.append(loaded)
            if load.is_async and others:
                self._again[request_id] = loaded

    def load_ended(self, request_id: str, load: Load) -> None:
        """Forget a failed load: its blocks are computed.

        The step of a synchronous one, and those that were scheduled before its end was known, have computed with its
        blocks: for all of their requests, which may share them.
        """
        if load.failed:
            self._again.pop(request_id, None)
            if not load.is_async:
                self._forget({(block.group, block.key) for noted in self._in_flight for block in noted})

    def _forget(self, blocks: set[tuple[int, bytes]]) -> None:
        self._forgotten |= blocks
        self._doubtful = blocks | (self._doubtful if len(self._doubtful) < BLOCKS_AT_MOST else set())
        for block in blocks:
            self._noted.pop(block, None)

    def noted(self, notes: Sequence[Any]) -> None:
        """Keep the fingerprints that ranks have sent."""
        for note in notes:
            if isinstance(note, NotedBlock) and (note.group, note.key) not in self._doubtful:
                by_rank = self._noted.pop((note.group, note.key), {})
                self._noted[note.group, note.key] = {**by_rank, str(note.rank): note.sent}
                if len(self._noted) > BLOCKS_AT_MOST:
                    del self._noted[next(iter(self._noted))]

    @contained("verify")
    def into_params(self, request: ObservedRequest, params: Params | None) -> Params | None:
        """Return the params that a decode engine gets with the fingerprints of blocks that this engine has noted."""
        prompt = self._prompts.get(request.request_id)
        if not params or prompt is None or not self._noted:
            return params
        found = [
            (group, position, key.hex(), by_rank)
            for group in range(len(self._sizes))
            for position, key in self._of_group(prompt, group, 0, request.num_prompt_tokens)
            if len(by_rank := self._noted.get((group, key), {})) == self._ranks
        ]
        return into_params(params, BLOCKS, found[:: -(-len(found) // HANDED_AT_MOST)]) if found else params

    def request_ended(self, request: ObservedRequest) -> None:
        self._prompts.pop(request.request_id, None)
        for kept in (self._handed, self._unfilled, self._hits, self._again):
            kept.pop(request.request_id, None)

    @contained("verify")
    def orders_of(self, output: SchedulerOutput) -> VerifyOrders | None:
        """Return the orders for this step, if there are any."""
        noted = self._computed_in(output) if self._unfilled else []
        self._in_flight.append(noted)
        loads, self._loads = self._loads, []
        if self._again:
            loads += self._begun_in(output)
        forgotten, self._forgotten = frozenset(self._forgotten), set()
        if self._doubtful:
            self._doubtful.difference_update((block.group, block.key) for block in noted)
        return VerifyOrders(tuple(noted), tuple(loads), forgotten) if noted or loads or forgotten else None

    def _begun_in(self, output: SchedulerOutput) -> Iterator[LoadedBlocks]:
        """Return the received loads whose requests begin in this step: connectors that were not chosen load in it."""
        cached = output.scheduled_cached_reqs
        begun = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        begun += zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, ids, computed in begun:
            if (load := self._again.pop(request_id, None)) is not None:
                blocks = tuple([block for block in load.blocks if self._is_whole(block, ids, computed)])
                yield load._replace(is_async=False, is_again=True, blocks=blocks)

    def _is_whole(self, block: Block, ids: Sequence[Sequence[int]], computed: int) -> bool:
        """Return whether a loaded block is still the request's, and nothing in it is computed again."""
        size = self._sizes[block.group]
        position = block.position // size
        return block.position + size <= computed and block.id in ids[block.group][position : position + 1]

    def _computed_in(self, output: SchedulerOutput) -> list[Block]:
        """Return the blocks that become full in this step."""
        computed: list[Block] = []
        for new in output.scheduled_new_reqs:
            if (prompt := self._unfilled.get(new.req_id)) is not None:
                prompt.first, prompt.ids = new.num_computed_tokens, [list(ids) for ids in new.block_ids]
                computed += self._advance(new.req_id, prompt, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, ids, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (prompt := self._unfilled.get(request_id)) is not None:
                if request_id in cached.resumed_req_ids:
                    prompt.first, prompt.ids = start, []
                prompt.ids = prompt.ids or [[] for _ in ids or ()]
                for known, more in zip(prompt.ids, ids or (), strict=False):
                    known.extend(more)
                computed += self._advance(request_id, prompt, start, output)
        return computed

    def _advance(self, request_id: str, prompt: _Prompt, start: int, output: SchedulerOutput) -> Iterator[Block]:
        end = start + output.num_scheduled_tokens[request_id]
        for group, ids in enumerate(prompt.ids):
            for position, key in self._of_group(prompt, group, start, end):
                number = position // self._sizes[group]
                if position >= prompt.first and number < len(ids) and ids[number]:  # 0 is vLLM's null block
                    yield Block(key, group, ids[number], position)
        if end >= prompt.ends[-1][0]:
            self._unfilled.pop(request_id, None)

    def _of_group(self, prompt: _Prompt, group: int, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Return position and key of the blocks of a group that end after ``first`` and until ``end``."""
        size = self._sizes[group] if group < len(self._sizes) else 0
        return ((at - size, key) for at, key in prompt.ends if size and first < at <= end and at % size == 0)


def _handed(params: object) -> list[Block]:
    """Return the blocks whose fingerprints are in ``kv_transfer_params``; none if they are malformed."""
    if (sent := field_of(params, BLOCKS)) is None:
        return []
    try:
        listed = msgspec.convert(sent, _Handed)
    except msgspec.ValidationError:
        return []
    return [Block(bytes.fromhex(key), group, 0, position, by_rank) for group, position, key, by_rank in listed]
