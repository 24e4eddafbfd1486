"""Every mistake in the options is named with its JSON path, what was found and what is allowed."""

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from kvobs.schema.config import ConfigError, read, validate
from kvobs.schema.findings import Finding
from kvobs.schema.options import ExporterOptions, Options, TracingOptions
from kvobs.schema.signals import CONNECTORS_AT_MOST

CPU = "OffloadingConnector"
TWO = [{"kv_connector": CPU}, {"kv_connector": CPU}]
THREE = [*TWO, {"kv_connector": "NixlConnector"}]


def mistakes(**extra: Any) -> tuple[str, ...]:
    """Return the texts of all mistakes, without their fixes."""
    with pytest.raises(ConfigError) as error:
        read(extra)
    assert all(mistake.fix for mistake in error.value.mistakes)
    return tuple(f"{mistake.path}: {mistake.says}" for mistake in error.value.mistakes)


@pytest.mark.parametrize("group", [Options, TracingOptions, ExporterOptions])
def test_options_do_not_change(group: type[Any]) -> None:
    read_only = group()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(read_only, next(iter(group.model_fields)), None)


def test_no_options_at_all_are_a_valid_configuration() -> None:
    options = read({"connectors": TWO}).options
    assert options == Options(names=(), load_policy="first", lookup_timeout_ms=None)
    assert options.tracing == TracingOptions(level=None, propagate=False)
    assert (options.slow_load_ms, options.slow_call_ms) == (1000, 100)


@pytest.mark.parametrize(
    ("connectors", "given", "names"),
    [
        (THREE, [], ("OffloadingConnector", "OffloadingConnector-2", "NixlConnector")),
        (THREE, ["cpu"], ("cpu", "OffloadingConnector", "NixlConnector")),
        (TWO, ["OffloadingConnector"], ("OffloadingConnector", "OffloadingConnector-2")),
    ],
)
def test_given_names_come_first_the_rest_get_numbers(connectors: Any, given: list[str], names: tuple[str, ...]) -> None:
    assert read({"connectors": connectors, "kvobs": {"names": given}}).names == names


