"""The table of hooks, bound to the children: one callable for each hook whose answers combine by a general rule.

The callables become attributes of the connector instance, so that a hook costs one call and its children's. A child
whose hook is provably empty is not called at all: most connectors leave most of the layer hooks empty.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvobs.children import Child
from kvobs.hooks import HOOKS, Combine, Hook
from kvobs.notices import log

Call = Callable[..., Any]


def bind(connector: object, children: Sequence[Child], known_to_host: Callable[[str], bool]) -> None:
    """Bind every general hook that this vLLM knows to ``connector``, as calls into the children."""
    for hook in HOOKS.values():
        rule = RULES.get(hook.combine)
        if rule is None or hook.is_property or hook.side.value == "config" or not known_to_host(hook.name):
            continue
        setattr(connector, hook.name, rule(hook, children))


def _each(hook: Hook, children: Sequence[Child]) -> Call:
    calls = tuple(call for call in _calls(hook, children) if not is_empty(call))

    def each(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return _PER_LAYER[hook.name](calls) if hook.name in _PER_LAYER else each


def _wait_for_layer_load(calls: tuple[Call, ...]) -> Call:
    def wait_for_layer_load(layer_name: str) -> None:
        for call in calls:
            call(layer_name)

    def nothing(layer_name: str) -> None:
        """Cost half of a loop over no calls."""

    return wait_for_layer_load if calls else nothing


def _save_kv_layer(calls: tuple[Call, ...]) -> Call:
    def save_kv_layer(layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if kwargs:
            for call in calls:
                call(layer_name, kv_layer, attn_metadata, **kwargs)
        else:  # as vLLM calls it
            for call in calls:
                call(layer_name, kv_layer, attn_metadata)

    return save_kv_layer


# Called for every layer of every step: with their own signatures they cost half of what `each` does.
_PER_LAYER: dict[str, Callable[[tuple[Call, ...]], Call]] = {
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
            answers.append(getattr(child.connector, name)(*args, **kwargs))
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


_DOES_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


def is_empty(call: Call) -> bool:
    """Return whether ``call`` is a plain Python method whose whole body returns a constant."""
    function = getattr(call, "__func__", None)
    if not inspect.isfunction(function) or function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    return all(instruction.opname in _DOES_NOTHING for instruction in dis.get_instructions(function))


def _calls(hook: Hook, children: Sequence[Child]) -> tuple[Call, ...]:
    return tuple(getattr(child.connector, hook.name) for child in children)


RULES: dict[Combine, Callable[[Hook, Sequence[Child]], Call]] = {
    Combine.EACH: _each,
    Combine.GUARDED: _guarded,
    Combine.ANY: _any,
    Combine.CHAIN: _chain,
}
