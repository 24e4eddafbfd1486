"""``KVOBS_ENABLE`` puts kvobs behind the registered name; anything but a clear yes leaves vLLM as it is."""

import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

import kvobs
from kvobs import plugin
from kvobs.cli.check.rewrite import rewrite
from kvobs.connectors import validation
from kvobs.schema.config import ENABLE_VARIABLE, ConfigError


@pytest.fixture(autouse=True)
def _before() -> Iterator[None]:
    before, resolve = dict(KVConnectorFactory._registry), VllmConfig._post_init_kv_transfer_config
    yield
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)
    VllmConfig._post_init_kv_transfer_config = resolve


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
    assert caplog.text.count("KVOBS_ENABLE is 'maybe'") == len(caplog.records) == (value == "maybe"), "once"


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
def test_a_loader_that_hides_what_it_loads_is_anothers(
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


def resolved(config: KVTransferConfig | None, size: float | None = None, backend: str = "native") -> Any:
    """Return the configuration as vLLM's own makes it, with this ``--kv-offloading-size``."""
    cache = SimpleNamespace(kv_offloading_size=size, kv_offloading_backend=backend)
    made: Any = SimpleNamespace(kv_transfer_config=config, cache_config=cache)
    for _ in range(2):  # vLLM makes a copy of it for a draft model, say
        VllmConfig._post_init_kv_transfer_config(made)
    return made.kv_transfer_config


def as_json(config: Any) -> dict[str, Any]:
    usual = KVTransferConfig()
    return {key: value for key, value in asdict(config).items() if value != getattr(usual, key)}


SINGLE = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "e",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}  # fmt: skip
LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "engine_id": "e"}


@pytest.mark.parametrize(
    ("config", "size", "backend", "alone"),
    [(SINGLE, None, "native", SINGLE), ({"engine_id": "e"}, 1, "native", {**SINGLE, "kv_load_failure_policy": "fail"}),
     ({"engine_id": "e"}, 1, "lmcache", LMCACHE)],
)  # fmt: skip
def test_a_single_connector_is_routed_as_rewrite_has_it(
    config: dict[str, Any], size: float | None, backend: str, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_SIMPLE_KV_OFFLOAD", raising=False)
    assert as_json(resolved(KVTransferConfig(**config), size, backend)) == as_json(KVTransferConfig(**alone))
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    plugin.register()
    wrapped = resolved(KVTransferConfig(**config), size, backend)
    rewritten = as_json(KVTransferConfig(**rewrite(as_json(KVTransferConfig(**alone)))))
    assert as_json(wrapped) == rewritten
    assert KVConnectorFactory.get_connector_class(wrapped) is kvobs.MultiConnector


WRONG = {"nmaes": ["cpu"], "load_policy": "best"}
ROUTED = {
    "kv_connector": "MultiConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [SINGLE], "kvobs": WRONG},
}  # fmt: skip
KEY = {"kv_connector_module_path": "kvobs"}
ALONE = {**SINGLE, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, "kvobs": WRONG}}


@pytest.mark.parametrize(
    ("config", "is_enabled"), [({**ROUTED, **KEY}, False), ({**ROUTED, **KEY}, True), (ROUTED, True), (ALONE, True)]
)
def test_wrong_options_are_refused_where_vllm_is_configured(
    config: dict[str, Any], is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first seconds of the API server, before an engine is started."""
    monkeypatch.setenv(ENABLE_VARIABLE, str(int(is_enabled)))
    for _ in range(2):
        plugin.register()
    with pytest.raises(ValidationError) as raised:
        VllmConfig(kv_transfer_config=KVTransferConfig(**config))
    (detail,) = raised.value.errors()
    error = detail["ctx"]["error"]
    assert isinstance(error, ConfigError)
    paths = [f"kv_connector_extra_config.kvobs.{option}" for option in ("load_policy", "nmaes")]
    assert [mistake.path for mistake in error.mistakes] == paths


def test_a_size_that_replaces_kvobs_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    plugin.register()
    config = KVTransferConfig(**ROUTED, **KEY)
    with pytest.raises(ConfigError, match=r"kv_connector: found 'OffloadingConnector'.*remove --kv-offloading-size"):
        resolved(config, 1)


@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize("obstacle", ["not kvobs's", "a fault in the check", "none"])
def test_no_other_configuration_is_refused(
    obstacle: str, is_enabled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, str(int(is_enabled)))
    plugin.register()
    config = {**ROUTED, **KEY}
    if obstacle == "a fault in the check":
        monkeypatch.setattr(validation, "validate", lambda *given, **more: 1 / 0)
    elif obstacle == "not kvobs's":
        config = {**ROUTED, "kv_connector_module_path": "another.package"}
    else:
        config["kv_connector_extra_config"] = {"connectors": [SINGLE], "kvobs": {"load_policy": "longest"}}
    given = KVTransferConfig(**config)
    before = copy.deepcopy(given)
    assert resolved(given) is given
    assert as_json(given) == as_json(before)
    assert ("ZeroDivisionError" in caplog.text) is (obstacle == "a fault in the check")
    assert resolved(None) is None


def test_kvobs_options_next_to_the_connectors_are_kvobss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    plugin.register()
    extra = {"cpu_bytes_to_use": 1 << 30, "kvobs": {"request_report": True}}
    found = resolved(KVTransferConfig(**{**SINGLE, "kv_connector_extra_config": extra})).kv_connector_extra_config
    assert found["connectors"][0]["kv_connector_extra_config"] == SINGLE["kv_connector_extra_config"]
    assert found["kvobs"] == {"request_report": True}
    assert extra["kvobs"] == {"request_report": True}


def test_a_configuration_with_a_router_or_no_connector_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    plugin.register()
    assert resolved(None) is None
    extra = {"connectors": [SINGLE]}
    for name in (None, "MultiConnector", "PdConnector"):
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
        assert resolved(config) is config
    ours = KVTransferConfig(**{**ROUTED, **KEY, "kv_connector_extra_config": extra})
    assert resolved(ours) is ours


@pytest.mark.parametrize("obstacle", ["dynamo", "another plugin", "a mistake"])
def test_an_unroutable_connector_runs_as_it_is_and_is_logged(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    plugin.register()
    if obstacle == "dynamo":
        monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    elif obstacle == "another plugin":
        register_theirs()
    else:
        monkeypatch.setattr(plugin, "wrap", lambda config: {**config, "kv_connector": 7})
    config = KVTransferConfig(**SINGLE)
    assert resolved(config) is config
    assert as_json(config) == as_json(KVTransferConfig(**SINGLE))
    assert re.search('(?s)kvobs is not enabled.*"kv_connector_module_path": "kvobs"', "".join(caplog.messages))
