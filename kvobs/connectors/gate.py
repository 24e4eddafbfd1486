"""Contain the exceptions and malformed answers of a best-effort connector, and detect calls that take too long."""

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from kvobs.probe.pure import Call
from kvobs.probe.recorder import NEVER, Recorder
from kvobs.vllm_api.hooks import HOOKS, Cadence

# Answers that vLLM reads as "nothing", if not None. Created anew for each call.
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


def _read_lookup(answer: Any) -> object:
    tokens, _ = answer
    return tokens is None or tokens > 0


def _read_pair(answer: Any) -> object:
    first, second = answer
    return first, second


READ: dict[str, Callable[[Any], object]] = {
    "get_num_new_matched_tokens": _read_lookup,
    "request_finished": _read_pair,
    "request_finished_all_groups": _read_pair,
    "get_finished": _read_pair,
}
"""Read an answer as the router will, whose exceptions nobody contains."""

AT_ANY_TIME = frozenset({"reset_cache", "shutdown", "get_finished_count"})


def ends_for_good(hook: str) -> bool:
    """Return whether a connector that failed in this hook is disabled until a restart: the hook is called only once."""
    return HOOKS[hook].cadence is Cadence.ONCE and hook not in AT_ANY_TIME


class Gate:
    """Guards the calls into one isolated connector, in one process; ``nothing`` is more of ``NOTHING``.

    The calling side sets the rest. ``closed``: hooks that are currently not called. ``on_failure`` gets the hook, the
    arguments and the error of a call that raised, or whose answer can't be read; ``on_slow`` the hook and the duration,
    without the process's pauses, of a call longer than ``slow_ns``. ``began``: whether ``start_load_kv`` succeeded
    since this was set to False.
    """

    def __init__(self, child: int, recorder: Recorder, **nothing: Callable[[], Any]) -> None:
        self.closed: frozenset[str] = frozenset()
        self.began = False
        self.slow_ns = NEVER
        self.on_failure: Callable[[str, tuple[Any, ...], Exception], None] | None = None
        self.on_slow: Callable[[str, int], None] = _none
        self._child = child
        self._recorder = recorder
        self._nothing = {**NOTHING, **nothing}

    def guard(self, hook: str, call: Call) -> Call:
        """Return ``call`` with its exceptions contained; the call counts its own errors."""
        nothing, read = self._nothing.get(hook, _none), READ.get(hook, _none)
        begins = hook == "start_load_kv"
        ran_ns = self._recorder.pauses.ran_ns
        can_be_slow = HOOKS[hook].cadence in (Cadence.REQUEST, Cadence.STEP)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if hook in self.closed:
                return nothing()
            start = perf_counter_ns()
            try:
                answer = call(*args, **kwargs)
                read(answer)
            except Exception as error:
                if self.on_failure is not None:
                    self.on_failure(hook, args, error)
                answer = nothing()
            else:
                self.began |= begins
            spent = perf_counter_ns() - start
            if spent > self.slow_ns and can_be_slow and (ran := ran_ns(start, spent)) > self.slow_ns:
                self.on_slow(hook, ran)
            return answer

        return guarded

    def guard_layer(self, hook: str, call: Call) -> Call:
        """Return a layer hook's call with its exceptions contained and counted; the caller counts the call."""
        return self.guard(hook, partial(self._with_errors_counted, hook, call))

    def _with_errors_counted(self, hook: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._recorder.count_error(self._child, hook, begin, perf_counter_ns() - begin, error)
            raise


def _none(*_: object) -> None:
    return None
