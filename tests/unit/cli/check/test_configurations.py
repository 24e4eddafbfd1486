"""Configurations as people write them: from vLLM's, llm-d's and others' documents, with the slips that are usual.

Each has the verdict that is right for vLLM 0.32 with nixl, and without the other libraries: the mistakes and warnings
by their path, and words of each cure.
"""

# ruff: noqa: E501
# A case is a line.
from collections.abc import Mapping
from typing import Any

import pytest

from kvobs.cli.check.rewrite import rewrite
from kvobs.schema.config import PATH
from tests.support.configurations import check

GIB = 1 << 30
OFF = ("kv_connector", "--rewrite")
STOCK_OFF = ("kv_connector_module_path", "--rewrite")
MOONCAKE = "pip install mooncake-transfer-engine ('mooncake' is another"
Verdict = list[tuple[str, str]]


def one(connector: str, role: str = "kv_both", extra: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    own = {} if extra is None else {PATH: dict(extra)}
    return {"kv_connector": connector, "kv_role": role, **own, **more}


def multi(*connectors: Any, role: str = "kv_both", kvobs: Any = None, **more: Any) -> dict[str, Any]:
    options = {} if kvobs is None else {"kvobs": kvobs}
    return one("MultiConnector", role, {"connectors": list(connectors), **options}, **more)


def ours(*connectors: Any, kvobs: Any = None, **more: Any) -> dict[str, Any]:
    return multi(*connectors, kvobs=kvobs, kv_connector_module_path="kvobs", **more)


def key_of(i: int, rest: str) -> str:
    return f"{PATH}.connectors[{i}].{rest}"


NIXL = one("NixlConnector")
CPU = one("OffloadingConnector", extra={"cpu_bytes_to_use": GIB})
TIERS = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": GIB}
FS = [{"type": "fs", "root_dir": "/mnt/kv"}]
STORED = one("MooncakeStoreConnector", extra={"load_async": True, "lookup_async": True})

# Configuration, mistakes, warnings beside the one that kvobs is not enabled.
CASES: dict[str, tuple[dict[str, Any], Verdict, Verdict]] = {
    "nixl": (NIXL, [], []),
    "nixl of llm-d": (one("NixlConnector", "kv_producer", {"backends": ["UCX"]}, kv_load_failure_policy="recompute"), [], []),
    "lmcache": (one("LMCacheConnectorV1"), [("kv_connector", "pip install lmcache")], []),
    "lmcache dynamic": (one("LMCacheConnectorV1Dynamic", kv_connector_module_path="lmcache.integration.vllm.lmcache_connector_v1"), [("kv_connector", "install the package that has the module 'lmcache'")], []),
    "lmcache dynamic, no module": (one("LMCacheConnectorV1Dynamic"), [("kv_connector", "set kv_connector_module_path to 'lmcache.integration.vllm.lmcache_connector_v1'")], []),
    "mooncake": (one("MooncakeConnector"), [("kv_connector", MOONCAKE)], []),
    "nixl and store": (multi(NIXL, STORED), [(key_of(1, "kv_connector"), MOONCAKE)], []),
    "p2p nccl": (one("P2pNcclConnector", "kv_producer", kv_port="21001", kv_buffer_size="1e1"), [("kv_connector", "use 'NixlConnector' or 'MooncakeConnector', whose options differ"), ("kv_buffer_size", "remove it")], []),
    "offloading": (one("OffloadingConnector", extra={"block_size": 64, "cpu_bytes_to_use": 10**9}), [], []),
    "tiering": (one("OffloadingConnector", extra={**TIERS, "secondary_tiers": FS}), [], []),
    "offloading of old": (one("OffloadingConnector", extra={"num_cpu_blocks": 1000}), [(f"{PATH}.cpu_bytes_to_use", "replace num_cpu_blocks, which older vLLMs had, with cpu_bytes_to_use")], []),
    "offloading, misspelt size": (one("OffloadingConnector", extra={"cpu_byte_to_use": GIB}), [(f"{PATH}.cpu_bytes_to_use", "rename 'cpu_byte_to_use'")], []),
    "offloading, no size": (one("OffloadingConnector"), [(f"{PATH}.cpu_bytes_to_use", 'add "cpu_bytes_to_use"')], []),
    "offloading, wrong spec": (one("OffloadingConnector", extra={"spec_name": "TieredOffloadingSpec", "cpu_bytes_to_use": GIB}), [(f"{PATH}.spec_name", "use 'TieringOffloadingSpec'")], []),
    "offloading, 10GB": (one("OffloadingConnector", extra={"cpu_bytes_to_use": "10GB"}), [(f"{PATH}.cpu_bytes_to_use", "without a unit")], []),
    "offloading, tiers ignored": (one("OffloadingConnector", extra={"cpu_bytes_to_use": GIB, "secondary_tiers": FS}), [], [(f"{PATH}.secondary_tiers", 'add "spec_name": "TieringOffloadingSpec"')]),
    "offloading, options of another": (one("OffloadingConnector", extra={"cpu_bytes_to_use": GIB, "lazy_offload": True, "cpu_bytes_to_use_per_rank": GIB}), [], [(f"{PATH}.lazy_offload", "remove it"), (f"{PATH}.cpu_bytes_to_use_per_rank", "")]),
    "tiering, unknown": (one("OffloadingConnector", extra={**TIERS, "secondary_tiers": [{"type": "fs_python"}, {"type": "M", "module_path": "m"}, {}]}), [(f"{PATH}.secondary_tiers[0].type", "use one of them, or set module_path"), (f"{PATH}.secondary_tiers[2].type", "'obj', 'p2p'")], []),
    "tiering, no list": (one("OffloadingConnector", extra={**TIERS, "secondary_tiers": FS[0]}), [(f"{PATH}.secondary_tiers", "a list of objects")], []),
    "simple offload": (one("SimpleCPUOffloadConnector", extra={"cpu_bytes_to_use": GIB}), [], []),
    "moriio": (one("MoRIIOConnector", extra={"http_port": 8000}), [("kv_connector", "pip install amd-mori"), ("kv_connector", "pip install msgpack")], []),
    "nixl and example": (multi(NIXL, one("ExampleConnector", extra={"shared_storage_path": "local_storage"})), [], []),
    "two offloading": (multi(CPU, CPU), [], [(key_of(1, "kv_connector"), "route with kvobs")]),
    "two offloading, kvobs": (ours(CPU, CPU), [], []),
    "policy in a connector": (multi(NIXL, {**CPU, "kv_load_failure_policy": "recompute"}), [], [(key_of(1, "kv_load_failure_policy"), "at the top level")]),
    "connectors by name": (one("MultiConnector", extra={"connectors": {"nixl": NIXL}}), [(f"{PATH}.connectors", "list the connectors as objects")], []),
    "connectors on top": ({"kv_connector": "MultiConnector", "kv_role": "kv_both", "connectors": [NIXL]}, [("connectors", "move it into kv_connector_extra_config"), (f"{PATH}.connectors", "list the connectors")], []),
    "multi in multi": (multi(NIXL, multi(CPU)), [], [(key_of(1, "kv_connector"), "move its connectors to the list")]),
    "mistake in a nested one": (multi(NIXL, multi(one("OffloadingConnector"))), [(key_of(1, f"{PATH}.connectors[0].{PATH}.cpu_bytes_to_use"), "add")], [(key_of(1, "kv_connector"), "move its connectors")]),
    "producer, connector consumes": (multi(one("NixlConnector", "kv_consumer"), CPU, role="kv_producer"), [], [(key_of(0, "kv_role"), "use the role that this engine has")]),
    "ascend": (multi(one("MooncakeConnectorV1", "kv_producer"), one("AscendStoreConnector", "kv_producer")), [(key_of(0, "kv_connector"), "install vllm-ascend"), (key_of(1, "kv_connector"), "install vllm-ascend")], []),
    "kvobs": (ours(NIXL, CPU), [], []),
    "kvobs isolates cpu": (ours(CPU, NIXL, kvobs={"best_effort": ["OffloadingConnector"]}, kv_load_failure_policy="recompute"), [], []),
    "kvobs, slips": (ours(CPU, kvobs={"load_polcy": "first", "slow_call_ms": "1s", "tracing": "requests", "lookup_timeout": 5}), [(f"{PATH}.kvobs.slow_call_ms", "use an allowed value"), (f"{PATH}.kvobs.tracing", "use an allowed value"), (f"{PATH}.kvobs.load_polcy", "use 'load_policy'"), (f"{PATH}.kvobs.lookup_timeout", "use 'lookup_timeout_ms'")], []),
    "KvobsConnector": (one("KvobsConnector", kv_connector_module_path="kvobs", extra={"connectors": [NIXL]}), [("kv_connector", "use 'MultiConnector'")], []),
    "wrong module": (multi(NIXL, kv_connector_module_path="kv_obs"), [("kv_connector_module_path", "use 'kvobs'")], []),
    "wrong case": (one("nixlconnector", "KV_BOTH"), [("kv_role", "use an allowed value"), ("kv_connector", "use 'NixlConnector'")], []),
    "no role": ({"kv_connector": "NixlConnector"}, [("kv_role", 'add "kv_role": "kv_both"')], []),
    "unknown key": ({**NIXL, "extra_confg": {}}, [("extra_confg", "remove it; options of the connector itself")], []),
    "misspelt key": ({**NIXL, "kv_connector_extra_confg": {}}, [("kv_connector_extra_confg", "use 'kv_connector_extra_config'")], []),
    "nothing": ({}, [("kv_connector", "name the class of the connector"), ("kv_role", '"kv_both"')], []),
    "dynamo, no module": (one("DynamoConnector"), [("kv_connector", "kv_connector_module_path to 'kvbm.vllm_integration.connector'")], []),
    # single names, and more of what vLLM refuses or ignores
    "foo": (one("FooConnector"), [("kv_connector", "use one of them, or set kv_connector_module_path")], []),
    "options of kvobs on top": ({**ours(CPU), "load_policy": "first", "kvobs": {}}, [("load_policy", "move it into kv_connector_extra_config.kvobs"), ("kvobs", "move it into kv_connector_extra")], []),
    "a key too deep": (one("NixlConnector", extra={"kv_load_failure_policy": "recompute"}), [], [(f"{PATH}.kv_load_failure_policy", "next to kv_connector")]),
    "ten bytes": (one("OffloadingConnector", extra={"cpu_bytes_to_use": 10}), [], [(f"{PATH}.cpu_bytes_to_use", "give bytes")]),
    "nixl backends as text": (one("NixlConnector", extra={"backends": "UCX"}), [(f"{PATH}.backends", "write a list")], []),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_configuration_gets_the_right_verdict(kind: str) -> None:
    config, mistakes, warnings = CASES[kind]
    checked = check(config)
    found = [(finding.path, finding.fix + finding.allowed) for finding in checked.mistakes]
    assert sorted(path for path, _ in found) == sorted(path for path, _ in mistakes)
    for path, cure in mistakes:
        assert any(where == path and cure in fix for where, fix in found), found
    if not str(config.get("kv_connector_module_path")).startswith("kv"):
        warnings = [STOCK_OFF if config.get("kv_connector") == "MultiConnector" else OFF, *warnings]
    noted = [(finding.path, finding.fix) for finding in checked.warnings]
    assert [path for path, _ in noted] == [path for path, _ in warnings]
    assert all(cure in fix for (_, fix), (_, cure) in zip(noted, warnings, strict=True)), noted


@pytest.mark.parametrize("kind", [kind for kind, (_, mistakes, _) in CASES.items() if not mistakes])
def test_good_configuration_is_good_when_rewritten(kind: str) -> None:
    assert check(rewrite(CASES[kind][0])).mistakes == []
