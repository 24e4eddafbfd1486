"""Make kvobs deviate in one thing while it runs, to see whether the comparison finds it."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvobs.connector import MultiConnector
from tests.transparency.connectors import Answers

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
EVERY, LATER = range(9), range(1, 9)


@dataclass(frozen=True)
class Mutation:
    """``new`` is called with the plain hook in front: wherever kvobs calls a connector's, or vLLM calls kvobs's own.

    Without ``connectors`` it is kvobs's own hook; ``new`` is called with the connector before the hook then.
    """

    role: KVConnectorRole
    hook: str
    new: Callable[..., Any]
    connectors: Container[int] = ()

    def apply(self, target: Any, *more: Any) -> None:
        setattr(target, self.hook, partial(self.new, *more, getattr(target, self.hook)))


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Change each kvobs while it is built: before it has looked at its connectors, or when it is whole."""
    cls: Any = Answers if mutation.connectors else MultiConnector
    build = cls.__init__

    def build_and_change(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        build(self, vllm_config, role, kv_cache_config)
        if role is not mutation.role:
            return
        if not mutation.connectors:
            mutation.apply(self, self)
        elif self.run.router == "kvobs" and self.index in mutation.connectors and hasattr(self, mutation.hook):
            mutation.apply(self)

    with mock.patch.object(cls, "__init__", build_and_change):
        yield
