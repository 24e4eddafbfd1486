"""``KVOBS_ENABLE`` puts kvobs behind the registered name; anything but a clear yes leaves vLLM as it is."""

from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

import kvobs
from kvobs import plugin


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(KVConnectorFactory._registry)
    yield
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)


def registered() -> object:
    return KVConnectorFactory.get_connector_class_by_name("MultiConnector")


@pytest.mark.parametrize("value", ["1", "true", " YES ", "on"])
def test_a_yes_replaces_the_class(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    plugin.register()
    assert registered() is kvobs.MultiConnector
    assert issubclass(kvobs.MultiConnector, stock.MultiConnector)


@pytest.mark.parametrize("value", ["", "0", "false", "off", "no"])
def test_a_no_leaves_vllm_as_it_is(
    monkeypatch: pytest.MonkeyPatch, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    assert registered() is stock.MultiConnector
    assert not caplog.records


def test_anything_else_is_a_no_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "maybe")
    plugin.register()
    assert registered() is stock.MultiConnector
    assert "KVOBS_ENABLE is 'maybe'" in caplog.text


def test_vllm_finds_the_plugin() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvobs"]
    assert entry.load() is plugin.register
