"""Whatever JSON stands in the configuration: it is a configuration, or a ``ConfigError`` of bounded length."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from vllm.config import KVTransferConfig

from kvobs.connectors.configured import read_specs
from kvobs.schema.config import ConfigError, Configuration, read
from kvobs.schema.options import Options, TracingOptions, VerifyOptions
from kvobs.telemetry.tracing.trace_context import KEY
from tests.support.contexts import json_values

SECRET = "s3cr3t-" + "key" * 9
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

# Long keys and very many have tests of their own.
names_of_options = st.sampled_from([*Options.model_fields, *TracingOptions.model_fields])
keys = names_of_options | st.text(max_size=9)
anything = st.recursive(
    json_values | st.floats() | st.integers(-(10**400), 10**400) | names_of_options,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)
of_options: dict[str, Any] = dict.fromkeys(Options.model_fields, anything)
of_options["tracing"] = anything | st.dictionaries(st.sampled_from(sorted(TracingOptions.model_fields)), anything)
of_options["verify"] = anything | st.dictionaries(st.sampled_from(sorted(VerifyOptions.model_fields)), anything)
connectors = st.lists(
    anything
    | st.fixed_dictionaries(
        {"kv_connector": st.just("OffloadingConnector") | anything}, optional={"kv_role": anything}
    ),
    max_size=4,
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "connectors": anything | connectors | st.just([CONNECTOR, CONNECTOR]),
        KEY: anything | st.fixed_dictionaries({}, optional=of_options) | st.dictionaries(keys, anything, max_size=3),
        "else": anything,
    },
)


def outcome(extra: dict[str, Any]) -> Configuration | ConfigError:
    try:
        return read(extra)
    except ConfigError as error:
        return error


@settings(max_examples=300)
@given(configurations)
def test_any_json_is_a_configuration_or_its_mistakes_are_named(extra: dict[str, Any]) -> None:
    found = outcome(extra)
    if isinstance(found, ConfigError):
        assert len(found.mistakes) > 0
        assert all(mistake.path.startswith("kv_connector_extra_config") for mistake in found.mistakes)
        assert max(len(str(mistake)) for mistake in found.mistakes) < 2000
    else:
        assert len(found.names) == len(extra["connectors"]) == len(set(found.names))


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["kv_connector", "kv_role", "engine_id", "kv_port", "x"]), anything))
def test_any_json_in_a_connectors_place_is_a_connector_or_named(entry: dict[str, Any]) -> None:
    extra = {"connectors": [CONNECTOR, {**CONNECTOR, **entry}]}
    parent = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    try:
        assert len(read_specs(parent)) == 2
    except ConfigError as error:
        assert all("connectors[1]" in mistake.path for mistake in error.mistakes)


def test_a_configuration_that_json_can_just_nest_is_read() -> None:
    """Deeper than this, Python's JSON does not read it either."""
    depth = 900
    for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        for name in Options.model_fields:
            assert isinstance(outcome({"connectors": [CONNECTOR], KEY: {name: json.loads(deep)}}), ConfigError)
        assert isinstance(outcome({"connectors": json.loads(deep)}), ConfigError)


LONG: dict[str, dict[str, Any]] = {
    "a value": {"load_policy": "x" * 10**6},
    "a name": {"names": ["x" * 10**6]},
    "a number": {"slow_call_ms": -(10**4000)},
    "an option": {"x" * 10**6: 1},
    "an option of tracing": {"tracing": {"x" * 10**6: 1}},
    "a connector": {"min_tokens": {"x" * 10**6: 1}},
    "many values": {"names": list(range(10**4))},
    "many options": {str(i): 1 for i in range(10**4)},
    "many connectors": {"min_tokens": {str(i): 1 for i in range(10**4)}},
}


@pytest.mark.parametrize("what", LONG)
def test_a_message_is_short_for_long_values_and_many_errors(what: str) -> None:
    found = outcome({"connectors": [CONNECTOR], KEY: LONG[what]})
    assert isinstance(found, ConfigError)
    assert len(str(found)) < (20_000 if "many" in what else 2000)


WITH_SECRET: dict[str, Any] = {
    "good": [{**CONNECTOR, "kv_connector_extra_config": {"access_key": SECRET}}],
    "a class that nobody has": [{"kv_connector": "Nothing", "kv_connector_extra_config": {"access_key": SECRET}}],
    "a wrong role": [{**CONNECTOR, "kv_role": "x", "kv_connector_extra_config": {"access_key": SECRET}}],
    "no class": [{"kv_connector_extra_config": {"access_key": SECRET}}],
    "no list": {**CONNECTOR, "kv_connector_extra_config": {"access_key": SECRET}},
    "no list, and the secret first": {"kv_connector_extra_config": {"access_key": SECRET}},
    "a list too many": [[{"access_key": SECRET}]],
    "a misspelt key": [{**CONNECTOR, "kv_conector_extra_config": {"access_key": SECRET}}],
    "no object": [{**CONNECTOR, "kv_connector_extra_config": SECRET}],
}


@pytest.mark.parametrize("how", WITH_SECRET)
def test_no_message_shows_what_is_configured_for_a_connector(how: str) -> None:
    extra = {"connectors": WITH_SECRET[how]}
    parent = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    try:
        read_specs(parent)
    except ConfigError as error:
        assert "s3cr3t" not in str(error)
    else:
        assert how == "good"
