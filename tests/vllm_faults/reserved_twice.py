"""Fail an asynchronous load with ``recompute``: twice its blocks must be free to load it again."""

from typing import Any

from scheduling import BLOCK, add, blocks_of, make_scheduler, step


def reproduce() -> dict[str, Any]:
    scheduler = make_scheduler(blocks=15)
    request = add(scheduler, "a", tokens=8 * BLOCK, offered=7 * BLOCK)
    step(scheduler)
    step(scheduler, finished_recving={"a"}, invalid_block_ids=set(blocks_of(scheduler, "a")))
    for _ in range(100):
        step(scheduler)
    return {
        "blocks that the request needs": 8,
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "after 100 steps": request.status.name,
    }


if __name__ == "__main__":
    print(reproduce())
