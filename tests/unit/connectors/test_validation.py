"""Each mistake has a path, what was found, what is allowed, and a fix; with vLLM and without it the same."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig

from kvobs.connectors.specs import WORDS
from kvobs.connectors.validation import Validated, find_classes, transfer_config, validate
from kvobs.schema import config
from kvobs.schema.findings import Finding
from kvobs.vllm_api.versions import TransferConfig

ENTRY = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
CONNECTORS = f"{config.PATH}.connectors"
ONLY_OLDER = {"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"}
KEYS = sorted(TransferConfig.model_fields.keys() - ONLY_OLDER)


def test_the_keys_without_vllm_are_those_of_vllm() -> None:
    """This one, and older ones with a few more."""
    assert set(KEYS) == {field.name for field in fields(KVTransferConfig)}


VALUES = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats() | st.lists(st.none(), max_size=1)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=1)
    | st.sampled_from(["kv_both", "kv_producer", "kv_consumer", "recompute", "fail", "12"])
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*KEYS, "kv_rol", ""]), VALUES))
def test_without_vllm_the_same_is_wrong(entry: dict[str, Any]) -> None:
    """So that a configuration can be checked on a laptop."""
    with_vllm, without = (transfer_config(entry, "here", cls)[1] for cls in (KVTransferConfig, TransferConfig))
    assert {finding.path for finding in with_vllm} == {finding.path for finding in without}
    assert all(finding.path.startswith("here") and finding.says and finding.fix for finding in with_vllm)
    try:
        KVTransferConfig(**entry)
    except Exception:
        assert with_vllm
    else:
        assert not with_vllm


ROLES = "'kv_producer', 'kv_both' or 'kv_consumer'"
ADD_ROLE = 'add "kv_role": "kv_both", or the role of this engine'
NO_PORT = "an integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("entry", "finding"),
    [
        ({"kv_connector": "X"}, ("kv_role", "is missing", ROLES, ADD_ROLE)),
        ({"kv_connector": "X", "kv_role": None}, ("kv_role", "found None", ROLES, ADD_ROLE)),
        ({**ENTRY, "kv_role": "both"}, ("kv_role", "found 'both'", ROLES, "use an allowed value")),
        (ENTRY | {"kv_port": "a"}, ("kv_port", "found a value of type str", NO_PORT, "correct the value or remove it")),
    ],
)
def test_a_mistake_says_all_that_is_needed(entry: dict[str, Any], finding: tuple[str, str, str, str]) -> None:
    key, found, allowed, fix = finding
    assert transfer_config(entry, "c", KVTransferConfig) == (None, [Finding(f"c.{key}", found, allowed, fix)])


@pytest.mark.parametrize(
    ("key", "says", "fix"),
    [
        ("kv_rol", "unknown key", "use 'kv_role'"),
        ("cpu_bytes", "unknown key", "remove it; options of the connector itself"),
        *((key, "found a key that this vLLM no longer has", "remove it") for key in sorted(ONLY_OLDER)),
        ("kvobs", "is in the wrong place", f"move it into {config.PATH}"),
        ("tracing", "found an option of kvobs in the wrong place", f"move it into {config.PATH}.kvobs"),
    ],
)
def test_an_unknown_key_is_given_the_one_that_was_meant(key: str, says: str, fix: str) -> None:
    _, (finding,) = transfer_config({**ENTRY, key: 1}, "", KVTransferConfig)
    assert finding.path == key
    assert finding.says.startswith(says)
    assert finding.fix.startswith(fix)


def test_connectors_keep_a_name_where_nothing_else_is_right() -> None:
    configuration, found = config.validate({"connectors": [ENTRY, 7, {}], "kvobs": 1})
    assert configuration.names == ("ExampleConnector", "1", "2")
    assert [finding.path.rpartition(".")[2] for finding in found] == ["connectors[1]", "kv_connector", "kvobs"]


@pytest.mark.parametrize(("policy", "count"), [("recompute", 0), ("fail", 1), (None, 1)])
def test_best_effort_connectors_need_recomputation(policy: str | None, count: int) -> None:
    for isolate in ([], ["ExampleConnector"]):
        checked = validate({"connectors": [ENTRY], "kvobs": {"best_effort": isolate}}, policy, TransferConfig)
        expected = [("kv_load_failure_policy", "found", "'recompute'", "set")] * len(isolate) * count
        assert [(m.path, m.found[:5], m.allowed, m.fix[:3]) for m in checked.mistakes] == expected


@pytest.mark.parametrize("policy", ["recompute", "fail", None])
@pytest.mark.parametrize("own", ["recompute", "fail", None])
def test_a_connectors_policy_that_differs_is_a_warning(own: str | None, policy: str | None) -> None:
    checked = validate({"connectors": [{**ENTRY, "kv_load_failure_policy": own}]}, policy, TransferConfig)
    is_ignored = own is not None and own != (policy or "fail")
    expected = [(f"{CONNECTORS}[0].kv_load_failure_policy", "found", "set")] * is_ignored
    assert [(warning.path, warning.found[:5], warning.fix[:3]) for warning in checked.warnings] == expected


def test_all_errors_are_found_at_once_with_and_without_vllm() -> None:
    """Without vLLM classes are unknown, and all else is found."""
    extra = {"connectors": [{"kv_connector": "X"}, {**ENTRY, "kv_rol": 1}], "kvobs": {"load_policy": 1}}
    expected = ["kvobs.load_policy", "connectors[0].kv_role", "connectors[1].kv_rol"]
    for transfer_class in (KVTransferConfig, TransferConfig):
        checked = validate(extra, "fail", transfer_class)
        assert [mistake.path.removeprefix(f"{config.PATH}.") for mistake in checked.mistakes] == expected
        assert [name for name, _ in checked.entries.values()] == ["X", "ExampleConnector"]
        assert checked.specs == []


def classes(extra: dict[str, Any]) -> Validated:
    """Return a validation in which each connector's class has its name, and nothing else."""
    checked = validate(extra, "recompute", TransferConfig)
    words = {"NixlConnector": {"do_remote_prefill", "remote_host"}}
    find_classes(checked, lambda name, module: type(name, (), {WORDS: words.get(name, ())}))
    return checked


