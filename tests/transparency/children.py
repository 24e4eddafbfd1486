"""Recording connectors: every hook that this vLLM knows is noted with its arguments, then answered as the life says.

A hook that a child calls on itself (vLLM's base class does that) is not noted: no router makes that call.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from tests.transparency.behaviour import Books, SchedulerHalf, WorkerHalf
from tests.transparency.life import FULL, LEAN, PLAIN, Life
from tests.transparency.messages import Count, Events, Handshake
from tests.transparency.record import Run

SOURCES: Any = [*getattr(base, "CacheHitSource", ())]  # vLLM before 0.31 has none
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)  # vLLM before 0.30 has none

STAGES: dict[str, Stage] = {}
"""By the tag that is in a child's extra config: what its parts share."""


class ChildError(Exception):
    """What a child raises, if it does."""


@dataclass
class Stage:
    """One life with one router."""

    life: Life
    run: Run
    books: Books = field(init=False)

    def __post_init__(self) -> None:
        self.books = Books(self.life, self.run)


class Answers(KVConnectorBase_V1):
    """What the hooks answer; those that are not here do what vLLM's base class does."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        stage = STAGES[self._kv_transfer_config.get_from_extra_config("stage", "")]
        self.index = index = self._kv_transfer_config.get_from_extra_config("child", 0)
        self.run, self.is_within = stage.run, False
        self.raises, self.calls_left = stage.life.children[index].raises
        if role is KVConnectorRole.SCHEDULER:
            self.who = f"child {index} scheduler"
            self.half = SchedulerHalf(stage.life, index, stage.books)
        else:
            rank = vllm_config.parallel_config.rank
            self.who = f"child {index} rank {rank}"
            self.worker = WorkerHalf(stage.life, index, rank, stage.books)

    def note(self, hook: str, *arguments: Any) -> None:
        """Note a call of a hook; raise if it is the one at which this child does."""
        self.run.note(self.who, hook, *arguments)
        if hook == self.raises:
            self.calls_left -= 1
            if not self.calls_left:
                raise ChildError(f"{self.who} in {hook}")

    # scheduler

    def on_get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.half.lookup(request, num_computed_tokens)

    def on_get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (self.index % self.half.life.groups,)

    def on_get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return {SOURCES[self.index]: num_external_tokens}

    def on_update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.half.allocated(request, blocks, num_external_tokens)

    def on_build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.half.message()

    def on_update_connector_output(self, connector_output: Any) -> None:
        self.half.read_output(connector_output)

    def on_request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.half.end(request, (block_ids,))

    def on_request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.half.end(request, block_ids)

    def on_register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        return self.half.takes_tail(request)

    def on_get_finished_count(self) -> int | None:
        return 1 if self.half.life.one_reports else None

    def on_take_events(self) -> Any:
        has_any = self.half.at_times(self.half.character.chats, "events")
        events = [f"an event of child {self.index}"] if has_any else []
        return iter(events) if self.half.index % 2 else events

    def on_has_pending_block_frees(self) -> bool:
        return self.half.at_times(self.half.character.block_frees, "frees")

    def on_has_pending_push_work(self) -> bool:
        return self.half.at_times(self.half.character.chats / 3, "push")

    def on_reset_cache(self) -> bool | None:
        return (None, True, False)[int(self.half.dice("reset") * 3)]

    def on_set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Take those of every stage; vLLM's base class raises."""

    set_xfer_handshake_metadata_pp_aware = on_set_xfer_handshake_metadata_pp_aware  # a lean child's too

    # worker

    def on_bind_connector_metadata(self, connector_metadata: Any) -> None:
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
        self.worker.take(connector_metadata)

    def on_start_load_kv(self, forward_context: Any, **more: Any) -> None:
        assert self.has_connector_metadata()

    def on_wait_for_layer_load(self, layer_name: str) -> None:
        assert self.has_connector_metadata()

    def on_save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        assert self.has_connector_metadata()

    def on_wait_for_save(self) -> None:
        assert self.has_connector_metadata()

    def on_get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        saved, received, failed = self.worker.results()
        return TransferResults(finished_sending=saved, finished_recving=received, failed_recving=failed)

    def on_get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, received, _ = self.worker.results(can_fail=False)
        return saved or None, received or None

    def on_get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.bad_blocks()

    def on_get_kv_connector_kv_cache_events(self) -> Events | None:
        return Events([f"{self.who} {self.worker.step}"]) if self.worker.at_times("events") else None

    def on_build_connector_worker_meta(self) -> Any:
        return self.worker.note()

    def on_get_handshake_metadata(self) -> Handshake:
        return Handshake(self.worker.index, self.worker.rank)

    # both

    def on_get_kv_connector_stats(self) -> Count | None:
        if self.role is KVConnectorRole.WORKER:
            has_any = self.worker.at_times("stats")
        else:
            has_any = self.half.at_times(self.half.character.chats, "stats")
        return Count.of(f"child {self.index}") if has_any else None


def _noting(name: str, plain_hook: Any) -> Any:
    """Return the hook ``name`` with a note of each call."""

    @functools.wraps(plain_hook)
    def hook(self: Answers, *arguments: Any, **more: Any) -> Any:
        answer = getattr(self, f"on_{name}", None) or functools.partial(plain_hook, self)
        if self.is_within:
            return answer(*arguments, **more)
        self.note(name, *arguments, *chain.from_iterable(sorted(more.items())))
        self.is_within = True
        try:
            return answer(*arguments, **more)
        finally:
            self.is_within = False

    vars(hook).pop("__isabstractmethod__", None)
    return hook


def _hooks(*classes: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in classes:
        for name, member in vars(cls).items():
            if not name.startswith("_") and inspect.isfunction(member) and name != "has_connector_metadata":
                found[name] = _noting(name, member)
    return found


_NEEDED = {
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "request_finished_all_groups",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
}
"""What a lean child has of its own; ``get_finished`` is how connectors of before vLLM 0.30 report."""

_ALL, _OF_HMA = _hooks(KVConnectorBase_V1), _hooks(SupportsHMA)

Full: Any = type("Full", (Answers, SupportsHMA), {**_ALL, **_OF_HMA})
Plain: Any = type("Plain", (Answers,), _ALL)
Lean: Any = type(
    "Lean", (Answers, SupportsHMA), {name: hook for name, hook in {**_ALL, **_OF_HMA}.items() if name in _NEEDED}
)
for _made in (Full, Plain, Lean):
    _made.__module__ = __name__

CLASSES = {FULL: "Full", PLAIN: "Plain", LEAN: "Lean"}
