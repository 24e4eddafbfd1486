"""The answers that vLLM accepts from each hook, for connectors whose answers are not trusted: the isolated ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from operator import index
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.serial_utils import MsgpackEncoder

from kvobs.vllm_api import versions

Read = Callable[[Any, tuple[Any, ...]], Any]
"""Returns an answer as the router gets it, given the hook's arguments; raises if it is none that vLLM accepts."""

_as_dict = versions.stats_reader()
_ENCODER = MsgpackEncoder()  # hooks are called in one thread


class Answer(NamedTuple):
    """The answer of one hook: what vLLM accepts, in words and as code, and the answer that it takes for nothing."""

    allowed: str
    read: Read | None
    nothing: Callable[[], Any]  # made anew for each call


class MalformedAnswerError(TypeError):
    """A connector has answered what vLLM can't use."""

    def __init__(self, answer: object, allowed: str) -> None:
        super().__init__(f"returned {_shown(answer)}; allowed: {allowed}")


def _shown(answer: object) -> str:
    try:
        return f"{answer!r:.100}"
    except Exception:
        return f"an object of {type(answer).__name__}"


def _lookup(answer: Any, args: tuple[Any, ...]) -> tuple[int | None, bool]:
    tokens, is_async = answer
    if tokens is None:
        return None, False
    if type(tokens) is not int:
        if isinstance(tokens, bool):
            raise TypeError("a bool is not a number of tokens")
        tokens = index(tokens)
    if tokens <= 0:  # ExampleConnector may answer less than vLLM has itself
        return 0, False
    request, computed = args
    is_async = bool(is_async)
    # vLLM computes at least one token in the step of a synchronous load.
    if tokens > request.num_tokens - computed - (not is_async):
        raise ValueError("more tokens than the request has")
    return tokens, is_async


def _groups(answer: Any, _: object) -> tuple[int, ...]:
    return tuple(map(index, answer))


_SOURCES = versions.hit_sources()


def _hit_sources(answer: Any, _: object) -> dict[Any, int]:
    if not isinstance(answer, Mapping) or not _SOURCES.issuperset(answer):
        raise TypeError("not counts by source")
    return {source: index(tokens) for source, tokens in answer.items()}


def _flag(answer: Any, _: object) -> bool:
    return bool(answer)


def _finished(answer: Any, _: object) -> tuple[bool, Any]:
    promises, params = answer
    if params is not None:
        if not isinstance(params, Mapping) or not all(type(key) is str for key in params):
            raise TypeError("params are not a mapping with strings as keys")
        _ENCODER.encode(params)  # as vLLM does on the way to its API server
    return bool(promises), params


def requests_in(answer: Any) -> set[str]:
    """Return request ids as a set, the same object if it is one.

    Raises:
        TypeError: it is not an iterable of request ids.
    """
    requests = answer if isinstance(answer, set) else set(answer)
    if isinstance(answer, str):
        raise TypeError("a string is not a set of request ids")
    for request in requests:
        if not isinstance(request, str):
            raise TypeError("not a request id")
    return requests


def _pair(answer: Any, _: object) -> tuple[set[str], set[str]]:
    sent, received = answer
    return requests_in(sent or ()), requests_in(received or ())


RESULTS = ("finished_sending", "finished_recving", "failed_recving")


def _results(answer: Any, _: object) -> Any:
    sent, received, failed = answer.finished_sending, answer.finished_recving, answer.failed_recving
    if type(sent) is type(received) is type(failed) is set and not (sent or received or failed) and not _FURTHER:
        return answer  # most steps take this path
    sets = requests_in(sent), requests_in(received), requests_in(failed)
    is_as_vllm_has_it = sets[0] is sent and sets[1] is received and sets[2] is failed
    further = {name: getattr(answer, name) for name in _FURTHER}
    if not all(isinstance(value, _FURTHER[name]) for name, value in further.items()):
        raise TypeError("a field has the wrong type")
    return answer if is_as_vllm_has_it else _TRANSFER_RESULTS(**dict(zip(RESULTS, sets, strict=True)), **further)


_TRANSFER_RESULTS = versions.transfer_results()
_FURTHER = {name: type(getattr(_TRANSFER_RESULTS(), name)) for name in versions.further_results()}


