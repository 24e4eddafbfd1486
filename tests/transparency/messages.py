"""What the halves of a recording child send each other, and what its workers report besides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass(frozen=True, slots=True)
class Load:
    """An order to load: the ``number``-th of this request."""

    request: str
    number: int
    is_async: bool
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Save:
    request: str


@dataclass(frozen=True)
class Message(KVConnectorMetadata):
    """A step's metadata of one child, which says whose it is and the how-manieth."""

    child: int
    number: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass
class Note(KVConnectorWorkerMetadata):
    """Worker metadata that is put together: rank -> step."""

    steps: dict[int, int]

    def aggregate(self, other: Any) -> Note:
        return Note({**self.steps, **other.steps})


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    child: int
    rank: int


COUNTED = "counted by "


@dataclass
class Count(KVConnectorStats):
    """Stats that add up, by the child that counted."""

    data: dict[str, int]

    @classmethod
    def of(cls, who: str) -> Count:
        return cls({COUNTED + who: 1})

    def aggregate(self, other: KVConnectorStats) -> Count:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int]:
        return dict(self.data)


@dataclass
class Events(KVConnectorKVEvents):
    """Workers' KV cache events, put together over the ranks."""

    events: list[Any]
    workers: int = 1

    def add_events(self, events: list[Any]) -> None:
        self.events = [*self.events, *events]

    def aggregate(self) -> Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> list[Any]:
        return self.events

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events = []
