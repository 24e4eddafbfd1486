"""A worker shuts a failing child out at once, and lets it in when the scheduler has counted a quarantine since."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.children import Child
from kvobs.gates import Gate
from kvobs.metadata import LoadOrder, MultiKVConnectorMetadata
from kvobs.quarantine import FOR_GOOD, Word
from kvobs.recorder import Recorder
from kvobs.worker_gates import WorkerGates


class Worker:
    """One worker with an isolated child, and one that is not."""

    def __init__(self) -> None:
        recorder = Recorder(2)
        self.gate = Gate(0, recorder)
        self.gates = WorkerGates([
            Child(0, "best", object(), True, recorder, gate=self.gate),
            Child(1, "other", object(), True, recorder),
        ])  # fmt: skip

    def begin(
        self, epoch: int, *, is_out: bool = False, own: Any = "metadata", **loads: int
    ) -> MultiKVConnectorMetadata:
        meta = MultiKVConnectorMetadata(
            metadata=(own, "metadata"),
            isolated={0: Word(epoch, is_out)},
            loads={request: LoadOrder(child, True, ()) for request, child in loads.items()},
        )
        self.gates.begin_step(meta)
        return meta

    def fail(self, hook: str) -> None:
        def call() -> None:
            raise OSError

        self.gate.guard(hook, call)()


def test_from_its_failure_to_a_later_epochs_trial() -> None:
    worker = Worker()
    worker.begin(0)
    assert not worker.gate.is_shut
    worker.fail("wait_for_save")
    assert worker.gate.is_shut
    assert worker.gates.take_broken() == {(0, 0)}
    assert worker.gates.take_broken() == frozenset()
    for epoch, is_out, is_shut in ((0, False, True), (1, True, True), (1, False, False)):
        worker.begin(epoch, is_out=is_out)
        assert worker.gate.is_shut is is_shut, (epoch, is_out)


def test_another_worker_failed() -> None:
    worker = Worker()
    worker.begin(1, is_out=True)
    assert worker.gate.is_shut
    worker.fail("get_transfer_results")
    assert worker.gates.take_broken() == frozenset(), "the scheduler has known before"
    worker.begin(1)
    assert not worker.gate.is_shut


def test_a_child_without_metadata_is_left_out() -> None:
    worker = Worker()
    worker.begin(0, own=None)
    assert worker.gate.is_shut


@pytest.mark.parametrize("starts", [True, False])
def test_loads_that_did_not_begin_are_named(starts: bool) -> None:
    worker = Worker()
    meta = worker.begin(0, mine=0, others=1)
    if starts:
        worker.gate.guard("start_load_kv", lambda: None)()
    else:
        worker.fail("start_load_kv")
    assert worker.gates.not_begun(meta) == ([] if starts else [(0, "mine")])
    assert worker.gates.not_begun(None) == []


def test_for_good() -> None:
    worker = Worker()
    worker.fail("register_kv_caches")
    assert worker.gates.take_broken() == {(0, FOR_GOOD)}
    worker.begin(10**6)
    assert worker.gate.is_shut
