"""A worker's gates: shut when the scheduler says so, and at once when a child fails here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvobs.children import Child
from kvobs.gates import Gate, ends_for_good
from kvobs.metadata import MultiKVConnectorMetadata
from kvobs.notices import line, once
from kvobs.quarantine import FOR_GOOD, Word


class WorkerGates:
    """The isolated children on one worker."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._gates = {child.index: child.gate for child in children if child.gate is not None}
        self._words = dict.fromkeys(self._gates, Word(0, is_out=False))  # the scheduler's last
        self._failed_in = dict.fromkeys(self._gates, -1)  # the epoch in which a child failed here
        self._names = [child.name for child in children]
        self._broken: set[tuple[int, int]] = set()
        for index, gate in self._gates.items():
            gate.on_failure = self._on_failure(index, gate)

    def begin_step(self, meta: MultiKVConnectorMetadata) -> None:
        """Open or shut the gates for a step."""
        for index, gate in self._gates.items():
            word = self._words[index] = meta.isolated[index]
            gate.is_shut = word.is_out or word.epoch <= self._failed_in[index] or meta.metadata[index] is None
            gate.has_started = False

    def not_begun(self, meta: MultiKVConnectorMetadata | None) -> list[tuple[int, str]]:
        """Return the loads (child, request) that this step should have begun and has not."""
        if meta is None or not self._gates:
            return []
        return [
            (load.child, request)
            for request, load in meta.loads.items()
            if load.child in self._gates and not self._gates[load.child].has_started
        ]

    def take_broken(self) -> frozenset[tuple[int, int]]:
        """Return the children that failed here since the last time, each with the epoch in which it did."""
        broken, self._broken = frozenset(self._broken), set()
        return broken

    def _on_failure(self, index: int, gate: Gate) -> Callable[[str, tuple[Any, ...], Exception], None]:
        def failed(hook: str, _args: tuple[Any, ...], error: Exception) -> None:
            gate.is_shut = True
            word = self._words[index]
            if not word.is_out or ends_for_good(hook):  # else the scheduler has known before
                epoch = self._failed_in[index] = FOR_GOOD if ends_for_good(hook) else word.epoch
                self._broken.add((index, epoch))
            once(
                f"isolated:{index}:{hook}",
                logging.WARNING,
                "connector %r, which is isolated, failed in %s: %s: %s",
                self._names[index],
                hook,
                type(error).__name__,
                line(error),
            )

        return failed
