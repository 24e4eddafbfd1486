"""Make the connector's hooks: for each one callable, by the table of hooks.

The callables become attributes of the connector instance, so that a hook costs one call plus the connectors' calls. A
connector that does not implement a hook is not called: most do not implement most layer hooks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvobs.connectors.child import Child
from kvobs.log import log
from kvobs.probe.pure import Call
from kvobs.schema.signals import TIMED
from kvobs.vllm_api.hooks import Cadence, Combine, Hook


def hooks_of(
    side: object, children: Sequence[Child], fan_outs: Mapping[str, Call], known_to_host: Collection[str]
) -> dict[str, Call]:
    """Return the callable of each hook that this vLLM knows, and calls on the side that the connectors were built for.

    A hook of layers is one of ``fan_outs``; another one is the method of the router's ``side``, or follows a general
    rule. A hook without any of these is left to the class.
    """
    hooks: dict[str, Call] = {}
    for name, hook in TIMED.items():
        rule = RULES.get(hook.combine)
        if hook.side not in children[0].sides or name not in known_to_host:
            continue
        if name in fan_outs:
            hooks[name] = fan_outs[name]
        elif rule is None and hasattr(side, name):
            hooks[name] = getattr(side, name)
        elif rule is not None and hook.cadence is not Cadence.LAYER:
            hooks[name] = rule(hook, children)
    return hooks


def _each(hook: Hook, children: Sequence[Child]) -> Call:
    calls = [getattr(child, hook.name) for child in children if hook.name in child.implemented]

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
    calls = [getattr(child, hook.name) for child in children]
    return lambda *args, **kwargs: any(call(*args, **kwargs) for call in calls)


def _chain(hook: Hook, children: Sequence[Child]) -> Call:
    calls = [getattr(child, hook.name) for child in children if hook.name in child.implemented]

    def chain(*args: Any, **kwargs: Any) -> list[Any]:
        items: list[Any] = []
        for call in calls:
            items += call(*args, **kwargs) or ()
        return items

    return chain


RULES: dict[Combine, Callable[[Hook, Sequence[Child]], Call]] = {
    Combine.EACH: _each,
    Combine.GUARDED: _guarded,
    Combine.ANY: _any,
    Combine.CHAIN: _chain,
}
