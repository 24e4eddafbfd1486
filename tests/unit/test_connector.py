"""The class that vLLM sees: its identity, its roles, and what a newer vLLM's hooks do."""

import inspect
from asyncio import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

import kvobs
from kvobs.export import destinations, starter
from kvobs.page.writer import PageWriter
from kvobs.schema.signals import TIMED
from kvobs.telemetry.estimates.gains import Gains
from kvobs.telemetry.requests.request_log import RequestLog
from kvobs.testing import Rig, Script, ScriptedConnector, cache_config, engine_config, transfer_config
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, Side
from tests.support.contexts import no_otel_variables
from tests.support.rig import entry_for


@pytest.fixture
def rig() -> Rig:
    return Rig("kvobs", Script("a"), Script("b"))


def test_the_name_and_the_base_class_are_those_that_vllm_checks() -> None:
    cls = KVConnectorFactory.get_connector_class(transfer_config("kvobs", [entry_for(Script("a"))]))
    assert cls is kvobs.MultiConnector
    assert cls.__name__ == "MultiConnector"
    assert issubclass(cls, stock.MultiConnector)
    assert list(inspect.signature(cls.__init__).parameters)[3] == "kv_cache_config"


@pytest.mark.parametrize(
    ("exporter", "endpoint", "told"),
    [("auto", None, "metrics go to /metrics of vLLM's API server, or to kvobs's exporter if that server does not "
        "expose them; tracing is off"),
     ({"port": 9470}, "http://c:4317", "metrics go to http://127.0.0.1:9470/metrics, from kvobs's exporter; "
      "spans go to http://c:4317, from kvobs's exporter")],
)  # fmt: skip
def test_the_start_shows_connectors_and_where_metrics_are(
    exporter: Any, endpoint: str | None, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setattr(starter, "start", lambda *_: None)  # no process
    if endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    kvobs = {"names": ["one", "two"], "load_policy": "longest", "exporter": exporter}
    Rig("kvobs", Script("a"), Script("b"), kvobs=kvobs)
    (line,) = [r.getMessage() for r in caplog.records if "routes to" in r.getMessage()]
    assert line.endswith(f"one (ScriptedConnector), two (ScriptedConnector); load_policy longest; {told}")


def test_a_place_of_metrics_that_is_not_found_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(destinations, "metrics_go_to", lambda *_: 1 / 0)
    Rig("kvobs", Script("a"))
    (line,) = [r.getMessage() for r in caplog.records if "routes to" in r.getMessage()]
    assert line.endswith("ScriptedConnector (ScriptedConnector); load_policy first")


@pytest.mark.parametrize("is_stock", [False, True])
def test_kvobs_stock_keeps_vllms_aggregator_and_block_copies(
    is_stock: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copied: list[object] = []
    monkeypatch.setenv("KVOBS_USE_VLLM", "aggregator,block_copy" if is_stock else "")
    rig = Rig("kvobs", Script("a"))
    assert (rig.connector.aggregation is None) is is_stock
    rig.workers[0].set_host_xfer_buffer_ops(lambda *arguments: copied.append(arguments))
    rig.workers[0]._connectors[0].copy_blocks({"a": torch.ones(4, 2)}, {"a": torch.zeros(4, 2)}, [1], [2], "d2h")
    assert bool(copied) is is_stock
    assert ("so these parts of vLLM stay in use: aggregator, block_copy" in caplog.text) is is_stock


def test_connectors_are_the_real_objects_without_any_mark(rig: Rig) -> None:
    assert [type(connector) for connector in rig.connector._connectors] == [ScriptedConnector, ScriptedConnector]
    assert rig.connector.sub_connectors == rig.connector._connectors
    rig.add("r")
    rig.run(3)
    for wrapper in (rig.connector, *rig.workers):
        for connector in wrapper._connectors:
            assert not vars(connector).keys() & HOOKS.keys()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_bad_configuration_fails_at_start_and_for_layouts(
    role: KVConnectorRole,
) -> None:
    config = engine_config(transfer_config("kvobs", [entry_for(Script("a"))], {"load_policy": "best"}))
    cls = kvobs.MultiConnector
    for begin in (lambda: cls(config, role, cache_config()), lambda: cls.get_required_kvcache_layout(config)):
        with pytest.raises(ValueError, match=r"kv_connector_extra_config\.kvobs\.load_policy"):
            begin()


def test_metadata_of_another_connector_is_refused_by_name(rig: Rig) -> None:
    alien: Any = stock.MultiKVConnectorMetadata(metadata=())
    worker = rig.workers[0]
    for hook in (worker.bind_connector_metadata, worker.handle_preemptions):
        with pytest.raises(TypeError, match="metadata of another connector reached kvobs"):
            hook(alien)


def test_messages_of_another_connector_are_refused_with_its_name(rig: Rig) -> None:
    rig.step()
    output: Any = rig.output
    output.kv_connector_worker_meta = stock.MultiKVConnectorWorkerMetadata(metadata=())
    with pytest.raises(TypeError, match="worker metadata of another connector"):
        rig.connector.update_connector_output(output)
    with pytest.raises(TypeError, match="handshake metadata of another connector"):
        rig.connector.set_xfer_handshake_metadata({0: object()})


@pytest.mark.parametrize("router", ["kvobs", "stock"])
def test_connectors_of_workers_without_handshakes_get_none(router: str) -> None:
    """vLLM's engine hands over what it has got, which is nothing then; only a connector alone gets it."""
    a, b = Script("a"), Script("b")
    rig = Rig(router, a, b)
    assert [worker.get_handshake_metadata() for worker in rig.workers] == [None]
    rig.connector.set_xfer_handshake_metadata_pp_aware({})
    assert [("set_xfer_handshake_metadata", {}) in script.calls for script in (a, b)] == [True, True]


def test_inherited_code_sees_which_connector_loads_a_request(rig: Rig) -> None:
    choices = rig.connector._requests_to_connector
    assert (dict(choices), len(choices), choices.get("r")) == ({}, 0, None)
    rig.connector._side.ledger.propose("r", (1, True))
    rig.connector._side.ledger.arrive("q")
    assert (dict(choices), len(choices)) == ({"r": 1}, 1)


def test_a_hook_of_a_newer_vllm_arrives(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    recorded = []

    def broadcast(self: Any, word: str) -> None:
        for connector in self._connectors:
            connector.hook_of_tomorrow(word)

    monkeypatch.setattr(KVConnectorBase_V1, "hook_of_tomorrow", lambda self, word: recorded.append(word), raising=False)
    monkeypatch.setattr(stock.MultiConnector, "hook_of_tomorrow", broadcast, raising=False)
    Rig("kvobs", Script("a"), Script("b")).connector.hook_of_tomorrow("hello")
    assert recorded == ["hello", "hello"]
    assert "hooks that kvobs does not know: hook_of_tomorrow" in caplog.text


@pytest.mark.parametrize(("rank", "own"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_a_rank_is_one_of_its_engine(rank: int, own: int, a: Script) -> None:
    """An external launcher counts ranks on through all data parallel engines."""
    transfer = transfer_config("kvobs", [entry_for(a)])
    cls = KVConnectorFactory.get_connector_class(transfer)
    worker: Any = cls(engine_config(transfer, 2, rank), KVConnectorRole.WORKER, cache_config())
    assert worker._side.rank == own


class PanicException(BaseException):
    """Raised by Rust, through pyo3."""


ENDS: list[tuple[type[BaseException] | None, bool]] = [(None, True), (SystemExit, True), (KeyboardInterrupt, True)]
ENDS += [(error, False) for error in (RuntimeError, PanicException, CancelledError, GeneratorExit)]


@pytest.mark.parametrize(("error", "is_well"), ENDS)
def test_recording_ends_after_the_connectors(
    error: type[BaseException] | None, is_well: bool, a: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls the hook after SIGTERM, and while an error ends the engine; the next start needs the page then.

    A page that is closed says that all went well: the numbers before that are complete.
    """
    ended: list[Any] = []
    rig = Rig("kvobs", a, kvobs={"request_log": str(tmp_path / "log")})
    monkeypatch.setattr(rig.connector._telemetry, "_starter", SimpleNamespace(close=lambda: ended.append("starter")))
    for cls, name in ((RequestLog, "close"), (Gains, "look"), (PageWriter, "close")):
        monkeypatch.setattr(cls, name, lambda *_, cls=cls: ended.append(cls))
    a.raises = {"shutdown": TimeoutError()}

    def end() -> None:
        try:
            if error is not None:
                raise error
        finally:
            rig.connector.shutdown()

    with pytest.raises(TimeoutError):
        end()
    assert a.called("shutdown")
    assert ended == [RequestLog, "starter", *([Gains, PageWriter] if is_well else [])]


@pytest.mark.parametrize("stuck", [RuntimeError("stuck"), PanicException("stuck"), None], ids=repr)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_connectors_are_ended_if_their_wiring_fails(
    role: KVConnectorRole, stuck: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = Script("a"), Script("b")
    if stuck is not None:
        a.raises["shutdown"] = stuck  # hides nothing
    monkeypatch.setattr("kvobs.connector.hooks_of", Mock(side_effect=LookupError("a new hook")))
    transfer = transfer_config("kvobs", [entry_for(a), entry_for(b)], {"names": ["one", "two"]})
    config = engine_config(transfer, 1, 0)
    with pytest.raises(LookupError, match="a new hook") as error:
        kvobs.MultiConnector(config, role, cache_config())
    assert a.called("shutdown") == b.called("shutdown") == [None]
    assert error.value.__notes__ == ["while kvobs was set up; its connectors have been shut down"]
    texts = [record.getMessage() for record in caplog.records if record.exc_info]
    assert texts == ["connector 'one' failed to shut down after the start had failed"] * (stuck is not None)


@pytest.mark.parametrize("side", [Side.SCHEDULER, Side.WORKER])
def test_each_hook_of_a_side_is_one_callable_of_kvobs(side: Side, a: Script, b: Script) -> None:
    """A hook that is missing here would reach the connectors by vLLM's own routing."""
    rig = Rig("kvobs", a, b)
    connector = rig.connector if side is Side.SCHEDULER else rig.workers[0]
    hooks = {name for name, hook in TIMED.items() if hook.side in (side, Side.BOTH) and name in versions.hooks()}
    bound = {name for name in hooks if name in vars(connector) or name in vars(type(connector))}
    assert bound == hooks
    others = {name for name, hook in TIMED.items() if hook.side not in (side, Side.BOTH)}
    assert not others & vars(connector).keys()
