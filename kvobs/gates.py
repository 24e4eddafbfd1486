"""Calls into a best-effort child: what they raise goes no further, and while the child is out most are not made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from kvobs.hooks import HOOKS, Cadence
from kvobs.recorder import Call, Recorder

# What vLLM reads as "nothing" where that is not None. Made anew for each answer.
NOTHING: dict[str, Callable[[], Any]] = {
    "get_num_new_matched_tokens": lambda: (0, False),
    "get_loaded_kv_cache_group_ids": lambda: (0,),
    "get_external_cache_hit_sources": dict,
    "register_finished_partial_tail": lambda: False,
    "request_finished": lambda: (False, None),
    "request_finished_all_groups": lambda: (False, None),
    "get_finished": lambda: (None, None),
    "get_block_ids_with_load_errors": set,
    "take_events": tuple,
    "has_pending_block_frees": lambda: False,
    "has_pending_push_work": lambda: False,
    "reset_cache": lambda: False,
}

NOT_WHILE_OUT = frozenset({
    *("get_num_new_matched_tokens", "register_finished_partial_tail"),
    *("has_pending_block_frees", "has_pending_push_work"),
    *("handle_preemptions", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "finish_forward", "wait_for_save"),
})  # fmt: skip
"""Hooks that are not called while a child is out. The others tell it what happens to the requests, and ask what has
become of the loads and saves that it began before; it has its metadata then, without which some don't answer."""


AT_ANY_TIME = frozenset({"reset_cache", "shutdown", "get_finished_count"})


def ends_for_good(hook: str) -> bool:
    """Return whether a child that failed in this hook can't be tried again: what happens once it has missed."""
    return HOOKS[hook].cadence is Cadence.ONCE and hook not in AT_ANY_TIME


class Gate:
    """The way into one isolated child, in one process.

    Args:
        child: its position.
        recorder: where errors are counted.
        nothing: answers of hooks beside those of ``NOTHING``.

    ``is_shut`` and ``on_failure`` belong to the side that calls the child. ``on_failure`` gets the hook and the
    arguments of the call.
    """

    def __init__(self, child: int, recorder: Recorder, **nothing: Callable[[], Any]) -> None:
        self.is_shut = False
        self.has_started = False  # whether start_load_kv was gone through since this was set to False
        self.on_failure: Callable[[str, tuple[Any, ...], Exception], None] | None = None
        self._child = child
        self._recorder = recorder
        self._nothing = {**NOTHING, **nothing}

    def guard(self, hook: str, call: Call) -> Call:
        """Return ``call`` so that nothing but what ends the process comes out of it; the call counts its own errors."""
        nothing = self._nothing.get(hook, _none)
        closes = hook in NOT_WHILE_OUT
        starts = hook == "start_load_kv"

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if closes and self.is_shut:
                return nothing()
            try:
                answer = call(*args, **kwargs)
            except Exception as error:
                if self.on_failure is not None:
                    self.on_failure(hook, args, error)
                return nothing()
            self.has_started |= starts
            return answer

        return guarded

    def guard_layer(self, hook: str, call: Call) -> Call:
        """Return ``call`` likewise; whoever calls it counts the call, and this its errors."""
        return self.guard(hook, partial(self._with_errors_counted, hook, call))

    def _with_errors_counted(self, hook: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._recorder.count_error(self._child, hook, begin, perf_counter_ns() - begin, error)
            raise


def _none() -> None:
    return None
