"""What a worker leaves out of a step for an isolated connector, and what it lets the scheduler know of its failures."""

from typing import Any
from unittest.mock import Mock

import pytest

from kvobs.connectors.gate import AT_ANY_TIME, Gate
from kvobs.connectors.sub_connector import SubConnector, Unbuilt
from kvobs.probe.recorder import Recorder
from kvobs.routing.metadata import Isolated, LoadOrder, MultiKVConnectorMetadata, Orders
from kvobs.routing.worker_isolation import WorkerGates
from kvobs.state.quarantine import FOR_GOOD, IsolationState
from kvobs.vllm_api.hooks import HOOKS, Cadence

STEP = frozenset(name for name, hook in HOOKS.items() if hook.cadence in (Cadence.STEP, Cadence.LAYER))
OPEN: frozenset[str] = frozenset()


class Loader:
    """Has the one hook that matters here."""

    def start_load_kv(self, forward_context: Any) -> None:
        self.context = forward_context


class Worker:
    """One worker with an isolated connector, and one that is not."""

    def __init__(self, connector: Any = None) -> None:
        recorder = Recorder(2)
        self.gate = Gate(0, recorder)
        self.gates = WorkerGates([
            SubConnector(0, "best", connector or Loader(), recorder, gate=self.gate),
            SubConnector(1, "other", Loader(), recorder)
        ])  # fmt: skip

    def begin(
        self, epoch: int, *, is_out: bool = False, own: Any = "metadata", sync: str = "", **loads: int
    ) -> MultiKVConnectorMetadata:
        orders = {request: LoadOrder(index, True, ()) for request, index in loads.items()}
        if sync:
            orders[sync] = LoadOrder(0, False, ((1, 2),))
        meta = MultiKVConnectorMetadata(
            metadata=(own, "metadata"), orders=Orders(orders), isolated=Isolated({0: IsolationState(epoch, is_out)}, {})
        )
        self.gates.begin_step(meta)
        return meta

    def fail(self, hook: str) -> None:
        def call() -> None:
            raise OSError

        self.gate.guard(hook, call)()

    def load(self) -> None:
        self.gate.guard("start_load_kv", lambda: None)()


@pytest.mark.parametrize("is_out", [False, True])
@pytest.mark.parametrize("hook", sorted(STEP - {"bind_connector_metadata"}))
def test_after_a_failure_it_goes_on_to_be_called(hook: str, is_out: bool) -> None:
    """N7: its own books need every hook of what it knows."""
    worker = Worker()
    worker.begin(1, is_out=is_out)
    worker.fail(hook)
    assert worker.gate.closed == OPEN
    worker.begin(1, is_out=True)
    assert worker.gate.closed == OPEN


def test_a_failure_unknown_to_the_scheduler_is_reported_once() -> None:
    worker = Worker()
    worker.begin(3)
    worker.fail("wait_for_save")
    worker.fail("get_transfer_results")
    assert worker.gates.take_broken() == {(0, 3)}
    assert worker.gates.take_broken() == frozenset()
    worker.begin(4, is_out=True)
    worker.fail("wait_for_save")
    assert worker.gates.take_broken() == frozenset(), "the scheduler has known before"
    worker.begin(4)
    worker.fail("wait_for_save")
    assert worker.gates.take_broken() == {(0, 4)}


@pytest.mark.parametrize("is_built", [False, True])
def test_a_connector_without_metadata_is_left_out_of_the_step(is_built: bool) -> None:
    """Its hooks assert without: none was built, or it could not be given."""
    worker = Worker()
    worker.begin(0, own="metadata" if is_built else None)
    if is_built:
        worker.fail("bind_connector_metadata")
    assert worker.gate.closed == STEP
    worker.begin(0)
    assert worker.gate.closed == OPEN


def test_a_connector_that_never_starts_has_nothing_to_fail() -> None:
    """Its ``start_load_kv`` is empty, so that kvobs does not call it."""

    class Elsewhere:
        def start_load_kv(self, forward_context: Any) -> None: ...

    worker = Worker(Elsewhere())
    meta = worker.begin(0, sync="s", mine=0)
    assert worker.gates.failed_loads(meta) == []
    assert worker.gates.failed_sync_loads(meta) == []


@pytest.mark.parametrize("hook", ["register_kv_caches", "set_host_xfer_buffer_ops", "__init__"])
def test_failure_at_the_start_disables_for_good(hook: str) -> None:
    worker = Worker(object.__new__(Unbuilt) if hook == "__init__" else None)
    if hook != "__init__":
        worker.fail(hook)
    assert worker.gates.broken == worker.gates.take_broken() == {(0, FOR_GOOD)}
    assert worker.gates.broken == frozenset()
    meta = worker.begin(10**6, mine=0)
    assert worker.gate.closed == frozenset(HOOKS) - AT_ANY_TIME
    assert worker.gates.failed_loads(meta) == [(0, "mine", True)]


def test_connector_that_miscounts_its_saves_is_not_tried_again() -> None:
    """SimpleCPUOffloadConnector takes a save that was never begun for done: what it would load later is not there."""
    worker = Worker(type("OfSimple", (type("SimpleCPUOffloadConnector", (Loader,), {}),), {})())
    worker.begin(3)
    worker.fail("wait_for_save")
    assert worker.gates.take_broken() == {(0, FOR_GOOD)}
    assert worker.gate.closed == OPEN, "what it holds is given back by its own hooks"


def test_after_a_failed_build_the_others_are_logged_by_name(caplog: Any) -> None:
    recorder = Recorder(2)
    unbuilt = SubConnector(0, "gone", object.__new__(Unbuilt), recorder, gate=Gate(0, recorder))
    WorkerGates([unbuilt, SubConnector(1, "good", Loader(), recorder, gate=(gate := Gate(1, recorder)))])
    gate.guard("wait_for_save", Mock(side_effect=OSError))()
    assert "best-effort connector 'good' failed in wait_for_save" in caplog.text