def test_as_many_connectors_are_allowed_as_have_sendable_numbers() -> None:
    assert len(read({"connectors": TWO * (CONNECTORS_AT_MOST // 2)}).names) == CONNECTORS_AT_MOST


def test_other_keys_beside_connectors_are_not_ours() -> None:
    assert read({"connectors": TWO, "somebody_elses": 1}).names


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, ".connectors: is missing, allowed: a list with at least one connector"),
        ({"connectors": None}, ".connectors: found None, allowed: a list with at least one connector"),
        ({"connectors": []}, ".connectors: found [], allowed: a list with at least one connector"),
        ({"connectors": "NixlConnector"}, ".connectors: found 'NixlConnector', allowed: a list"),
        ({"connectors": TWO * 501}, ".connectors: found 1002 connectors, allowed: at most 1000"),
        ({"connectors": ["x"]}, ".connectors[0]: found 'x', allowed: an object with the key 'kv_connector'"),
        ({"connectors": [{}]}, ".connectors[0].kv_connector: is missing, allowed: the name of a connector class"),
        ({"connectors": [{"kv_connector": 7}]}, ".connectors[0].kv_connector: found 7, allowed: the name of a"),
        ({"connectors": TWO, "kvobs": ["a"]}, ".kvobs: found ['a'], allowed: an object"),
    ],
)
def test_bad_connectors_and_options_that_are_no_object_are_named(extra: dict[str, Any], message: str) -> None:
    (mistake,) = mistakes(**extra)
    assert f"kv_connector_extra_config{message}" in mistake


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_polcy": "first"}, "kvobs.load_polcy: unknown option, allowed: 'names', 'load_policy', 'min_tokens', "),
        ({"exporter": {"prot": 9464}}, "kvobs.exporter.prot: unknown option, allowed: 'port', 'host', 'web_config', "),
        ({"exporter": {"port": 0}}, "kvobs.exporter.port: found 0, allowed: an integer from 1 up to 65535"),
        (
            {"exporter": {"port": None}},
            "kvobs.exporter: found {'port': None}, allowed: a port, or null with otlp_metrics",
        ),
        ({"exporter": {"host": ""}}, "kvobs.exporter.host: found '', allowed: at least 1 character"),
        ({"exporter": True}, "kvobs.exporter: found True, allowed: 'auto', an object, or null"),
        ({"exporter": "always"}, "kvobs.exporter: found 'always', allowed: 'auto', an object, or null"),
        ({"load_policy": "best"}, "kvobs.load_policy: found 'best', allowed: 'first' or 'longest'"),
        ({"load_policy": 1}, "kvobs.load_policy: found 1, allowed: 'first' or 'longest'"),
        ({"min_tokens": 16}, "kvobs.min_tokens: found 16, allowed: an object"),
        ({"min_tokens": {CPU: 0}}, "min_tokens.OffloadingConnector: found 0, allowed: an integer from 1"),
        ({"min_tokens": {CPU: 1.5}}, "kvobs.min_tokens.OffloadingConnector: found 1.5, allowed: an integer"),
        (
            {"link_gbps": {CPU: 0}},
            "kvobs.link_gbps.OffloadingConnector: found 0, allowed: a number above 0 up to 1",
        ),
        (
            {"link_gbps": {CPU: "400"}},
            "kvobs.link_gbps.OffloadingConnector: found '400', allowed: a number above 0 up to 1",
        ),
        ({"link_gbps": {"x": 400}}, "kvobs.link_gbps.x: unknown connector, allowed: "),
        ({"min_tokens": {"x": 16}}, "kvobs.min_tokens.x: unknown connector, allowed: "),
        ({"lookup_timeout_ms": 0}, "kvobs.lookup_timeout_ms: found 0, allowed: a number above 0 up to 1"),
        ({"lookup_timeout_ms": "5"}, "kvobs.lookup_timeout_ms: found '5', allowed: a number"),
        ({"lookup_timeout_ms": True}, "kvobs.lookup_timeout_ms: found True, allowed: a number"),
        (
            {"lookup_timeout_ms": float("inf")},
            "kvobs.lookup_timeout_ms: found inf, allowed: a number above 0 up to 1",
        ),
        ({"wait_for": "some"}, "kvobs.wait_for: found 'some', allowed: 'all' or 'earlier'"),
        ({"wait_for": "earlier", "load_policy": "longest"}, "'earlier' with load_policy 'longest', which compares all"),
        ({"request_report": "yes"}, "kvobs.request_report: found 'yes', allowed: true or false"),
        ({"request_report": "always"}, "kvobs.request_report: found 'always', allowed: true or false"),
        ({"request_report": 1}, "kvobs.request_report: found 1, allowed: true or false"),
        ({"request_report": None}, "kvobs.request_report: found None, allowed: true or false"),
        ({"request_log": "log"}, "kvobs.request_log: found 'log', allowed: 'stderr', or an absolute path"),
        ({"request_log": "stdout"}, "kvobs.request_log: found 'stdout', allowed: 'stderr', or an absolute path"),
        ({"request_log": "/a\0"}, "kvobs.request_log: found '/a\\x00', allowed: 'stderr', or an absolute path"),
        ({"request_log": True}, "kvobs.request_log: found True, allowed: a string"),
        ({"tracing": {"levle": "off"}}, "kvobs.tracing.levle: unknown option, allowed: 'level', 'propagate'"),
        ({"tracing": {"level": "all"}}, "kvobs.tracing.level: found 'all', allowed: 'off', 'requests' or 'calls'"),
        ({"tracing": {"propagate": "yes"}}, "kvobs.tracing.propagate: found 'yes', allowed: true or false"),
        ({"tracing": None}, "kvobs.tracing: found None, allowed: an object"),
        ({"slow_load_ms": None}, "kvobs.slow_load_ms: found None, allowed: a number"),
        ({"slow_load_ms": 0}, "kvobs.slow_load_ms: found 0, allowed: a number above 0 up to 1"),
        (
            {"slow_call_ms": 1e15},
            "found 1000000000000000.0, allowed: a number above 0 up to 1000000000",
        ),
        ({"verify": {"sample_ratio": 0}}, "sample_ratio: found 0, allowed: a number above 0 up to 1"),
        ({"verify": {"sample_ratio": 2}}, "sample_ratio: found 2, allowed: a number above 0 up to 1"),
        ({"\ud800": 1}, r"kvobs.\ud800: unknown option, allowed: 'names', "),
        (
            {"best_effort_slow_ms": 0},
            "kvobs.best_effort_slow_ms: found 0, allowed: a number above 0 up to 1",
        ),
        ({"best_effort": ["x"]}, "kvobs.best_effort[0]: found 'x', allowed: "),
        (
            {"reset_after_failed_sync_load": ["x"]},
            "kvobs.reset_after_failed_sync_load: found ['x'], but this option is",
        ),
        ({"verify": {"reset_after_failed_sync_load": []}}, "kvobs.verify.reset_after_failed_sync_load: unknown option"),
        ({"names": "cpu"}, "kvobs.names: found 'cpu', allowed: a list of names"),
        ({"names": [1]}, "kvobs.names[0]: found 1, allowed: a string"),
        ({"names": ["a", "b", "c"]}, "kvobs.names: found 3 names, allowed: at most 2, one per connector"),
        ({"names": ["a", "a"]}, "kvobs.names: found 'a' for 2 connectors, allowed: a distinct name for each"),
        ({"names": [""]}, "kvobs.names[0]: found '', allowed: 1 to 64 letters, digits"),
        ({"names": ["a b"]}, "kvobs.names[0]: found 'a b', allowed: 1 to 64 letters, digits"),
        ({"names": ["x" * 65]}, "kvobs.names[0]: found 'xxx"),
        ({"names": ["kvobs"]}, "kvobs.names[0]: found 'kvobs', which is reserved"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    (mistake,) = mistakes(connectors=TWO, kvobs=options)
    assert message in mistake


def test_all_errors_are_reported_at_once_and_valid_options_kept() -> None:
    kvobs = {"tracing": {"level": "all", "x": 1}, "nmaes": [], "names": ["a", "a"], "best_effort": ["a", "q"],
             "min_tokens": {"z": 1, "a": 0}, "slow_call_ms": 0, "request_report": True}  # fmt: skip
    configuration, found = validate({"connectors": [*TWO, {}], "kvobs": kvobs})
    assert [mistake.path.removeprefix("kv_connector_extra_config.") for mistake in found] == [
        "connectors[2].kv_connector", "kvobs.min_tokens.a", "kvobs.slow_call_ms", "kvobs.tracing.level",
        "kvobs.tracing.x", "kvobs.nmaes", "kvobs.names", "kvobs.best_effort[1]", "kvobs.min_tokens.z",
    ]  # fmt: skip
    assert found[7].allowed == "'a', '2'"
    assert configuration.options == Options(names=("a", "a"), best_effort=("a", "q"), request_report=True)
    assert configuration.names == (CPU, f"{CPU}-2", "2")
    assert str(ConfigError(found)).count("\n- ") == 9
    assert "\n" not in str(ConfigError(found[:1]))


def test_an_option_that_is_gone_is_refused_with_what_to_do() -> None:
    kvobs = {"reset_after_failed_sync_load": [], "best_effort": [CPU]}
    configuration, (found,) = validate({"connectors": TWO, "kvobs": kvobs})
    assert str(found).startswith(
        "kv_connector_extra_config.kvobs.reset_after_failed_sync_load: found [], but this option is gone. "
        "Fix: remove it. After a failed synchronous load, clear the caches of the connectors that the log names; "
    )
    assert configuration.options == Options(best_effort=(CPU,))


@pytest.mark.parametrize(
    ("old", "found", "fix"),
    [
        ({"isolate": [CPU]}, "isolate: found ['OffloadingConnector']", "best_effort"),
        ({"isolate_slow_ms": 5}, "isolate_slow_ms: found 5", "best_effort_slow_ms"),
        ({"report": True}, "report: found True", "request_report"),
        ({"verify": {"share": 0.1}}, "verify.share: found 0.1", "verify.sample_ratio"),
        ({"verify": {"fail": True}}, "verify.fail: found True", 'verify.on_mismatch: "recompute" for true, '),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(old: dict[str, Any], found: str, fix: str) -> None:
    _, (mistake,) = validate({"connectors": TWO, "kvobs": old})
    assert f"kvobs.{found}, but this option is gone. Fix: use {fix}" in str(mistake)


def test_the_old_variable_is_refused_with_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOBS_STOCK", "aggregator")
    _, (mistake,) = validate({"connectors": TWO})
    assert str(mistake) == (
        "environment variable KVOBS_STOCK: found 'aggregator', but this option is gone. Fix: use KVOBS_USE_VLLM."
    )


def test_found_allowed_and_fix_stay_separate_in_another_process() -> None:
    with pytest.raises(ConfigError) as error:
        read({"connectors": TWO, "kvobs": {"load_policy": "best"}})
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.mistakes, str(again)) == (error.value.mistakes, str(error.value))
    path, fix = "kv_connector_extra_config.kvobs.load_policy", "use an allowed value, or remove the option"
    assert again.mistakes == (Finding(path, "found 'best'", "'first' or 'longest'", fix),)


@pytest.mark.parametrize(
    ("value", "stock"),
    [("", set()), ("aggregator", {"aggregator"}), ("block_copy", {"block_copy"}),
     (" block_copy, aggregator,", {"aggregator", "block_copy"})],
)  # fmt: skip
def test_kvobs_use_vllm_names_vllms_parts_that_stay(
    value: str, stock: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOBS_USE_VLLM", value)
    assert read({"connectors": TWO}).stock == stock


def test_unknown_part_in_kvobs_use_vllm_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOBS_USE_VLLM", "agregator,block_copy,all")
    stock = "environment variable KVOBS_USE_VLLM: found {}, allowed: aggregator, block_copy"
    assert mistakes(connectors=TWO) == (stock.format("'agregator'"), stock.format("'all'"))
