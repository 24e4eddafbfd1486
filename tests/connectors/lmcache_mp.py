"""LMCache's multi-process connector, all of it real; its message queue and what is behind it is a stand-in.

The stand-in server does what LMCache's does with locks: a lookup locks what it found for its request until that is
retrieved or freed; the end of a session frees nothing.
"""

from collections import Counter
from importlib import import_module
from typing import Any

from tests.connectors.memory import BLOCK, Memory, chain, page_is_right
from tests.connectors.plug import Plug, entries, held

CHUNK = 2 * BLOCK
FUTURES = "lmcache.v1.multiprocess.futures"


class LMCacheMP(Plug):
    """One connector with a server of its own."""

    connector = "LMCacheMPConnector"

    @property
    def tag(self) -> str:
        return f"tcp://{self.name}:1"

    def options(self) -> dict[str, Any]:
        options = {"host": f"tcp://{self.name}", "port": 1, "mq_timeout": 1.0, "heartbeat_interval": 20.0}
        return {f"lmcache.mp.{name}": value for name, value in options.items()}

    def install(self, patch: Any) -> None:
        connector: Any = import_module("lmcache.integration.vllm.lmcache_mp_connector")
        adapter: Any = import_module("lmcache.integration.vllm.vllm_multi_process_adapter")

        self.chunks: dict[tuple[int, ...], list[Any]] = {}  # all tokens up to a chunk's end -> its pages
        self.locks: Counter[tuple[str, tuple[int, ...]]] = Counter()  # (request, chunk)
        self.jobs: dict[str, tuple[int, int]] = {}  # request -> (due, chunks found)
        self.copies: list[Copy] = []
        self.given_up: set[str] = set()  # ended before they were allocated: LMCache itself leaves their locks to time
        patch.setattr(adapter.RequestClientFactory, "create", lambda url, **_: Client(self.by_tag[url]))
        patch.setattr(adapter, "create_transfer_context", lambda *_, req_client, **__: Transfers(req_client.server))
        cls = connector.LMCacheMPConnector
        real = cls._cleanup_request_tracker
        if not hasattr(real, "is_ours"):

            def cleanup(sub_connector: Any, request_id: str) -> None:
                tracker = sub_connector.request_trackers.get(request_id)
                if tracker is not None and tracker.state.name == "PREFETCHING":
                    next(iter(sub_connector.scheduler_adapter.req_clients.values())).server.given_up.add(request_id)
                real(sub_connector, request_id)

            cleanup.is_ours = True  # type: ignore[attr-defined]
            patch.setattr(cls, "_cleanup_request_tracker", cleanup)

    def tick(self) -> None:
        super().tick()
        self.run_copies(lambda copy: copy.due <= self.now)

    def run_copies(self, is_due: Any) -> None:
        due, self.copies = [c for c in self.copies if is_due(c)], [c for c in self.copies if not is_due(c)]
        for copy in due:
            copy.run()

    def found(self, key: Any) -> int:
        """Lock the chunks of a prefix for its request; return how many there are."""
        found = held(self.chunks, key.token_ids[: key.end], step=CHUNK)
        for end in range(CHUNK, found + 1, CHUNK):
            self.locks[key.request_id, key.token_ids[:end]] += 1
        return found // CHUNK

    def unlock(self, key: Any) -> None:
        """Free what a key covers: whole chunks only, as LMCache does."""
        first = key.start // CHUNK * CHUNK
        for end in range(first + CHUNK, key.end + 1, CHUNK):
            place = (key.request_id, key.token_ids[:end])
            if self.locks[place]:
                self.locks[place] -= 1

    def leftovers(self) -> list[str]:
        books = ("_pending_lookups", "_unacked_lookups", "_finished_lookup_results", "_lookup_status")
        left = entries(self.on_scheduler, "request_trackers") + entries(self.on_scheduler.scheduler_adapter, *books)
        left += [f"prefetch job of {request}" for request in self.jobs if request not in self.given_up]
        held = {request for (request, _), count in self.locks.items() if count}
        left += [f"read locks of {request}" for request in sorted(held - self.given_up)]
        for worker in self.workers.values():
            left += entries(worker.worker_adapter, "store_futures", "retrieve_futures")
        return left + [f"copy of {copy.key.request_id}" for copy in self.copies]


