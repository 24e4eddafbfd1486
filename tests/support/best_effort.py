"""A real scheduler and two ranks whose first connector is isolated; time is the test's."""

from typing import Any

import pytest

from kvobs.schema.signals import CALL_ERRORS
from kvobs.testing import Script
from tests.support.numbers import numbers
from tests.support.observed import KV, SYNC, Clocked, S
from tests.support.rig import entry_for

__all__ = ["KV", "SYNC", "Isolating", "S", "named"]

OF_BEST = CALL_ERRORS.name, 0
FAILURE = ConnectionError("store is gone")
PER_REQUEST = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
OF_SCHEDULER = (*PER_REQUEST, "build_connector_meta", "update_connector_output", "take_events")
OF_WORKER = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer"),
    *("wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata"),
)


class Isolating(Clocked):
    """A rig whose first connector is isolated, and its clock."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        best: Script,
        other: Script,
        *,
        best_class: str = "BestEffortConnector",
        other_class: str = "ScriptedConnector",
        lag: int = 0,
        **more: Any,
    ) -> None:
        connectors = [entry_for(best, best_class), entry_for(other, other_class)]
        super().__init__(
            patch, connectors, {"names": ["best", "other"], "best_effort": ["best"], **more}, ranks=2, lag=lag
        )
        self.side = self.rig.connector._side

    def step(self, steps: int = 1, seconds: float = 0.01) -> None:
        super().step(steps, seconds)

    def say(self, script: Script, **words: str) -> None:
        """Let a connector report on both ranks."""
        for rank in (0, 1):
            script.say(rank, **words)

    def run_to_end(self, *requests: str) -> None:
        for _ in range(60):
            if all(self.rig.status(request) == "gone" for request in requests):
                return
            self.step()
        raise AssertionError({request: self.rig.status(request) for request in requests})

    @property
    def is_out(self) -> bool:
        return bool(self.side.targets.isolation.is_out(0))

    def failures(self) -> int:
        """Return how many failed calls and answers of the isolated connector have been counted, on all ranks."""
        pages = [each._telemetry._recorders.page for each in (self.rig.connector, *self.rig.workers)]
        return sum(n for page in pages for name, index, *_, n in numbers(page).opened if (name, index) == OF_BEST)

    @property
    def epoch(self) -> int:
        return int(self.side.targets.isolation.states()[0].epoch)


def named(script: Script, request: str) -> list[tuple[str, Any]]:
    """Return the calls of a connector in which a request is named, by itself or in what it was shown."""

    def names(detail: Any) -> bool:
        if isinstance(detail, str):
            return detail == request
        if isinstance(detail, dict):
            return any(map(names, detail.values()))
        return isinstance(detail, tuple | list | set | frozenset) and any(map(names, detail))

    return [(hook, detail) for hook, detail in script.calls if names(detail)]