def test_a_connector_that_hands_kv_over_has_no_minimum() -> None:
    """What another engine has computed for a request is taken, however little it is."""
    extra = {
        "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, ENTRY],
        "kvobs": {"names": ["nixl", "files"], "min_tokens": {"nixl": 16, "files": 16}},
    }
    says = "found a minimum for NixlConnector, which can't have one: it transfers KV to another engine"
    assert classes(extra).mistakes == [Finding(f"{config.PATH}.kvobs.min_tokens.nixl", says, fix="remove it")]


@pytest.mark.parametrize(
    ("verify", "policy", "paths"),
    [
        ({"sample_ratio": 0.01, "on_mismatch": "recompute"}, "recompute", []),
        ({"sample_ratio": 0.01}, "fail", []),
        ({"on_mismatch": "recompute"}, "recompute", [f"{config.PATH}.kvobs.verify.sample_ratio"]),
        ({"sample_ratio": 0.01, "on_mismatch": "recompute"}, "fail", ["kv_load_failure_policy"]),
        ({"on_mismatch": "recompute"}, None, [f"{config.PATH}.kvobs.verify.sample_ratio", "kv_load_failure_policy"]),
    ],
)
def test_loads_with_wrong_bytes_fail_only_if_they_are_recomputed(verify: Any, policy: Any, paths: list[str]) -> None:
    checked = validate({"connectors": [ENTRY], "kvobs": {"verify": verify}}, policy, TransferConfig)
    assert [mistake.path for mistake in checked.mistakes] == paths
