"""Fifteen faults of routing, each put into kvobs while it runs: the comparison with vLLM's own router must find all.

    python -m tests.transparency.planted_faults [NAME ...]

They are not in kvobs's source, where an operator would change one place: each is what a router may do wrong and real
connectors would break by, however kvobs is written.
"""

import copy
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.transparency.mutation import EVERY, LATER, SCHEDULER, WORKER, Mutation, mutated
from tests.transparency.sweep import SEEDS, first_faulty


@contextmanager
def _without(scheduled: Any, field: str, empty: Any) -> Iterator[None]:
    """Hide a field of the scheduler's output for a while."""
    hidden = getattr(scheduled, field)
    setattr(scheduled, field, empty)
    try:
        yield
    finally:
        setattr(scheduled, field, hidden)


def _hiding(field: str, empty: Any) -> Any:
    def build(plain: Any, scheduled: Any) -> Any:
        with _without(scheduled, field, empty):
            return plain(scheduled)

    return build


def _forgotten(ask: Any, *arguments: Any) -> list[Any]:
    list(ask(*arguments))
    return []


def _dropped(ask: Any) -> None:
    ask()


def _without_sources(connector: Any, ask: Any, request: Any, tokens: int) -> Any:
    ask(request, tokens)
    return KVConnectorBase_V1.get_external_cache_hit_sources(connector, request, tokens)


def _swallowed(say: Any, *arguments: Any) -> None:
    with suppress(Exception):
        say(*arguments)


def _unless_preempted(say: Any, request: Any, blocks: Any, tokens: int) -> None:
    if tokens or not request.num_preemptions:
        say(request, blocks, tokens)


def _asking_all(connector: Any, ask: Any) -> bool:
    return True in [sub_connector.has_pending_push_work() for sub_connector in connector._connectors]


def _one_at_a_time(connector: Any, update: Any, output: Any) -> None:
    """Give vLLM the first of a step's receipts, and the others one step later."""
    update(output)
    late = vars(connector).setdefault("late", set())
    received = sorted(output.finished_recving or ())
    output.finished_recving = {*received[:1], *late} or None
    connector.late = set(received[1:])


def _backwards(connector: Any, handle: Any, metadata: Any) -> None:
    for sub_connector, own in reversed([*zip(connector._connectors, metadata.metadata, strict=True)]):
        sub_connector.handle_preemptions(own)


ROUTING_FAULTS = {
    "connectors get a copy of the request": Mutation(
        SCHEDULER, "get_num_new_matched_tokens", lambda ask, request, *more: ask(copy.copy(request), *more), EVERY
    ),
    "the scheduler's output changes between two connectors": Mutation(
        SCHEDULER, "build_connector_meta", _hiding("num_scheduled_tokens", {}), LATER
    ),
    "a connector's events are lost": Mutation(SCHEDULER, "take_events", _forgotten, LATER),
    "hit sources are asked and dropped": Mutation(SCHEDULER, "get_external_cache_hit_sources", _without_sources),
    "keywords of a layer's save are dropped": Mutation(
        WORKER, "save_kv_layer", lambda save, *arguments, **more: save(*arguments), EVERY
    ),
    "kv_layer and attn_metadata are swapped": Mutation(
        WORKER, "save_kv_layer", lambda save, name, kv, attn, **more: save(name, attn, kv, **more), EVERY
    ),
    "the block state is withheld from later connectors": Mutation(
        SCHEDULER, "build_connector_meta", _hiding("kv_connector_block_state", None), LATER
    ),
    "a connector's exception is swallowed": Mutation(SCHEDULER, "update_state_after_alloc", _swallowed, EVERY),
    "stats of later connectors are dropped": Mutation(WORKER, "get_kv_connector_stats", _dropped, LATER),
    "a preempted request's allocation skips the others": Mutation(
        SCHEDULER, "update_state_after_alloc", _unless_preempted, EVERY
    ),
    "a frozenset instead of a set": Mutation(
        WORKER, "get_transfer_results", lambda ask, finished: ask(frozenset(finished)), EVERY
    ),
    "all connectors are asked for pending work": Mutation(SCHEDULER, "has_pending_push_work", _asking_all),
    "drafts are hidden": Mutation(
        SCHEDULER, "build_connector_meta", _hiding("scheduled_spec_decode_tokens", {}), EVERY
    ),
    "a step's second receipt is one step late": Mutation(SCHEDULER, "update_connector_output", _one_at_a_time),
    "preemptions are handed out in reverse": Mutation(WORKER, "handle_preemptions", _backwards),
}


def main(names: list[str]) -> int:
    """Put one fault after the other into kvobs, and print in which life the comparison finds it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints, too
    missed = 0
    for name in names or ROUTING_FAULTS:
        began = time.monotonic()
        with mutated(ROUTING_FAULTS[name]):
            verdict = first_faulty(SEEDS)
        missed += verdict is None
        found = f"life {verdict.life.seed}" if verdict is not None else "missed"
        where = (verdict.fault or "").partition(": the calls differ")[0] if verdict is not None else ""
        print(f"{name:<54}{found:<10}{time.monotonic() - began:6.1f} s  {where}", file=out, flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
