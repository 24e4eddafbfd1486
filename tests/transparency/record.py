"""What a run leaves behind: one entry for each call into a child and for each thing that vLLM's scheduler did.

Arguments are copied into plain values at the moment of the call, because vLLM changes its objects afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

VLLM, MARK = "vllm", "mark"

LONG = 24
"""Lists of numbers that are longer are kept as their length and a hash."""

NOT_COMPARED = {
    "sampling_params",
    "pooling_params",
    "lora_request",
    "mm_features",
    "kv_connector_block_state",
    "kv_connector_metadata",  # the router's own
}
"""Fields of vLLM's own objects that do not compare by value, or that no child looks at."""


class Cause(Enum):
    """Why a life goes another way under kvobs from here on, and what vLLM's class does then."""

    STRAY_RECEIPT = "W1: a child reports a load as received that is not its own"
    STRAY_FAILURE = "W2: a child reports a load as failed that is not its own"
    STRAY_SAVE = "W12: a child reports a save that it did not promise, or reported before"
    EARLY_SAVE = "W12: a child reports a save before its promise is known"
    TAILS = "W12: a partial tail is accepted by a child that promises nothing else; stock does not count it"
    STRAY_BLOCKS = "W16: a child reports bad blocks inside another child's load"
    TWO_COMPLETIONS = "W20: a request ends during its async load, and a child promises to save it"
    COUNTED_FAILURE = "W11: a load fails in a child that says that one rank's report is enough"
    OFFERED_AGAIN = "W14: a child whose load of a request failed offers it again before that has run"


class Entry(NamedTuple):
    """One call, or one thing that vLLM did."""

    step: int
    who: str  # "child 0 scheduler", "child 1 rank 0", "vllm" or "mark"
    hook: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.arguments))
        return f"{self.who}: {self.hook}({listed})"


@dataclass
class Run:
    """What came of one life with one router."""

    router: str
    entries: list[Entry] = field(default_factory=list)
    step: int = 0
    error: str | None = None  # what ended the engine
    left: str | None = None  # what was left when nothing more happened: requests, blocks
    causes: list[Cause] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)  # how often what is to be compared happened at all
    _schedule: tuple[Any, Any] = (None, None)  # the last scheduler output and its copy; all children get the same

    def note(self, who: str, hook: str, *arguments: Any) -> None:
        self.entries.append(Entry(self.step, who, hook, tuple([self._plain(each) for each in arguments])))

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, SchedulerOutput):
            return plain(value)
        if self._schedule[0] is not value:
            self._schedule = (value, plain(value))
        return self._schedule[1]

    def mark(self, cause: Cause, *arguments: Any) -> None:
        """Note that what follows need not be the same."""
        self.causes.append(cause)
        self.note(MARK, cause.name, *arguments)


def plain(value: Any) -> Any:
    """Return a copy of ``value`` that compares by content and never changes."""
    for types, copy in _COPIES:
        if isinstance(value, types):
            return copy(value)
    names = _compared_fields(value.__class__)
    if names:
        return (type(value).__name__, *[(name, plain(getattr(value, name))) for name in names])
    return "callable" if callable(value) and not isinstance(value, type) else type(value).__name__


@cache
def _compared_fields(cls: Hashable) -> tuple[str, ...]:
    """Return the fields of a dataclass that are compared; vLLM's forward context is known by its name alone."""
    if not is_dataclass(cls) or cls is ForwardContext:
        return ()
    return tuple(each.name for each in fields(cls) if each.name not in NOT_COMPARED)


def _request(request: Request) -> tuple[Any, ...]:
    return (
        "request",
        request.request_id,
        request.status.name,
        request.num_computed_tokens,
        request.num_tokens,
        request.num_preemptions,
    )


def _sequence(values: list[Any] | tuple[Any, ...]) -> Any:
    if len(values) > LONG and all(isinstance(each, int) for each in values):
        return f"{len(values)} numbers, {hash(tuple(values)):x}"
    return tuple([plain(each) for each in values])


_COPIES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((type(None), bool, int, float, str, bytes), lambda value: value),
    (Request, _request),
    ((list, tuple), _sequence),
    ((set, frozenset), lambda value: ("set", *sorted(map(plain, value), key=repr))),
    (dict, lambda value: ("dict", *sorted(((plain(k), plain(v)) for k, v in value.items()), key=repr))),
    (KVCacheBlocks, lambda value: ("blocks", plain(value.get_block_ids()))),
    (Enum, lambda value: value.name),
)
