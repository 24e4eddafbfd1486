"""Make the connector's hooks: for each one callable, by the table of hooks.

The callables become attributes of the connector instance, so that a hook costs one call plus the connectors' calls. A
connector that does not implement a hook is not called: most do not implement most layer hooks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from inspect import isroutine
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvobs.connectors.endings import must_pass
from kvobs.connectors.sub_connector import SubConnector
from kvobs.log import log
from kvobs.probe.pure import Call
from kvobs.schema.signals import TIMED
from kvobs.vllm_api.hooks import HOOKS, Combine, Hook


def hooks_of(
    side: object, connectors: Sequence[SubConnector], fan_outs: Mapping[str, Call], known_to_host: Collection[str]
) -> dict[str, Call]:
    """Return the callable of each hook that this vLLM knows, and calls on the side that the connectors were built for.

    Hooks of layers are in ``fan_outs``. Another one follows a general rule, or is the method of the router's ``side``.
    A hook without any of these is left to the class.
    """
    hooks: dict[str, Call] = {}
    for name, hook in TIMED.items():
        rule = RULES.get(hook.combine)
        if hook.side not in connectors[0].sides or name not in known_to_host:
            continue
        if name in fan_outs:
            hooks[name] = fan_outs[name]
        elif rule is not None:
            hooks[name] = rule(hook, connectors)
        elif hasattr(side, name):
            hooks[name] = getattr(side, name)
    return hooks


def _each(hook: Hook, connectors: Sequence[SubConnector]) -> Call:
    calls = [getattr(connector, hook.name) for connector in connectors if hook.name in connector.implemented]

    def each(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return each


def _guarded(hook: Hook, connectors: Sequence[SubConnector]) -> Call:
    def guarded(*args: Any, **kwargs: Any) -> None:
        call_all(hook.name, connectors, *args, **kwargs)

    return guarded


def call_all(name: str, connectors: Iterable[SubConnector], *args: Any, **kwargs: Any) -> list[Any]:
    """Call a hook of every connector even if one raises, but at the end of the process; then raise the first error."""
    answers = []
    first: BaseException | None = None
    for connector in connectors:
        try:
            answers.append(getattr(connector, name)(*args, **kwargs))
        except BaseException as error:
            if must_pass(error):
                raise
            log.exception("connector %r raised in %s; the other connectors are still called", connector.name, name)
            first = first or error
    if first is not None:
        raise first
    return answers


def _any(hook: Hook, connectors: Sequence[SubConnector]) -> Call:
    calls = [getattr(connector, hook.name) for connector in connectors]
    return lambda *args, **kwargs: any(call(*args, **kwargs) for call in calls)


def _chain(hook: Hook, connectors: Sequence[SubConnector]) -> Call:
    calls = [getattr(connector, hook.name) for connector in connectors if hook.name in connector.implemented]

    def chain(*args: Any, **kwargs: Any) -> list[Any]:
        items: list[Any] = []
        for call in calls:
            items += call(*args, **kwargs) or ()
        return items

    return chain


def own_attribute(connectors: Iterable[SubConnector], name: str) -> tuple[Any] | None:
    """Return, in a tuple, an attribute that connectors have beyond vLLM's class; None if no connector has it.

    A method that several connectors have calls each in their order, and returns the first answer that is not None. Of
    other attributes the first connector's is returned. Exceptions of a best-effort connector's method are contained.
    """
    found = [
        (connector, getattr(connector.wrapped, name)) for connector in connectors if hasattr(connector.wrapped, name)
    ]
    if not found:
        return None
    if not callable(found[0][1]):
        return (found[0][1],)
    calls = [_contained(connector, name, call) if connector.gate is not None else call for connector, call in found]
    return (calls[0] if len(calls) == 1 else partial(_call_each, calls),)


def _call_each(calls: Sequence[Call], *args: Any, **kwargs: Any) -> Any:
    answers = [call(*args, **kwargs) for call in calls]
    return next((answer for answer in answers if answer is not None), None)


def _contained(connector: SubConnector, name: str, call: Call) -> Call:
    def contained(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if must_pass(error):
                raise
            log.exception("best-effort connector %r raised in %s, which is not a hook of vLLM", connector.name, name)
            return None

    return contained


def own_methods(connector_class: type) -> list[str]:
    """Return the public methods of a connector's class that vLLM's classes of connectors do not have."""
    known = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls)}
    names = (name for name in dir(connector_class) if not name.startswith("_") and name not in known)
    return [name for name in names if name not in HOOKS and isroutine(getattr(connector_class, name))]


RULES: dict[Combine, Callable[[Hook, Sequence[SubConnector]], Call]] = {
    Combine.EACH: _each,
    Combine.GUARDED: _guarded,
    Combine.ANY: _any,
    Combine.CHAIN: _chain,
}
