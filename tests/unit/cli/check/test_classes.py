"""The facts about a connector's class are those of the connector that vLLM builds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

import kvobs
from kvobs.cli.check import vllm_source
from kvobs.cli.check.check import check_text
from kvobs.cli.check.classes import check_classes
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.connectors import known
from kvobs.connectors.known import ROUTER
from kvobs.schema import kinds
from kvobs.schema.config import ENABLE_VARIABLE, PATH
from kvobs.schema.findings import Kind, Level
from kvobs.testing import engine_config
from kvobs.testing.scripted import ScriptedConnector
from tests.support.configurations import TWO, check, config_of, layerwise, scripted, start

GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "scripted": lambda: config_of([scripted()]),
    "many": lambda: config_of([scripted(), scripted("HndConnector"), layerwise("kv_both"), scripted()]),
    "layerwise": lambda: config_of([
        layerwise("kv_consumer", kv_connector_extra_config={"tag": "LayerwiseConnector", "layerwise": True}),
        layerwise("kv_producer"),
    ]),
    "vLLM's own": lambda: config_of(TWO, {"names": ["bench"]}),
    "isolated": lambda: config_of(
        [scripted(), layerwise("kv_both")], {"best_effort": ["LayerwiseConnector"]}, kv_load_failure_policy="recompute"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_the_check_says_what_is_built(kind: str) -> None:
    config = GOOD[kind]()
    checked = check(config)
    assert checked.mistakes == []
    _, worker = start(config)
    said = checked.connectors
    assert [connector.name for connector in said] == [connector.name for connector in worker._side.connectors]
    assert [connector.is_best_effort for connector in said] == [
        connector.gate is not None for connector in worker._side.connectors
    ]
    assert [connector.kv_role for connector in said] == [c._kv_transfer_config.kv_role for c in worker._connectors]
    for connector, built in zip(said, worker._side.connectors, strict=True):
        facts, real = connector.facts, built.wrapped
        assert facts is not None
        assert facts.class_path == f"{type(real).__module__}.{type(real).__qualname__}"
        assert facts.supports_hma == supports_hma(real)
    assert ("hybrid KV cache manager" not in checked.off) == worker._all_support_hma
    # vLLM asks this before it builds anything, and hands over ``kv_connector_extra_config`` alone.
    is_piecewise = "full CUDA graphs" in checked.off
    assert is_piecewise == kvobs.MultiConnector.requires_piecewise_for_cudagraph(config[PATH])
    layouts = {connector.facts.layouts[False] for connector in said if connector.facts} - {None}
    assert (layouts or {None}) == {get_kv_connector_cache_layout(engine_config(KVTransferConfig(**config)))}


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector", "SimpleCPUOffloadConnector"])
def test_vllms_classes_answer_in_advance_as_for_this_model(name: str) -> None:
    """Those that need memory or a network to be built, too."""
    own = {"cpu_bytes_to_use": 1 << 30} if "Offload" in name else {}
    transfer = KVTransferConfig(**config_of([{"kv_connector": name, "kv_role": "kv_both", PATH: own}]))
    (connector,) = check(vars(transfer)).connectors
    assert connector.facts is not None
    assert connector.facts.layouts[False] == get_kv_connector_cache_layout(engine_config(transfer))
    assert connector.facts.supports_hma


def test_a_missing_library_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of([{"kv_connector": "NixlConnector", "kv_role": "kv_both"}])
    monkeypatch.setattr(known, "is_installed", lambda module: False)
    (mistake,) = check(config).mistakes
    assert mistake.says == "found 'NixlConnector', which needs 'nixl', which is not installed here"
    assert mistake.fix == "install it: pip install nixl"


def test_methods_that_are_no_hooks_of_vllm_are_named() -> None:
    """A model runner of another platform may call them, on the router in the connector's place."""
    checked = check(config_of([scripted("PlatformConnector", kv_connector_module_path="tests.unit.test_strangers")]))
    assert checked.mistakes == []
    methods = "PlatformConnector: register_runner, start_load_kv_before_update"
    assert checked.off["other methods"].endswith(f"kvobs passes calls on, and does not record them ({methods})")


@pytest.mark.parametrize("name", KVConnectorFactory._registry)
def test_the_source_of_a_class_says_what_its_import_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of vLLM's connectors whose libraries are here; of the others the bases at least are read."""
    monkeypatch.setattr(known, "is_installed", lambda _: True)
    is_read = name != "LMCacheMPConnector"  # its module makes it of what is installed
    if is_read:
        assert vllm_source.class_of(name, None).__name__ == {"NixlConnector": "NixlPullConnector"}.get(name, name)
    config = config_of([{"kv_connector": name, "kv_role": "kv_both"}])
    read, imported = check_text(config), check(config)
    check_classes(read)
    facts = imported.connectors[0].facts
    if facts is not None:
        piecewise = None if name == "MultiConnector" else facts.requires_piecewise  # it asks its connectors
        assert read.connectors[0].facts == replace(facts, other_methods=(), requires_piecewise=piecewise)
        imported.off.pop("other methods", None)
        assert (read.off, read.warnings) == (imported.off, imported.warnings)
    assert read.unknown == []


@pytest.mark.parametrize(("name", "module", "says"), [
    ("PlatformConnector", "tests.unit.test_strangers", ""),
    ("Script", "kvobs.testing", "which is not a KVConnectorBase_V1"),
    ("Nothing", "json", "can't be read from the source of json. Fix: import it: kvobs check --deep"),
    ("X", "no.such", "whose module 'no.such' is not installed here"),
    ("X", "", "whose module '' is not installed here"),
    ("KvobsConnector", "kvobs", "which kvobs does not have. Fix: use 'MultiConnector'"),
])  # fmt: skip
def test_a_class_from_elsewhere_is_read_or_the_reason_is_given(name: str, module: str, says: str) -> None:
    checked = check_text(config_of([{"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": module}]))
    check_classes(checked)
    found = [str(finding) for finding in (*checked.mistakes, *checked.unknown)]
    assert [says in text for text in found] == [True] * bool(says), found


class OfMlaConnector(ScriptedConnector):
    """Needs a layout for models with MLA only."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND" if vllm_config.model_config.use_mla else None


class RaisingConnector(ScriptedConnector):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        raise OSError


def own(name: str) -> dict[str, Any]:
    return scripted(name, kv_connector_module_path=__name__)


@pytest.mark.parametrize(("of", "level", "kind"), [
    ([own("OfMlaConnector"), scripted("NhdConnector")], Level.WARNING, kinds.LAYOUTS_OF_SOME),
    ([own("RaisingConnector")], Level.MISTAKE, kinds.RAISES),
    ([own("scripted")], Level.MISTAKE, kinds.NO_CLASS),
    ([own("Nothing")], Level.MISTAKE, kinds.NO_IMPORT),
])  # fmt: skip
def test_only_an_import_shows_it(of: list[dict[str, Any]], level: Level, kind: Kind) -> None:
    checked = check(config_of(of))
    assert [finding.kind for finding in checked.of(level)] == [kind]


def test_a_plugin_that_has_replaced_the_router_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {ROUTER: lambda: OfMlaConnector})
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    checked = check({key: value for key, value in config_of().items() if key != "kv_connector_module_path"})
    found = [str(finding) for finding in checked.warnings if finding.kind is kinds.OTHER_PLUGIN]
    assert [f"{__name__}.OfMlaConnector as MultiConnector" in text for text in found] == [True]