def _bad_blocks(answer: Any, _: object) -> AbstractSet[int]:
    if type(answer) is set and not answer:
        return answer
    # vLLM does not accept a list; but what it contains must not be lost.
    blocks = answer if isinstance(answer, AbstractSet) else set(answer)
    if blocks and not all(isinstance(block, int) for block in blocks):
        blocks = set(map(index, blocks))
    return blocks


def read_stats(answer: Any, _: object = ()) -> Any:
    """Return stats that can be sent to the API server.

    Raises:
        Exception: they can't.
    """
    if answer is not None:
        if not isinstance(answer, KVConnectorStats):
            raise TypeError("no stats")
        pickle.dumps(answer)  # as vLLM does on the way to EngineCore
        _ENCODER.encode(_as_dict(answer))  # and to its API server
    return answer


def _handshake(answer: Any, _: object) -> Any:
    pickle.dumps(answer)
    return answer


def _context(answer: Any, _: object) -> Any:
    if answer is not None and not (hasattr(answer, "__enter__") and hasattr(answer, "__exit__")):
        raise TypeError("not a context manager")
    return answer


def _count(answer: Any, _: object) -> int | None:
    return None if answer is None else index(answer)


def read_layout(answer: Any, _: object = ()) -> str | None:
    """Return the name of a KV cache layout, or None; raise ``TypeError`` if it is neither."""
    if answer is not None and not isinstance(answer, str):
        raise TypeError("no layout")
    return answer


def _none(*_: object) -> None:
    return None


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


def _no_promise() -> tuple[bool, None]:
    return False, None


_TRUTH = "true or false"
_PROMISE = "whether it promises a save, and kv_transfer_params (a dict that can be encoded) or None"
NO_ANSWER = Answer("anything", None, _none)
ANSWERS: dict[str, Answer] = {
    "get_num_new_matched_tokens": Answer(
        "None, or how many tokens of the request it has beyond the computed ones (an int; at most all tokens, or all "
        "but one for a synchronous load), and whether the load is asynchronous",
        _lookup,
        lambda: (0, False),
    ),
    "get_loaded_kv_cache_group_ids": Answer("numbers of KV cache groups", _groups, lambda: (0,)),
    "get_external_cache_hit_sources": Answer("numbers of tokens by CacheHitSource", _hit_sources, dict),
    "can_load_prefix_replay_checkpoint": Answer(_TRUTH, _flag, _no),
    "register_finished_partial_tail": Answer(_TRUTH, _flag, _no),
    "request_finished": Answer(_PROMISE, _finished, _no_promise),
    "request_finished_all_groups": Answer(_PROMISE, _finished, _no_promise),
    "get_finished": Answer("two sets of request ids, sent and received, or None", _pair, lambda: (set(), set())),
    "get_transfer_results": Answer(
        f"an object with sets of request ids: {', '.join(RESULTS)}", _results, _TRANSFER_RESULTS or _none
    ),
    "get_block_ids_with_load_errors": Answer("a set of block ids", _bad_blocks, set),
    "take_events": Answer("an iterable of events", None, tuple),
    "has_pending_block_frees": Answer(_TRUTH, _flag, _no),
    "has_pending_push_work": Answer(_TRUTH, _flag, _no),
    "reset_cache": Answer("true or false, or None", None, _no),
    "get_kv_connector_stats": Answer("KVConnectorStats that can be pickled and encoded, or None", read_stats, _none),
    "get_handshake_metadata": Answer("an object that can be pickled, or None", _handshake, _none),
    "get_mem_pool_context": Answer("a context manager, or None", _context, _none),
    "get_finished_count": Answer("a number of workers, or None", _count, _none),
    # Asked of a class, or of a property.
    "get_required_kvcache_layout": Answer("the name of a layout, or None", read_layout, _none),
    # With piecewise graphs its layer hooks are called in any case.
    "requires_piecewise_for_cudagraph": Answer(_TRUTH, _flag, _yes),
    "supports_divergent_local_hybrid_hits": Answer(_TRUTH, _flag, _yes),  # the other connectors' answers count
    "requires_kv_delivery": Answer(_TRUTH, _flag, _no),
}
"""The hooks whose answer is read. Objects that go to the connector's own other side may be anything: they are pickled
one by one, and merged with care (see ``routing.metadata``)."""


def answer_of(hook: str) -> Answer:
    """Return what a hook may answer."""
    return ANSWERS.get(hook, NO_ANSWER)
