"""Read the work of a step from the scheduler's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvobs.prediction.compute_cost import Work

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_TOKENS_PER_DECODE = 16  # at most, with speculative decoding


def work_of(output: SchedulerOutput) -> Work | None:
    """Return the work of a step; None without work, or with an encoder's input or recomputation after a preemption.

    Both cost more than their tokens, and vLLM lists the recomputation like a decode. A prefill is a request without
    output tokens. Decodes, up to hundreds, are counted and not visited: a prefill with one token left is counted as a
    decode.
    """
    total = output.total_num_scheduled_tokens
    if not total or output.scheduled_encoder_inputs:
        return None
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    if not output.scheduled_new_reqs and total == len(cached.num_output_tokens):  # as most steps
        return 0, 0, total, sum(cached.num_computed_tokens), 0
    tokens = pairs = 0
    prefills = len(output.scheduled_new_reqs)
    for new in output.scheduled_new_reqs:
        n = scheduled[new.req_id]
        tokens += n
        pairs += _pairs(n, new.num_computed_tokens)
    before, outputs = cached.num_computed_tokens, cached.num_output_tokens
    context, decoding, at = sum(before), len(outputs), -1
    for _ in range(0 if all(outputs) else outputs.count(0)):
        at = outputs.index(0, at + 1)
        n = scheduled[cached.req_ids[at]]
        prefills += 1
        tokens += n
        pairs += _pairs(n, before[at])
        context -= before[at]
        decoding -= 1
    decodes = total - tokens
    return None if decodes > _TOKENS_PER_DECODE * decoding else (tokens, pairs, decodes, context, prefills)


def _pairs(tokens: int, before: int) -> int:
    """Return how many tokens each token of a prefill attends to, added up."""
    return tokens * before + tokens * (tokens + 1) // 2
