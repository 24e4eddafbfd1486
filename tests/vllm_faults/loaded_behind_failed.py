"""Fail an asynchronous load with ``recompute``: loaded requests behind it hold the blocks that it waits for."""

from typing import Any

from scheduling import BLOCK, add, blocks_of, make_scheduler, step
from vllm.v1.request import RequestStatus


def reproduce() -> dict[str, Any]:
    scheduler = make_scheduler(blocks=21)
    for first, (name, tokens, offered) in enumerate([("a", 6, 5), ("b", 8, 1), ("c", 14, 1)]):
        add(scheduler, name, tokens=tokens * BLOCK, offered=offered * BLOCK, first=first)
    step(scheduler)
    step(scheduler, finished_recving={"a", "b", "c"}, invalid_block_ids=set(blocks_of(scheduler, "a")))
    computed = sum(sum(step(scheduler).values()) for _ in range(100))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    return {"tokens in 100 steps": computed, "free blocks": free, "next step, with a aborted": step(scheduler)}


if __name__ == "__main__":
    print(reproduce())
