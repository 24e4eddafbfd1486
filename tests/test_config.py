"""Every mistake in the options is named with its JSON path, what was found and what is allowed."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.config import ConfigError, Options, read

TWO = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "OffloadingConnector"}]
THREE = [*TWO, {"kv_connector": "NixlConnector"}]


def mistakes(connectors: Any = TWO, **kvobs: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        read({"connectors": connectors, "kvobs": kvobs})
    return error.value.mistakes


def test_no_options_at_all_are_a_valid_configuration() -> None:
    assert read({"connectors": TWO}).options == Options(names=(), load_policy="first", lookup_timeout_ms=None)


def test_children_are_named_by_their_connector_numbered_when_repeated() -> None:
    assert read({"connectors": THREE}).names == ("OffloadingConnector", "OffloadingConnector-2", "NixlConnector")


def test_given_names_come_first_and_the_rest_keep_theirs() -> None:
    assert read({"connectors": THREE, "kvobs": {"names": ["cpu"]}}).names == (
        "cpu",
        "OffloadingConnector",
        "NixlConnector",
    )


def test_a_default_name_steps_aside_for_a_given_one() -> None:
    names = read({"connectors": TWO, "kvobs": {"names": ["OffloadingConnector"]}}).names
    assert names == ("OffloadingConnector", "OffloadingConnector-2")


def test_other_keys_beside_connectors_are_not_ours() -> None:
    assert read({"connectors": TWO, "somebody_elses": 1}).names


@pytest.mark.parametrize(
    ("connectors", "message"),
    [
        (None, "kv_connector_extra_config.connectors: found None, needs a list with at least one connector"),
        ([], "kv_connector_extra_config.connectors: found [], needs a list with at least one connector"),
        ("NixlConnector", "kv_connector_extra_config.connectors: found 'NixlConnector', needs a list"),
        (["NixlConnector"], "connectors[0]: found 'NixlConnector', needs an object with the key 'kv_connector'"),
        ([{}], "connectors[0].kv_connector: found nothing, needs the name of a connector class"),
        ([{"kv_connector": 7}], "connectors[0].kv_connector: found 7, needs the name of a connector class"),
    ],
)
def test_bad_connectors_are_named(connectors: Any, message: str) -> None:
    (mistake,) = mistakes(connectors)
    assert message in mistake


def test_missing_connectors_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.connectors: found nothing"):
        read({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"load_polcy": "first"},
            "kv_connector_extra_config.kvobs.load_polcy: unknown option, "
            "allowed: 'names', 'load_policy', 'lookup_timeout_ms'",
        ),
        (
            {"load_policy": "best"},
            "kv_connector_extra_config.kvobs.load_policy: found 'best', allowed: 'first' or 'longest'",
        ),
        ({"load_policy": 1}, "kvobs.load_policy: found 1, allowed: 'first' or 'longest'"),
        ({"lookup_timeout_ms": 0}, "kvobs.lookup_timeout_ms: found 0, allowed: greater than 0"),
        ({"lookup_timeout_ms": -5}, "kvobs.lookup_timeout_ms: found -5, allowed: greater than 0"),
        ({"lookup_timeout_ms": "5"}, "kvobs.lookup_timeout_ms: found '5', allowed: a valid number"),
        ({"lookup_timeout_ms": True}, "kvobs.lookup_timeout_ms: found True, allowed: a valid number"),
        ({"lookup_timeout_ms": float("inf")}, "kvobs.lookup_timeout_ms: found inf, allowed: a finite number"),
        ({"names": "cpu"}, "kvobs.names: found 'cpu', allowed: a valid tuple"),
        ({"names": [1]}, "kvobs.names[0]: found 1, allowed: a valid string"),
        ({"names": ["a", "b", "c"]}, "kvobs.names: found 3 names, allowed: at most 2, one per connector"),
        ({"names": ["a", "a"]}, "kvobs.names: found 'a' for 2 connectors, needs a different name for each"),
        ({"names": [""]}, "kvobs.names[0]: found '', allowed: 1 to 64 letters, digits"),
        ({"names": ["a b"]}, "kvobs.names[0]: found 'a b', allowed: 1 to 64 letters, digits"),
        ({"names": ["x" * 65]}, "kvobs.names[0]: found 'xxx"),
        ({"names": ["kvobs"]}, "kvobs.names[0]: found 'kvobs', which kvobs keeps for itself"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    (mistake,) = mistakes(**options)
    assert message in mistake


def test_options_that_are_no_object_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.kvobs: found \['names'\], needs an object"):
        read({"connectors": TWO, "kvobs": ["names"]})


def test_all_mistakes_are_reported_at_once() -> None:
    found = mistakes(connectors=[*TWO, {}], load_policy="best", nmaes=[])
    assert len(found) == 3
    assert str(ConfigError(found)).count("\n- ") == 3
    assert "\n" not in str(ConfigError(found[:1]))


def test_a_long_wrong_value_is_cut() -> None:
    (mistake,) = mistakes(load_policy="x" * 500)
    assert len(mistake) < 250


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_value_is_accepted_or_named(value: Any) -> None:
    for option in Options.model_fields:
        try:
            read({"connectors": TWO, "kvobs": {option: value}})
        except ConfigError as error:
            assert all(m.startswith(f"kv_connector_extra_config.kvobs.{option}") for m in error.mistakes)
