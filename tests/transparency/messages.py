"""What the halves of a recording connector send each other, and what its workers report besides."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tests.support.scripted import Stats


@dataclass(frozen=True, slots=True)
class Load:
    """An order to load: the ``number``-th of this request. The connector may not have been chosen to do it."""

    request: str
    number: int
    is_async: bool
    blocks: tuple[tuple[int, ...], ...]
    is_unchosen: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    request: str


@dataclass(frozen=True)
class Message(KVConnectorMetadata):
    """A step's metadata of one connector, which says whose it is and the how-manieth."""

    connector_index: int
    number: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass
class Note(KVConnectorWorkerMetadata):
    """Worker metadata that is put together: rank -> step."""

    steps: dict[int, int]

    def aggregate(self, other: Any) -> "Note":
        return Note({**self.steps, **other.steps})


COUNTED = "counted by "


class Count(Stats):
    """Stats that add up, by the connector that counted."""

    @classmethod
    def of(cls, who: str) -> "Count":
        return cls(data={COUNTED + who: 1})
