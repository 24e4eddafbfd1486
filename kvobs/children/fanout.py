"""Bind the table of hooks to the children: one callable for each hook whose answers combine by a general rule.

The callables become attributes of the connector instance, so that a hook costs one call plus the children's calls. A
child that does not implement a hook is not called: most connectors do not implement most layer hooks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvobs.children.child import Child
from kvobs.log import log
from kvobs.schema.signals import is_timed
from kvobs.telemetry.recording.recorder import Call
from kvobs.vllm_api.hooks import HOOKS, Cadence, Combine, Hook


def bind(connector: object, children: Sequence[Child], known_to_host: Callable[[str], bool]) -> None:
    """Bind every general hook that this vLLM knows to ``connector``, as recorded calls into the children.

    Layer hooks are bound elsewhere: see ``layer_calls``.
    """
    for hook in HOOKS.values():
        rule = RULES.get(hook.combine)
        if rule is not None and is_timed(hook) and hook.cadence is not Cadence.LAYER and known_to_host(hook.name):
            setattr(connector, hook.name, rule(hook, children))


def _each(hook: Hook, children: Sequence[Child]) -> Call:
    calls = tuple(getattr(child, hook.name) for child in children if child.does(hook.name))

    def each(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return each


def _guarded(hook: Hook, children: Sequence[Child]) -> Call:
    def guarded(*args: Any, **kwargs: Any) -> None:
        call_all(hook.name, children, *args, **kwargs)

    return guarded


def call_all(name: str, children: Iterable[Child], *args: Any, **kwargs: Any) -> list[Any]:
    """Call a hook of every child even if one raises; then raise the first error."""
    answers = []
    first: Exception | None = None
    for child in children:
        try:
            answers.append(getattr(child, name)(*args, **kwargs))
        except Exception as error:
            log.exception("connector %r raised in %s; the other connectors are still called", child.name, name)
            first = first or error
    if first is not None:
        raise first
    return answers


def _any(hook: Hook, children: Sequence[Child]) -> Call:
    calls = tuple(getattr(child, hook.name) for child in children)
    return lambda *args, **kwargs: any(call(*args, **kwargs) for call in calls)


def _chain(hook: Hook, children: Sequence[Child]) -> Call:
    calls = tuple(getattr(child, hook.name) for child in children if child.does(hook.name))
    return lambda *args, **kwargs: [item for call in calls for item in call(*args, **kwargs) or ()]


RULES: dict[Combine, Callable[[Hook, Sequence[Child]], Call]] = {
    Combine.EACH: _each,
    Combine.GUARDED: _guarded,
    Combine.ANY: _any,
    Combine.CHAIN: _chain,
}
