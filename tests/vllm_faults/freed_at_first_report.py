"""Abort a request during its load, with a save promised: its blocks are freed while the load writes into them."""

from typing import Any

from scheduling import BLOCK, add, make_scheduler, step
from vllm.v1.request import RequestStatus


def reproduce() -> dict[str, Any]:
    scheduler = make_scheduler(blocks=16)
    scheduler.connector.promises_saves = True
    add(scheduler, "a", tokens=8 * BLOCK, offered=7 * BLOCK)
    step(scheduler)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    step(scheduler, finished_sending={"a"})
    found = {"blocks that are not free": 15 - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}
    try:
        step(scheduler, finished_recving={"a"})
    except AssertionError:
        return found | {"at the end of the load": "AssertionError"}
    return found


if __name__ == "__main__":
    print(reproduce())
