"""Contain the exceptions and malformed answers of a best-effort connector, and detect calls that take too long."""

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

from kvobs.connectors.answers import MalformedAnswerError, answer_of
from kvobs.connectors.endings import must_pass
from kvobs.probe.pure import Call
from kvobs.probe.recorder import NEVER, Recorder
from kvobs.vllm_api.hooks import HOOKS, Cadence

AT_ANY_TIME = frozenset({
    *("reset_cache", "shutdown", "get_finished_count"),
    *("supports_divergent_local_hybrid_hits", "requires_kv_delivery"),
})  # fmt: skip


def ends_for_good(hook: str) -> bool:
    """Return whether a connector that failed in this hook is disabled until a restart: the hook is called only once."""
    return HOOKS[hook].cadence is Cadence.ONCE and hook not in AT_ANY_TIME


class OnFailure(Protocol):
    """Receives a failed call: its hook, its arguments, and the error.

    ``slow_ns`` is its duration if it was also slow, else 0.
    """

    def __call__(self, hook: str, args: tuple[Any, ...], error: BaseException, slow_ns: int, /) -> None: ...


class Gate:
    """Guards the calls into one isolated connector, in one process.

    The calling side sets the rest. ``closed``: hooks that are currently not called. ``on_failure`` gets each call that
    raised, or whose answer vLLM can't use; ``on_slow`` the hook and the duration, without the process's pauses, of
    another call longer than ``slow_ns``. ``began``: whether ``start_load_kv`` succeeded since this was set to False.
    """

    def __init__(self, index: int, recorder: Recorder) -> None:
        self.closed: frozenset[str] = frozenset()
        self.began = False
        self.slow_ns = NEVER
        self.on_failure: OnFailure | None = None
        self.on_slow: Callable[[str, int], None] = _none
        self._index = index
        self._recorder = recorder

    def guard(self, hook: str, call: Call) -> Call:
        """Return ``call`` with its exceptions contained; the call counts its own errors."""
        allowed, read, nothing = answer_of(hook)
        begins = hook == "start_load_kv"
        ran_ns = self._recorder.pauses.ran_ns
        can_be_slow = HOOKS[hook].cadence in (Cadence.REQUEST, Cadence.STEP)

        def slow(start: int, spent: int) -> int:
            """Return the duration of a call if it was slow, else 0."""
            return ran if spent > self.slow_ns and can_be_slow and (ran := ran_ns(start, spent)) > self.slow_ns else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if hook in self.closed:
                return nothing()
            answer: Any = _UNANSWERED
            start = perf_counter_ns()
            try:
                answer = call(*args, **kwargs)
                if read is not None:
                    answer = read(answer, args)
            except BaseException as error:
                if must_pass(error):
                    raise
                spent = perf_counter_ns() - start
                if answer is not _UNANSWERED:  # the call itself counts as successful
                    error = MalformedAnswerError(answer, allowed)
                    self._recorder.count_error(self._index, hook, start, spent, error)
                if self.on_failure is not None:
                    self.on_failure(hook, args, error, slow(start, spent))
                return nothing()
            self.began |= begins
            spent = perf_counter_ns() - start
            if spent > self.slow_ns and (ran := slow(start, spent)):
                self.on_slow(hook, ran)
            return answer

        return guarded

    def fail(self, hook: str, error: BaseException) -> None:
        """Report a failure that shows after the call."""
        now = perf_counter_ns()
        self._recorder.count_error(self._index, hook, now, 0, error)
        if self.on_failure is not None:
            self.on_failure(hook, (), error, 0)

    def guard_layer(self, hook: str, call: Call) -> Call:
        """Return a layer hook's call with its exceptions contained and counted; the caller counts the call."""
        return self.guard(hook, partial(self._with_errors_counted, hook, call))

    def _with_errors_counted(self, hook: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self._recorder.count_error(self._index, hook, begin, perf_counter_ns() - begin, error)
            raise


_UNANSWERED = object()


def _none(*_: object) -> None:
    return None
