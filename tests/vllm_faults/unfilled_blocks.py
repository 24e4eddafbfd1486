"""Fail a synchronous load with ``recompute``: another request hits its blocks before they are computed."""

from typing import Any

from scheduling import BLOCK, add, blocks_of, finish, make_scheduler, step
from vllm.v1.request import RequestStatus


def reproduce() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in ("the client leaves", "chunks"):
        scheduler = make_scheduler(blocks=64)
        scheduler.connector.is_async = False
        scheduler.scheduler_config.long_prefill_token_threshold = 2 * BLOCK
        add(scheduler, "a", tokens=8 * BLOCK + 1, offered=8 * BLOCK)
        scheduled = scheduler.schedule()
        finish(scheduler, scheduled, invalid_block_ids=set(blocks_of(scheduler, "a")[:8]))
        if case == "the client leaves":
            scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        add(scheduler, "b", tokens=8 * BLOCK + 1)
        found[case] = step(scheduler)
    return found


if __name__ == "__main__":
    print(reproduce())
