"""Follow a test's script as a connector, the sibling of the one under test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

SCRIPTS: dict[str, Script] = {}
"""All scripts by tag: vLLM builds connectors from their configuration, which has the tag only."""


@dataclass
class _Results:
    """Stands for vLLM's ``KVConnectorTransferResults`` before 0.30."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


_HAS_RESULTS = versions.transfer_results() is not None
TransferResults: Any = versions.transfer_results() or _Results
failed_loads = versions.failed_loads()


@dataclass
class Script:
    """Answers and reports of one ``ScriptedConnector``, in both roles and on all ranks, and its calls.

    Everything may be changed while the engine runs. A new script with the same tag replaces the old one for connectors
    that are built later.

    Attributes:
        tag: the script's name; connectors find it by this name.
        offers: request id -> answer of ``get_num_new_matched_tokens``: (number of tokens or None, whether the load is
            asynchronous), never more tokens than the prompt has. A list of answers is given one by one, and its last
            one for good. Other requests are a miss.
        promises: ids of requests whose blocks the connector holds when they end, until ``say(saved=...)``.
        tails: ids of requests whose partial tail it accepts.
        params: request id -> the ``kv_transfer_params`` that it returns at the request's end.
        reports: rank -> vLLM's transfer results, reported in the rank's next step; see ``say``.
        bad_blocks: rank -> block ids with load errors, reported in the rank's next step.
        finished_count: answer of ``get_finished_count``.
        stats: answers of ``get_kv_connector_stats``, one for each call.
        events: rank -> KV cache events, reported in the rank's next step.
        handshake: answer of ``get_handshake_metadata``.
        worker_meta: rank -> the worker's own metadata for the scheduler's side, sent in the rank's next step.
        answers: hook -> answer, for ``get_loaded_kv_cache_group_ids``, ``take_events``, ``has_pending_push_work``,
            ``has_pending_block_frees``, ``reset_cache`` and ``get_mem_pool_context``.
        loads: "chosen": it ends its loads without ``say``, synchronous ones in their step; "found": it loads what
            its last lookup found, whoever was chosen to load. By default it moves nothing.
        takes: steps after which a load between steps ends, if it ``loads``.
        breaks: ids of requests whose next load breaks half-way: its blocks are reported as bad.
        on_load: called with the rank and each ``Loaded`` that a worker's side writes.
        raises: hook -> the exception that it raises.
        raises_on: the ranks on which it raises, all by default; the scheduler's side counts as rank 0.
        on_output: called with the workers' output in ``update_connector_output``, and may change it.
        on_call: called with each hook and its detail, before anything else.
        hooks: name -> function; methods of its class, in place of a hook or beyond vLLM's class.
        wrapped: hooks that a plug-in wraps once the connector is built: their calls are in ``calls`` as "wrapped NAME".
        has_thread: whether it works in a separate thread, for which its hooks wait.
        calls: (hook, detail) of each call so far; see ``called``.
    """

    tag: str
    offers: dict[str, Any] = field(default_factory=dict)
    promises: set[str] = field(default_factory=set)
    tails: set[str] = field(default_factory=set)
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)
    bad_blocks: dict[int, set[int]] = field(default_factory=dict)
    finished_count: int | None = None
    stats: list[KVConnectorStats] = field(default_factory=list)
    events: dict[int, Any] = field(default_factory=dict)
    handshake: Any = None
    worker_meta: dict[int, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    loads: str = ""
    takes: int = 0
    breaks: set[str] = field(default_factory=set)
    on_load: Callable[[int, Loaded], None] | None = None
    raises: dict[str, Exception] = field(default_factory=dict)
    raises_on: set[int] | None = None
    on_output: Callable[[Any], None] | None = None
    on_call: Callable[[str, Any], None] | None = None
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    wrapped: set[str] = field(default_factory=set)
    has_thread: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the script known to connectors that are built later."""
        SCRIPTS[self.tag] = self

    def say(self, rank: int, received: str = "", failed: str = "", saved: str = "") -> None:
        """Report requests on one rank in its next step.

        Args:
            rank: the worker's rank.
            received: ids of requests, separated by spaces, whose load is complete on this rank.
            failed: those whose load has failed; vLLM before 0.30 takes them for received ones.
            saved: those whose promised save is complete on this rank.
        """
        results = self.reports.setdefault(rank, TransferResults())
        results.finished_recving |= set(received.split()) | set(failed.split())
        results.failed_recving |= set(failed.split())
        results.finished_sending |= set(saved.split())

    def called(self, hook: str) -> list[Any]:
        """Return the detail of each call of a hook so far: mostly the request's id, or None."""
        return [detail for name, detail in self.calls if name == hook]


def entry_of(script: Script, **more: Any) -> dict[str, Any]:
    """Return the entry of ``connectors`` that builds a ``ScriptedConnector`` for this script.

    Args:
        script: its answers and reports.
        more: further keys, or other values, such as ``kv_role``.
    """
    return {
        "kv_connector": "ScriptedConnector",
        "kv_connector_module_path": "kvobs.testing",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tag": script.tag},
        **more,
    }


class Shown(NamedTuple):
    """The requests in a scheduler's output as a connector sees it: the detail of ``build_connector_meta``."""

    scheduled: frozenset[str]
    finished: frozenset[str]
    preempted: frozenset[str]
    tokens: int

    @classmethod
    def of(cls, output: Any) -> Shown:
        scheduled, preempted = frozenset(output.num_scheduled_tokens), frozenset(output.preempted_req_ids or ())
        return cls(scheduled, frozenset(output.finished_req_ids), preempted, output.total_num_scheduled_tokens)


class Loaded(NamedTuple):
    """What a connector with ``Script.loads`` writes: the blocks of one request, by KV cache group."""

    request: str
    first: int
    """The position of the first of them among the request's blocks."""
    blocks: tuple[tuple[int, ...], ...]
    is_async: bool
    is_broken: bool
    """Whether the load breaks half-way: what the blocks hold is worth nothing."""


@dataclass
class _Meta(KVConnectorMetadata):
    tag: str
    loads: list[Loaded] = field(default_factory=list)


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """Follows a ``Script``; its ``kv_connector_extra_config`` has the script's ``tag``.

    It moves no data. Each call of a hook is in ``Script.calls``.

    Raises:
        KeyError: there is no script with this tag.
    """

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> Self:
        """Build a separate class for a script with further methods."""
        hooks = _script_of(vllm_config).hooks
        return super().__new__(type(cls.__name__, (cls,), hooks) if hooks else cls)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.script = _script_of(vllm_config)
        self.rank = vllm_config.parallel_config.rank
        self._block_size = vllm_config.cache_config.block_size
        self._thread = ThreadPoolExecutor(1) if self.script.has_thread else None
        self._found: dict[str, tuple[int, int, bool]] = {}  # by the last lookup: local tokens, its own, is_async
        self._ordered: dict[str, Loaded] = {}
        self._under_way: list[tuple[Loaded, int]] = []  # with the steps that are left
        self._note("__init__", role)

    def _note(self, hook: str, detail: Any = None) -> Any:
        if self._thread is not None:
            return self._thread.submit(self._follow, hook, detail).result()
        return self._follow(hook, detail)

    def _follow(self, hook: str, detail: Any) -> Any:
        self.script.calls.append((hook, detail))
        if self.script.on_call is not None:
            self.script.on_call(hook, detail)
        if hook in self.script.raises and self.rank in (self.script.raises_on or {self.rank}):
            raise self.script.raises[hook]
        return self.script.answers.get(hook)

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._note("on_new_request", request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens", request.request_id)
        self._found.pop(request.request_id, None)
        answer = self.script.offers.get(request.request_id, (0, False))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        tokens, is_async = answer
        if not tokens:
            return tokens, False
        tokens = min(tokens, request.num_tokens - 1 - num_computed_tokens)  # never more than the prompt has
        if tokens <= 0:
            return 0, False
        self._found[request.request_id] = num_computed_tokens, tokens, is_async
        return tokens, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids() if hasattr(blocks, "get_block_ids") else blocks
        self._note("update_state_after_alloc", (request.request_id, num_external_tokens, ids))
        loads, request_id = self.script.loads, request.request_id
        if request_id in self._found and (loads == "found" or (loads and num_external_tokens)):
            local, tokens, is_async = self._found.pop(request_id)
            first, end = local // self._block_size, -(-(local + tokens) // self._block_size)
            written, is_broken = tuple(tuple(group[first:end]) for group in ids), request_id in self.script.breaks
            self.script.breaks.discard(request_id)
            self._ordered[request_id] = Loaded(request_id, first, written, is_async, is_broken)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._note("get_loaded_kv_cache_group_ids", request.request_id) or (0,)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._note("build_connector_meta", Shown.of(scheduler_output))
        scheduled = scheduler_output.num_scheduled_tokens
        begun = [load for request_id, load in self._ordered.items() if load.is_async or request_id in scheduled]
        for load in begun:
            del self._ordered[load.request]
        return _Meta(self.script.tag, begun)

    def update_connector_output(self, connector_output: Any) -> None:
        seen = {
            "received": set(connector_output.finished_recving or ()),
            "sent": set(connector_output.finished_sending or ()),
            "failed": set(failed_loads(connector_output)),
            "meta": connector_output.kv_connector_worker_meta,
            "events": connector_output.kv_cache_events,
        }
        self._note("update_connector_output", seen)
        if self.script.on_output is not None:
            self.script.on_output(connector_output)

    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        self._note("register_finished_partial_tail", request.request_id)
        return request.request_id in self.script.tails

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished", request.request_id)
        self._ordered.pop(request.request_id, None)
        return request.request_id in self.script.promises, self.script.params.get(request.request_id)

    def get_finished_count(self) -> int | None:
        return self.script.finished_count

    def take_events(self) -> Any:
        return self._note("take_events") or ()

    def has_pending_push_work(self) -> bool:
        return bool(self._note("has_pending_push_work"))

    def has_pending_block_frees(self) -> bool:
        return bool(self._note("has_pending_block_frees"))

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._note("set_xfer_handshake_metadata", metadata)

    def reset_cache(self) -> bool | None:
        return self._note("reset_cache")

    # worker

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._note("set_host_xfer_buffer_ops")
        self.copy_blocks = copy_operation

    def get_handshake_metadata(self) -> Any:
        return self.script.handshake

    def get_mem_pool_context(self) -> Any:
        return self._note("get_mem_pool_context")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._note("handle_preemptions", kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._note("bind_connector_metadata", connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load_kv", self._connector_metadata)
        for load in getattr(self._connector_metadata, "loads", ()):
            if load.is_async:
                self._under_way.append((load, self.script.takes))
            else:
                self._write(load)

    def _write(self, load: Loaded) -> None:
        if load.is_broken:
            self.script.bad_blocks.setdefault(self.rank, set()).update(*load.blocks)
        if self.script.on_load is not None:
            self.script.on_load(self.rank, load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._note("save_kv_layer", layer_name)

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._note("get_transfer_results", set(finished_req_ids))
        results = self.script.reports.pop(self.rank, TransferResults())
        for load, _ in (each for each in self._under_way if not each[1]):
            self._write(load)
            results.finished_recving.add(load.request)
        self._under_way = [(load, left - 1) for load, left in self._under_way if left]
        return results

    if not _HAS_RESULTS:

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            results = self.get_transfer_results(finished_req_ids)
            return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.script.bad_blocks.pop(self.rank, set())

    def get_kv_connector_kv_cache_events(self) -> Any:
        return self.script.events.pop(self.rank, None)

    def build_connector_worker_meta(self) -> Any:
        return self.script.worker_meta.pop(self.rank, None)

    # both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.script.stats.pop(0) if self.script.stats else None

    def shutdown(self) -> None:
        self._note("shutdown")
        if self._thread is not None:
            self._thread.shutdown()


def _script_of(vllm_config: Any) -> Script:
    return SCRIPTS[vllm_config.kv_transfer_config.get_from_extra_config("tag", "")]


def wrap_hooks(connector: ScriptedConnector) -> None:
    """Wrap the hooks that a connector's script has as ``wrapped``, as a plug-in does after vLLM's factory."""

    def noted(hook: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        connector.script.calls.append((f"wrapped {hook}", None))
        return call(*args, **kwargs)

    for hook in connector.script.wrapped:
        setattr(connector, hook, partial(noted, hook, getattr(connector, hook)))
