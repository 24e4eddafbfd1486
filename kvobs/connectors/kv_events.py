"""Count what a connector's KV cache events are about: events, tokens stored and evicted, and tokens in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from kvobs import faults
from kvobs.connectors.specs import name_among
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals

_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "removed"}
_MEDIA = signals.KV_EVENTS.labels["medium"]
CPU = "cpu"

REPORTS_EVICTIONS: dict[str, frozenset[str]] = {
    "OffloadingConnector": frozenset({CPU}),  # files of a secondary tier outlive the engine
    "SimpleCPUOffloadConnector": frozenset({CPU, "storage"}),
}
"""Connector classes -> the media of which they report what leaves; others are known by their first eviction.

MooncakeStoreConnector and LMCacheConnectorV1 report what they store and nothing else: what they hold is not known.
"""


class Watcher(Protocol):
    """Follows the blocks that connectors store and evict."""

    def stored(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
        """Receive blocks that a connector has stored."""

    def evicted(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
        """Receive blocks that a connector has evicted."""


class KvEvents:
    """Counts the events of one connector; its other KV cache groups have events about the same tokens.

    It keeps numbers only, so that it does not grow with the store: an event of removed blocks has their hashes and no
    sizes, but all blocks of a medium have one size. Blocks whose size is in no event are not counted as tokens.
    """

    def __init__(self, recorder: Recorder, index: int, *, group: int = 0, evicts: Collection[str] = ()) -> None:
        self._recorder, self._index, self._group = recorder, index, group
        self._evicts = set(evicts)
        self._held = Counter[str]()  # medium -> blocks
        self._sizes: dict[str, int] = {}  # medium -> tokens of a block
        self.was_reset = False
        """Whether the next events are from before a reset."""
        self.watcher: Watcher | None = None

    def reset(self) -> None:
        """Note that the connector has cleared its memory: OffloadingConnector publishes no event about that."""
        self.was_reset = CPU in self._evicts
        if self.was_reset:
            self._held[CPU] = 0
            self._show()

    @faults.contained("record")
    def count(self, events: Sequence[Any]) -> None:
        """Count events; unknown types are left out."""
        counts, held = Counter[int](), self._held.copy()
        for event in events:
            if (kind := type(event).__name__) not in _KINDS:
                continue
            medium = str(getattr(event, "medium", None)).lower()
            where = medium if medium in _MEDIA else signals.OTHER
            counts[signals.slot(signals.KV_EVENTS, _KINDS[kind], where)] += 1
            if kind == "AllBlocksCleared":
                held = Counter(dict.fromkeys(held, 0))
            elif getattr(event, "group_idx", None) in (None, self._group):
                hashes = getattr(event, "block_hashes", None) or ()
                if kind == "BlockStored":
                    counts[signals.slot(signals.SAVE_TOKENS, where)] += len(getattr(event, "token_ids", None) or ())
                    self._sizes[where] = getattr(event, "block_size", 0) or self._sizes.get(where, 0)
                    held[where] += len(hashes)
                else:
                    self._evicts.add(where)
                    counts[signals.slot(signals.EVICTED_TOKENS, where)] += len(hashes) * self._sizes.get(where, 0)
                    held[where] = max(0, held[where] - len(hashes))  # it may evict what it stored in an earlier life
                self._pass_on(kind, where, hashes)
        for slot, n in counts.items():
            if n:
                self._recorder.count(self._index, slot, n)
        if self.was_reset:
            held[CPU] = 0
            self.was_reset = False
        self._held = held
        self._show()

    @faults.contained("record")
    def _pass_on(self, kind: str, medium: str, hashes: Sequence[int | bytes]) -> None:
        if self.watcher is not None:
            (self.watcher.stored if kind == "BlockStored" else self.watcher.evicted)(self._index, medium, hashes)

    def _show(self) -> None:
        for medium, n in self._held.items():
            if medium in self._evicts and (size := self._sizes.get(medium)):
                self._recorder.set_gauge(self._index, signals.slot(signals.STORED_TOKENS, medium), n * size)


def evicts(connector_class: type) -> Collection[str]:
    """Return the media of which a class is known to report what leaves."""
    return REPORTS_EVICTIONS.get(name_among(connector_class, REPORTS_EVICTIONS) or "", ())
