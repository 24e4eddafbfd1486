"""The table of hooks, bound to the children: one callable for each hook whose answers combine by a general rule.

The callables become attributes of the connector instance, so that a hook costs one call and its children's. A child
whose hook is provably empty is not called at all: most connectors leave most of the layer hooks empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import Any

from kvobs import faults
from kvobs.children import Child
from kvobs.hooks import HOOKS, Combine, Hook
from kvobs.notices import log
from kvobs.recorder import SUM, Call, Durations, Recorder


def bind(
    connector: object, children: Sequence[Child], known_to_host: Callable[[str], bool], recorder: Recorder
) -> None:
    """Bind every general hook that this vLLM knows to ``connector``, as recorded calls into the children."""
    for hook in HOOKS.values():
        rule = RULES.get(hook.combine)
        if rule is None or hook.is_property or hook.side.value == "config" or not known_to_host(hook.name):
            continue
        make = _PER_LAYER.get(hook.name)
        setattr(connector, hook.name, make(children, recorder) if make is not None else rule(hook, children))


def _each(hook: Hook, children: Sequence[Child]) -> Call:
    calls = tuple(getattr(child, hook.name) for child in children if child.does(hook.name))

    def each(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return each


# The hooks of a layer, called for every layer of every step: one clock read ends one child's time and begins the
# next one's, and all that is needed is bound as defaults, which stay in the cache between layers where closures do not.
LayerCalls = tuple[tuple[Call, Durations, int], ...]  # call, where its durations go, the child's position


def _layer_calls(hook: str, children: Sequence[Child], recorder: Recorder) -> LayerCalls:
    return tuple(
        (getattr(child.connector, hook), recorder.durations(child.index, hook), child.index)
        for child in children
        if child.does(hook)
    )


def _wait_for_layer_load(children: Sequence[Child], recorder: Recorder) -> Call:
    hook = "wait_for_layer_load"
    calls = _layer_calls(hook, children, recorder)

    def wait_for_layer_load(
        layer_name: str,
        _calls: LayerCalls = calls,
        _clock: Callable[[], int] = perf_counter_ns,
        _slow_ns: float = recorder.slow_ns(hook),
    ) -> None:
        start = _clock()
        for call, durations, child in _calls:
            try:
                call(layer_name)
            except BaseException as error:
                recorder.failed(child, hook, _clock() - start, error)
                raise
            try:
                now = _clock()
                spent = now - start
                start = now
                durations[(spent - 1).bit_length()] += 1
                durations[SUM] += spent
                if spent > _slow_ns:
                    recorder.slow(child, hook, spent)
            except Exception:
                faults.contain("record")

    def nothing(layer_name: str) -> None:
        """Cost half of a loop over no calls."""

    return wait_for_layer_load if calls else nothing


def _save_kv_layer(children: Sequence[Child], recorder: Recorder) -> Call:
    hook = "save_kv_layer"
    calls = _layer_calls(hook, children, recorder)

    def save_kv_layer(
        layer_name: str,
        kv_layer: Any,
        attn_metadata: Any,
        _calls: LayerCalls = calls,
        _clock: Callable[[], int] = perf_counter_ns,
        _slow_ns: float = recorder.slow_ns(hook),
        **kwargs: Any,
    ) -> None:
        start = _clock()
        for call, durations, child in _calls:
            try:
                if kwargs:
                    call(layer_name, kv_layer, attn_metadata, **kwargs)
                else:  # as vLLM calls it
                    call(layer_name, kv_layer, attn_metadata)
            except BaseException as error:
                recorder.failed(child, hook, _clock() - start, error)
                raise
            try:
                now = _clock()
                spent = now - start
                start = now
                durations[(spent - 1).bit_length()] += 1
                durations[SUM] += spent
                if spent > _slow_ns:
                    recorder.slow(child, hook, spent)
            except Exception:
                faults.contain("record")

    def nothing(layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Cost half of a loop over no calls."""

    return save_kv_layer if calls else nothing


_PER_LAYER: dict[str, Callable[[Sequence[Child], Recorder], Call]] = {
    "wait_for_layer_load": _wait_for_layer_load,
    "save_kv_layer": _save_kv_layer,
}


def _guarded(hook: Hook, children: Sequence[Child]) -> Call:
    def guarded(*args: Any, **kwargs: Any) -> None:
        call_all(hook.name, children, *args, **kwargs)

    return guarded


def call_all(name: str, children: Iterable[Child], *args: Any, **kwargs: Any) -> list[Any]:
    """Call a hook of every child, also after one raised; raise the first error when all were called."""
    answers = []
    first: Exception | None = None
    for child in children:
        try:
            answers.append(getattr(child, name)(*args, **kwargs))
        except Exception as error:
            log.exception("connector %r raised in %s; its siblings are called all the same", child.name, name)
            first = first or error
    if first is not None:
        raise first
    return answers


def _any(hook: Hook, children: Sequence[Child]) -> Call:
    calls = _calls(hook, children)
    return lambda *args, **kwargs: any(call(*args, **kwargs) for call in calls)


def _chain(hook: Hook, children: Sequence[Child]) -> Call:
    calls = _calls(hook, children)
    return lambda *args, **kwargs: [item for call in calls for item in call(*args, **kwargs) or ()]


def _calls(hook: Hook, children: Sequence[Child]) -> tuple[Call, ...]:
    return tuple(getattr(child, hook.name) for child in children)


RULES: dict[Combine, Callable[[Hook, Sequence[Child]], Call]] = {
    Combine.EACH: _each,
    Combine.GUARDED: _guarded,
    Combine.ANY: _any,
    Combine.CHAIN: _chain,
}
