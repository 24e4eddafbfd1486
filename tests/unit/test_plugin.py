"""``KVOBS_ENABLE`` puts kvobs behind the registered name; anything but a clear yes leaves vLLM as it is."""

from collections.abc import Iterator
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

import kvobs
from kvobs import plugin
from kvobs.schema.config import ENABLE_VARIABLE


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(KVConnectorFactory._registry)
    yield
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)


def registered() -> object:
    return KVConnectorFactory.get_connector_class_by_name("MultiConnector")


YES, NO = ("1", "true", " YES ", "on"), ("", "0", "false", "off", "no")


@pytest.mark.parametrize("value", [*YES, *NO, "maybe"])
def test_only_a_yes_replaces_it(value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, value)
    plugin.register()
    plugin.register()
    assert registered() is (kvobs.MultiConnector if value in YES else stock.MultiConnector)
    assert issubclass(kvobs.MultiConnector, stock.MultiConnector)
    assert bool(caplog.records) is ("KVOBS_ENABLE is 'maybe'" in caplog.text) is (value == "maybe")


class TheirConnector(stock.MultiConnector):
    """A class that another plugin has for the name."""


def register_theirs() -> None:
    """Register it as vllm-ascend does: vLLM's own is taken out first."""
    KVConnectorFactory._registry.pop("MultiConnector")
    KVConnectorFactory.register_connector("MultiConnector", __name__, "TheirConnector")


@pytest.mark.parametrize("is_first", [True, False])
def test_another_plugins_class_stays_and_is_logged(
    is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    for register in (register_theirs, plugin.register) if is_first else (plugin.register, register_theirs):
        assert not caplog.records
        register()
    assert registered() is TheirConnector
    (line,) = [record.getMessage() for record in caplog.records]
    told = f"registered {__name__}.TheirConnector as" if is_first else "replaced its class as"
    assert f"another plugin has {told} MultiConnector" in line
    assert '"kv_connector_module_path": "kvobs"' in line


@pytest.mark.parametrize(
    "loader", [lambda: TheirConnector, partial(getattr, stock, "MultiConnector")], ids=["lambda", "partial"]
)
def test_a_loader_that_does_not_say_what_it_loads_is_somebody_elses(
    loader: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    KVConnectorFactory._registry["MultiConnector"] = loader
    plugin.register()
    assert KVConnectorFactory._registry["MultiConnector"] is loader
    (line,) = caplog.messages
    named = repr(loader) if isinstance(loader, partial) else f"what {__name__}.<lambda> loads"
    assert f"another plugin has registered {named} as" in line


def test_vllm_finds_the_plugin() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvobs"]
    assert entry.load() is plugin.register
