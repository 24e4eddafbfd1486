"""Each mistake has a path, what was found, what is allowed, and a fix; with vLLM and without it the same."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig

from kvobs.findings import Finding, TransferConfig, ignored_policy, of_isolation, parse, read_options, transfer_mistakes

ENTRY = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
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
    with_vllm, without = (transfer_mistakes(entry, "here", cls) for cls in (KVTransferConfig, TransferConfig))
    assert {finding.path for finding in with_vllm} == {finding.path for finding in without}
    assert all(finding.path.startswith("here") and finding.says and finding.fix for finding in with_vllm)
    try:
        KVTransferConfig(**entry)
    except Exception:
        assert with_vllm
    else:
        assert not with_vllm


@pytest.mark.parametrize(
    ("entry", "finding"),
    [
        (
            {"kv_connector": "X"},
            Finding(
                "c.kv_role",
                "found nothing, allowed: 'kv_producer', 'kv_both' or 'kv_consumer'",
                'add "kv_role": "kv_both", or the role of this engine',
            ),
        ),
        (
            {**ENTRY, "kv_role": "both"},
            Finding(
                "c.kv_role",
                "found 'both', allowed: 'kv_producer', 'kv_both' or 'kv_consumer'",
                "write what is allowed",
            ),
        ),
        (
            {**ENTRY, "kv_port": "a secret"},
            Finding(
                "c.kv_port",
                "found a value of type str, allowed: a valid integer, unable to parse string as an integer",
                "write that, or leave it out",
            ),
        ),
    ],
)
def test_a_mistake_says_all_that_is_needed(entry: dict[str, Any], finding: Finding) -> None:
    assert transfer_mistakes(entry, "c", KVTransferConfig) == [finding]


@pytest.mark.parametrize(
    ("key", "fix"), [("kv_rol", "write 'kv_role'"), ("cpu_bytes", "leave it out; what is for the connector itself")]
)
def test_an_unknown_key_is_given_the_one_that_was_meant(key: str, fix: str) -> None:
    (finding,) = transfer_mistakes({**ENTRY, key: 1}, "", KVTransferConfig)
    assert finding.path == key
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"nams": []}, "write 'names'"),
        ({"tracing": {"levle": 1}}, "write 'level'"),
        ({"zzz": 1}, "leave it out"),
        ({"load_policy": 1}, "write what is allowed, or leave it out"),
    ],
)
def test_a_wrong_option_has_a_fix_too(options: dict[str, Any], fix: str) -> None:
    configuration, (finding,) = read_options({"connectors": [ENTRY], "kvobs": options})
    assert finding.fix == fix
    assert configuration.names == ("ExampleConnector",)


def test_children_keep_a_name_where_nothing_else_is_right() -> None:
    configuration, found = read_options({"connectors": [ENTRY, 7, {}], "kvobs": 1})
    assert configuration.names == ("ExampleConnector", "1", "2")
    assert [finding.path.rpartition(".")[2] for finding in found] == ["connectors[1]", "kv_connector", "kvobs"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no JSON: Expecting value: line 1 column 1"),
        ('{"a": 1,}', "is no JSON: .* line 1 column"),
        ("[]", "is a list, needs an object"),
        ("null", "is a NoneType, needs an object"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_json_object_is_told_where(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_a_configuration_is_what_its_json_says() -> None:
    assert parse('{"kv_port": 1}') == {"kv_port": 1}


@pytest.mark.parametrize(("isolate", "policy", "count"), [((), "fail", 0), (["a"], "recompute", 0), (["a"], "fail", 1)])
def test_best_effort_children_need_recomputation(isolate: list[str], policy: str, count: int) -> None:
    assert len(of_isolation(isolate, policy)) == count


@pytest.mark.parametrize(
    ("own", "effective", "count"), [(None, "fail", 0), ("fail", "fail", 0), ("recompute", "fail", 1)]
)
def test_a_childs_policy_that_differs_is_worth_a_word(own: str | None, effective: str, count: int) -> None:
    assert len(ignored_policy(own, effective, "c")) == count
