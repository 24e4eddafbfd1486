"""A configuration that is rewritten to use kvobs keeps all that it says."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvobs
from kvobs.cli.check.rewrite import Router, rewrite, router_of
from kvobs.connectors.configured import read_specs
from tests.support.configurations import check

STOCK_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
CLASSES = ["OffloadingConnector", "ExampleConnector", "NixlConnector", "DecodeBenchConnector",
           "SimpleCPUOffloadConnector"]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
EXTRA = st.fixed_dictionaries(
    {"cpu_bytes_to_use": st.integers(1, 1 << 40)}, optional={"shared_storage_path": JSON, "anything": JSON}
)
OWN = {
    "kv_connector": st.sampled_from(CLASSES),
    "kv_role": st.sampled_from(["kv_both", "kv_producer", "kv_consumer"]),
    "kv_connector_extra_config": EXTRA,
}
MORE = {
    "engine_id": st.text(min_size=1, max_size=5),
    "kv_port": st.integers(1, 65535),
    "kv_buffer_device": st.sampled_from(["cpu", "cuda"]),
    "kv_load_failure_policy": st.sampled_from(["fail", "recompute"]),
    "enable_permute_local_kv": st.booleans(),
}
singles = st.fixed_dictionaries(OWN, optional=MORE)
names = st.lists(st.from_regex(r"[a-z]{8,12}", fullmatch=True), min_size=1, max_size=1)


@st.composite
def multis(draw: st.DrawFn) -> dict[str, Any]:
    extra: dict[str, Any] = {**draw(EXTRA), "connectors": draw(st.lists(singles, min_size=1, max_size=3))}
    if draw(st.booleans()):
        extra["kvobs"] = draw(st.fixed_dictionaries({}, optional={"load_policy": st.just("longest"), "names": names}))
    own = {"kv_connector": "MultiConnector", "kv_role": draw(OWN["kv_role"]), "kv_connector_extra_config": extra}
    config: dict[str, Any] = own | draw(st.fixed_dictionaries({}, optional=MORE))
    module = draw(st.sampled_from([None, STOCK_MODULE, "absent"]))
    return config if module == "absent" else {**config, "kv_connector_module_path": module}


@given(multis() | singles)
def test_a_rewritten_configuration_has_kvobs_and_passes(stock: dict[str, Any]) -> None:
    before = copy.deepcopy(stock)
    config = rewrite(stock)
    assert stock == before
    assert (router_of(stock) is Router.KVOBS, router_of(config)) == (False, Router.KVOBS)
    checked = check(config)
    assert (checked.mistakes, checked.router) == ([], Router.KVOBS)
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**config)) is kvobs.MultiConnector
    bare = {**config, "kv_connector_extra_config": {"connectors": config["kv_connector_extra_config"]["connectors"]}}
    for ours in (config, bare):
        assert list(rewrite(ours).items()) == list(ours.items()), "one with kvobs stays as it is"


@given(multis())
def test_multi_connector_keeps_its_settings(stock: dict[str, Any]) -> None:
    config = rewrite(stock)
    assert config == {**stock, "kv_connector_module_path": "kvobs"}


@given(singles)
def test_a_single_connector_is_the_only_one_and_sees_the_same(stock: dict[str, Any]) -> None:
    config = rewrite(stock)
    transfer = KVTransferConfig(**config)
    (spec,) = read_specs(transfer)
    seen, was = vars(spec.transfer_config), vars(KVTransferConfig(**stock))
    unequal = {key for key in was if seen[key] != was[key]}
    # vLLM reads the policy of the top level only; an engine id that nobody gave is drawn anew each time.
    assert unequal <= {"kv_load_failure_policy"} | ({"engine_id"} - stock.keys())
    assert transfer.kv_load_failure_policy == was["kv_load_failure_policy"]
    assert spec.transfer_config.engine_id == transfer.engine_id
    assert spec.name == stock["kv_connector"]
    own = {"kv_connector", "kv_connector_module_path", "kv_connector_extra_config"}
    assert {k: v for k, v in config.items() if k not in own} == {k: v for k, v in stock.items() if k not in own}


def test_another_packages_router_is_a_single_connector() -> None:
    another = {"kv_connector": "MultiConnector", "kv_connector_module_path": "somebody.elses", "kv_role": "kv_both"}
    assert rewrite(another)["kv_connector_extra_config"]["connectors"] == [another]


@pytest.mark.parametrize("extra", [None, [], "text", {}, {"connectors": 3}, {"connectors": [{}], "kvobs": 1}])
def test_mistakes_stay_when_rewritten(extra: Any) -> None:
    """The check reports it."""
    stock = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = rewrite(stock)
    assert config == stock | {"kv_connector_module_path": "kvobs"}
    assert check(config).mistakes
