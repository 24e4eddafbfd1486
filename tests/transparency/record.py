"""What a run leaves behind: one entry for each call into a connector and for each thing that vLLM's scheduler did.

Arguments are copied into plain values at each call, because vLLM, or a router, may change its objects afterwards.
Beside the values stands which object each was: the same one for all connectors, or a copy.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched import output as scheduled
from vllm.v1.request import Request

from tests.transparency.messages import COUNTED

VLLM, MARK = "vllm", "mark"

LONG = 24
"""Lists of numbers that are longer are kept as their length and a hash."""

NOT_COMPARED = {
    "sampling_params",
    "pooling_params",
    "lora_request",
    "mm_features",
    "kv_connector_metadata",  # the router's own
}
"""Fields of vLLM's own objects that do not compare by value, or that no connector looks at."""


class Cause(Enum):
    """Why a life goes another way under kvobs from here on, and what vLLM's class does then."""

    STRAY_RECEIPT = "W1: a connector reports a load as received that is not its own"
    STRAY_FAILURE = "W2: a connector reports a load as failed that is not its own"
    STRAY_SAVE = "W12: a connector reports a save that it did not promise, or reported before"
    EARLY_SAVE = "W12: a connector reports a save before its promise is known"
    TAILS = "W12: a partial tail is accepted by a connector that promises nothing else; stock does not count it"
    TWO_COMPLETIONS = "W20: a request ends during its async load, and a connector promises to save it"
    COUNTED_FAILURE = "W11: a load fails in a connector that says that one rank's report is enough"
    OFFERED_AGAIN = "W14: a connector whose load of a request failed offers it again before that has run"


class Entry(NamedTuple):
    """One call, or one thing that vLLM did."""

    step: int
    who: str  # "connector 0 scheduler", "connector 1 rank 0", "vllm" or "mark"
    hook: str
    arguments: tuple[Any, ...]
    objects: tuple[int, ...] = ()  # by argument: which object it is; 0 for constants and callables

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
    raised: str | None = None  # by which connector, if it was one's exception
    is_over: bool = False  # what follows looks for what is left: no connector raises in it
    left: str | None = None  # what was left when nothing more happened: requests, blocks
    causes: list[Cause] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)  # how often what is to be compared happened at all
    _objects: dict[int, tuple[int, Any]] = field(default_factory=dict)  # kept, so that none gets another's id

    def note(self, who: str, hook: str, *arguments: Any) -> None:
        copies = tuple([plain(each) for each in arguments])
        self.entries.append(Entry(self.step, who, hook, copies, tuple([self._number(each) for each in arguments])))

    def _number(self, value: Any) -> int:
        if isinstance(value, _WITHOUT_IDENTITY) or callable(value):
            return 0
        return self._objects.setdefault(id(value), (len(self._objects) + 1, value))[0]

    def forget(self) -> None:
        """Let the objects go: the life is over."""
        self._objects.clear()

    def spares(self, request: str) -> bool:
        """Return whether no failure of this request's load may be reported by another connector."""
        return False

    def doubt(self, request: str = "", block: int = 0) -> None:
        """Note that another connector reports a failure of this request's load, or of loads into a block."""

    def mark(self, cause: Cause, *arguments: Any) -> None:
        """Note that what follows need not be the same."""
        self.causes.append(cause)
        self.note(MARK, cause.name, *arguments)


_WITHOUT_IDENTITY = (type(None), bool, int, float, str, bytes, tuple)


def plain(value: Any) -> Any:
    """Return a copy of ``value`` that compares by type and content and never changes."""
    return _copy_of(value.__class__)(value)


@cache
def _copy_of(cls: Any) -> Callable[[Any], Any]:
    """Return what copies the values of a class; of those that are not listed only the class is compared."""
    for types, copy in _COPIES:
        if issubclass(cls, types):
            return copy
    kind = cls.__name__
    # vLLM's forward context is known by its name alone.
    if is_dataclass(cls) and cls is not ForwardContext:
        names = tuple(each.name for each in fields(cls) if each.name not in NOT_COMPARED)
        return lambda value: (kind, *[(name, plain(getattr(value, name))) for name in names])
    return lambda value: "callable" if callable(value) and not isinstance(value, type) else kind


def _request(request: Request) -> tuple[Any, ...]:
    return (
        "request",
        request.request_id,
        request.status.name,
        request.num_computed_tokens,
        request.num_tokens,
        request.num_preemptions,
        request.num_output_placeholders,
        len(request.spec_token_ids),
    )


def _sequence(values: list[Any] | tuple[Any, ...]) -> Any:
    kind = type(values).__name__
    if len(values) > LONG and all(isinstance(each, int) for each in values):
        return f"{kind} of {len(values)} numbers, {hash(tuple(values)):x}"
    return (kind, *[plain(each) for each in values])


def _set(values: set[Any] | frozenset[Any]) -> tuple[Any, ...]:
    kind = "set" if isinstance(values, set) else "frozenset"  # also one that is read in order
    return (kind, *sorted(map(plain, values), key=repr))


def _block_state(state: Any) -> tuple[Any, ...]:
    """Return what a connector may ask for: the blocks are resolved when it asks."""
    blocks = [(name, plain(state.get_block_ids(name))) for name in sorted(state.req_ids)]
    return ("block state", *blocks, plain(state.boundary_state_offloads))


def counted(stats: Any) -> tuple[tuple[str, int], ...]:
    """Return what the connectors counted, by connector, wherever in stats or their plain form it is."""
    return tuple(sorted(_counts_in(stats).items()))


def _counts_in(stats: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    items = stats.data if isinstance(stats, KVConnectorStats) else stats
    for key, value in items.items() if isinstance(items, Mapping) else ():
        if isinstance(key, str) and key.startswith(COUNTED):
            found[key] += value
        else:
            found.update(_counts_in(value))
    return found


_COPIES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (bool, str),  # 1 is equal to True
    (Enum, lambda value: value.name),
    ((type(None), int, float, str, bytes), lambda value: value),
    (Request, _request),
    ((list, tuple), _sequence),
    ((set, frozenset), _set),
    (dict, lambda value: ("dict", *[(plain(key), plain(each)) for key, each in value.items()])),
    (KVCacheBlocks, lambda value: ("blocks", plain(value.get_block_ids()))),
    (getattr(scheduled, "KVConnectorBlockState", ()), _block_state),  # vLLM 0.28 has none
    (KVConnectorStats, counted),
)
