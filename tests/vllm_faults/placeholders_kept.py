"""Fail a synchronous load with ``recompute`` and async scheduling: the request runs with tokens that do not exist."""

from typing import Any

from scheduling import BLOCK, add, blocks_of, finish, make_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


def reproduce() -> dict[str, Any]:
    scheduler = make_scheduler(blocks=64, kind=AsyncScheduler)
    scheduler.connector.is_async = False
    request = add(scheduler, "a", tokens=4 * BLOCK + 1, offered=4 * BLOCK)
    first, second = scheduler.schedule(), scheduler.schedule()  # the scheduler is a step ahead of the workers
    finish(scheduler, first, invalid_block_ids=set(blocks_of(scheduler, "a")[:4]))
    third = scheduler.schedule()
    finish(scheduler, second)
    return {
        "tokens of the prompt": request.num_prompt_tokens,
        "tokens scheduled to recompute it": third.num_scheduled_tokens["a"],
        "tokens sent that were computed on the lost blocks": request.num_output_tokens,
    }


if __name__ == "__main__":
    print(reproduce())