class Copy:
    """A store or a retrieve, to be carried out later."""

    def __init__(self, server: LMCacheMP, key: Any, blocks: list[int], memory: Memory, skip: int | None) -> None:
        self.server, self.key, self.blocks, self.memory, self.skip = server, key, blocks, memory, skip
        before = [copy.due for copy in server.copies if copy.key.request_id == key.request_id]
        self.due: int = max([server.now + server.delay(), *before])  # first in, first out
        self.future = import_module(FUTURES).MessagingFuture()

    def run(self) -> None:
        server, tokens = self.server, self.key.token_ids
        is_failing = server.random.random() < server.fail_rate
        chunks = range(self.key.start, self.key.end, CHUNK)
        if self.skip is None:
            for index, begin in enumerate(chunks):
                pages = [self.memory.page(block) for block in self.blocks[2 * index : 2 * index + 2]]
                values = chain(tokens[: begin + CHUNK])[begin:]
                is_right = all(page_is_right(page, values[i * BLOCK : (i + 1) * BLOCK]) for i, page in enumerate(pages))
                server.check_store(is_right, f"{self.key.request_id}: tokens {begin} to {begin + CHUNK}")
                server.chunks.setdefault(tokens[: begin + CHUNK], pages)
        else:
            server.loaded += 1
            if not is_failing:
                pages = [page for begin in chunks for page in server.chunks[tokens[: begin + CHUNK]]]
                for index, (block, page) in enumerate(zip(self.blocks, pages, strict=True)):
                    if index * BLOCK >= self.skip:
                        self.memory.put(block, page)
            server.unlock(self.key)
        self.future.set_result(self.skip is None or not is_failing)


class Client:
    """Stands for LMCache's message queue client."""

    def __init__(self, server: LMCacheMP) -> None:
        self.server = server

    def get_chunk_size(self) -> Any:
        return _done(CHUNK)

    def get_experimental(self) -> Any:
        return _done([])

    def ping(self, *_: Any) -> Any:
        return _done(True)

    def lookup(self, key: Any, tp_size: int) -> Any:
        self.server.may_fail("lookup")
        self.server.jobs[key.request_id] = (self.server.now + self.server.delay(), self.server.found(key))
        return _done(None)

    def query_prefetch_status(self, request_id: str) -> Any:
        self.server.may_fail("query")
        due, count = self.server.jobs.get(request_id, (0, 0))
        if due > self.server.now:
            return _done(None)
        self.server.jobs.pop(request_id, None)
        return _done(count)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        self.server.unlock(key)
        return _done(None)

    def end_session(self, request_id: str) -> Any:
        return _done(None)

    def report_block_allocation(self, *_: Any) -> Any:
        self.server.may_fail("report")
        return _done(None)

    def clear(self, force: bool = False) -> Any:
        self.server.cleared += 1
        return _done(None)

    def close(self) -> None:
        """Have nothing to close."""


class Transfers:
    """Stands for the engine's end of LMCache's copies."""

    def __init__(self, server: LMCacheMP) -> None:
        self.server = server

    def register(self, kv_caches: dict[str, Any], *_: Any, **__: Any) -> None:
        first = next(iter(kv_caches.values()))
        (self.memory,) = (m for m in self.server.memories.values() if next(iter(m.kv_caches.values())) is first)

    def create_recorded_event(self) -> None:
        self.server.may_fail("event")

    def submit_store(self, _: str, key: Any, __: Any, blocks: list[list[int]], *___: Any) -> Any:
        return self._submit(key, blocks, None)

    def submit_retrieve(
        self, _: str, key: Any, __: Any, blocks: list[list[int]], *___: Any, skip_first_n_tokens: int
    ) -> Any:
        return self._submit(key, blocks, skip_first_n_tokens)

    def flush_inflight_stores(self) -> None:
        self.server.run_copies(lambda copy: copy.skip is None and copy.memory is self.memory)

    def _submit(self, key: Any, blocks: list[list[int]], skip: int | None) -> Any:
        self.server.may_fail("retrieve" if skip is not None else "store")
        copy = Copy(self.server, key, blocks[0], self.memory, skip)
        self.server.copies.append(copy)
        return copy.future

    def close(self) -> None:
        """Have nothing to close."""

    unregister = close


def _done(result: Any) -> Any:
    future = import_module(FUTURES).MessagingFuture()
    future.set_result(result)
    return future
