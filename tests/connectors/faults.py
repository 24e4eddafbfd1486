"""Failures of one child: exceptions out of its hooks, before or after they have done their work."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.connectors.plug import Plug


class InjectedError(ConnectionError):
    """What a connector raises when its server is gone."""


@dataclass
class Faults:
    """When which hook of a child raises.

    Args:
        plug: whose.
        hook: the hook.
        after: whether it has done its work by then.
        first: the step from which on it raises.
        last: the step after which it does not.
        rate: the share of its calls that raise.
        most: how many calls raise at most.
    """

    plug: Plug
    hook: str
    after: bool = False
    first: int = 15
    last: int = 80
    rate: float = 0.6
    most: int = 99
    raised: int = 0
    live: Callable[[], set[str]] = set
    touched: set[str] = field(default_factory=set)  # requests it knew when it raised
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def install(self, patch: Any) -> None:
        """Wrap the hook of the child's class; routers look hooks up when they are built."""
        cls = KVConnectorFactory.get_connector_class(KVTransferConfig(**self.plug.config()))
        real, faults = getattr(cls, self.hook), self

        def hook(child: Any, *args: Any, **kwargs: Any) -> Any:
            is_due = faults.is_due(child)
            if is_due and not faults.after:
                faults.fail()
            answer = real(child, *args, **kwargs)
            if is_due:
                faults.fail()
            return answer

        hook.__name__ = self.hook
        patch.setattr(cls, self.hook, hook)

    def is_due(self, child: Any) -> bool:
        ours = child is self.plug.child or child in self.plug.workers.values()
        return (
            ours
            and self.raised < self.most
            and self.first <= self.plug.now <= self.last
            and self._random.random() < self.rate
        )

    def fail(self) -> None:
        self.raised += 1
        self.touched |= self.live() | set(re.findall(r"\br\d+\b", " ".join(self.plug.leftovers())))
        raise InjectedError("the server is gone")
