"""A mistake is found where it is, and ends the start; nothing else does."""

import copy
import io
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console

from kvobs.cli.check.command import as_dict, headline, lines, tables
from kvobs.cli.check.flags import Flags
from kvobs.schema.config import PATH, ConfigError, read
from kvobs.schema.findings import Finding
from kvobs.schema.options import Options
from kvobs.testing import Script
from tests.support.configurations import TWO, check, config_of, layerwise, paths, scripted, start, starts

NOT_A_CLASS = len


def isolating(*connectors: dict[str, Any], policy: str = "recompute") -> dict[str, Any]:
    """Return a configuration whose last connector is isolated."""
    return config_of(connectors, {"best_effort": [connectors[-1]["kv_connector"]]}, kv_load_failure_policy=policy)


def named(connector: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", **more}


def elsewhere(connector: str, module: str) -> dict[str, Any]:
    return config_of([named(connector, kv_connector_module_path=module)])


WITHIN = named("MultiConnector", kv_connector_module_path="kvobs", kv_connector_extra_config={"connectors": TWO})
BAD: dict[str, tuple[Any, list[str]]] = {
    "no role": (config_of([{"kv_connector": "ExampleConnector"}]), ["connectors[0].kv_role"]),
    "wrong role": (config_of([{**TWO[0], "kv_role": "both"}]), ["connectors[0].kv_role"]),
    "no role on top": (config_of(kv_role=None), ["kv_role"]),
    "misspelt key": (config_of([{**TWO[0], "kv_rol": 1}]), ["connectors[0].kv_rol"]),
    "misspelt key on top": (config_of(kv_load_policy="first"), ["kv_load_policy"]),
    "wrong port": (config_of([TWO[0], {**TWO[1], "kv_port": "high"}]), ["connectors[1].kv_port"]),
    "unknown class": (config_of([named("NixlConector")]), ["connectors[0].kv_connector"]),
    "no module": (elsewhere("ExampleConnector", "no.such"), ["connectors[0].kv_connector"]),
    "empty module": (elsewhere("ExampleConnector", ""), ["connectors[0].kv_connector"]),
    "no class": (elsewhere("ExampleConnector", "json"), ["connectors[0].kv_connector"]),
    "a function": (elsewhere("NOT_A_CLASS", __name__), ["connectors[0].kv_connector"]),
    "another class": (elsewhere("Script", "kvobs.testing"), ["connectors[0].kv_connector"]),
    "broken class": (elsewhere("BrokenConnector", __name__), ["connectors[0].kv_connector"]),
    "no library": (config_of([named("LMCacheConnectorV1")]), ["connectors[0].kv_connector"]),
    "no library for a worker": (config_of([named("MooncakeConnector")]), ["connectors[0].kv_connector"]),
    "no connectors": (config_of([]), ["connectors"]),
    "no extra": ({key: value for key, value in config_of().items() if key != PATH}, ["connectors"]),
    "extra is a list": (config_of() | {PATH: []}, [PATH]),
    "connector is text": (config_of(["ExampleConnector", TWO[0]]), ["connectors[0]"]),
    "isolated, policy fail": (isolating(scripted(), policy="fail"), ["kv_load_failure_policy"]),
    "isolated, hands KV over": (isolating(scripted(), named("NixlConnector")), ["kvobs.best_effort"]),
    "isolated, producer": (isolating(layerwise("kv_producer")), ["kvobs.best_effort"]),
    "isolated, unknown": (
        config_of(kvobs={"best_effort": ["nixl"]}, kv_load_failure_policy="recompute"), ["kvobs.best_effort[0]"]
    ),
    "kvobs within kvobs": (config_of([scripted(), WITHIN]), ["connectors[1].kv_connector"]),
    "kvobs under another name": (config_of() | {"kv_connector": "Multi"}, ["kv_connector"]),
    "policy": (config_of(kv_load_failure_policy="recomputed"), ["kv_load_failure_policy"]),
    "no name at all": ({"kv_role": "kv_both"}, ["kv_connector"]),
    "single, wrong role": ({"kv_connector": "ExampleConnector", "kv_role": "both"}, ["kv_role"]),
    "single, no role": ({"kv_connector": "ExampleConnector"}, ["kv_role"]),
}  # fmt: skip

CURES = {
    "no role": 'add "kv_role": "kv_both"', "isolated, hands KV over": "remove it from the list",
    "no class": "correct kv_connector, or", "isolated, policy fail": 'set it to "recompute" at the top level',
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*MooncakeConnectorWorker.__del__")  # that of one that was not built to its end
@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_is_found_where_it_is_and_ends_the_start(kind: str) -> None:
    config, where = BAD[kind]
    Script("ScriptedConnector")
    checked = check(config)
    assert paths(checked) == where
    assert all(finding.says and finding.fix for finding in checked.mistakes)
    assert CURES.get(kind, "") in checked.mistakes[0].fix
    with pytest.raises(Exception):  # noqa: B017, PT011 whatever vLLM raises
        start(config)


def test_layouts_that_differ_are_a_mistake() -> None:
    config = config_of([scripted("HndConnector"), scripted("NhdConnector")], {"names": ["one", "two"]})
    checked = check(config)
    assert paths(checked) == ["connectors"]
    assert "one needs HND, two needs NHD" in checked.mistakes[0].says
    with pytest.raises(ValueError, match="one needs HND, two needs NHD"):
        start(config)


def test_all_mistakes_are_found_in_one_run() -> None:
    """Of the top level, the options, and each connector, whose class is looked at though its role is wrong."""
    bad = [{"kv_connector": "NixlConector", "kv_role": "both"}, {**TWO[1], "x": 1}, 7]
    checked = check(config_of(bad, {"load_policy": "best", "nmaes": []}, kv_prot=1), Flags(True, "http://x"))
    assert paths(checked) == [
        "kv_prot", "connectors[2]", "kvobs.load_policy", "kvobs.nmaes", "connectors[0].kv_role", "connectors[1].x",
        "--disable-log-stats, --otlp-traces-endpoint", "connectors[0].kv_connector",
    ]  # fmt: skip
    fixes = [finding.fix for finding in checked.mistakes]
    assert (fixes[0], fixes[3], fixes[7]) == ("use 'kv_port'", "use 'names'", "use 'NixlConnector'")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["first", "longest", "calls", "ExampleConnector", "kvobs", "vllm", "recompute"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["level", "dir", "x"]), inner),
    max_leaves=3,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*Options.model_fields, "nmaes", "a: b"]), VALUES, max_size=4))
def test_every_option_that_is_refused_is_reported_and_no_other(options: dict[str, Any]) -> None:
    """The two connectors may be isolated, or reset: nothing is wrong with them but what the options say."""
    refused: tuple[Finding, ...] = ()
    try:
        read({"connectors": TWO, "kvobs": options})
    except ConfigError as error:
        refused = error.mistakes
    checked = check(config_of(kvobs=options, kv_load_failure_policy="recompute"))
    assert checked.mistakes == list(refused)


SOME_KEYS = (
    "kv_role", "kv_port", "kv_buffer_device", "engine_id", "kv_load_failure_policy", "best_effort", "names", "x"
)  # fmt: skip
SOME_VALUES = VALUES | st.sampled_from(["kv_both", "kv_consumer", ["b"], ["a", "b"], "1", "fail"])


@given(st.data())
def test_the_check_finds_a_mistake_exactly_where_the_start_fails(data: st.DataObject) -> None:
    """Over configurations with some key or other changed, at the top level, in a connector, or in the options."""
    config = copy.deepcopy(config_of(kvobs={"names": ["a", "b"]}, kv_load_failure_policy="recompute"))
    extra = config[PATH]
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.sampled_from([config, *extra["connectors"], extra["kvobs"]]))
        place[data.draw(st.sampled_from(SOME_KEYS))] = data.draw(SOME_VALUES)
    assert (check(config).mistakes == []) == starts(config)


KEYS = st.sampled_from(["kv_connector", "kv_connector_module_path", "kv_role", "names", "best_effort", "tracing", "x"])
SOME_CLASS = st.sampled_from(["NixlConnector", "x", 1])
ENTRY = st.fixed_dictionaries({}, optional={"kv_connector": SOME_CLASS, "kv_role": st.just("kv_both") | st.integers()})
ANYTHING = st.one_of(
    st.sampled_from([None, True, 1, 0.5, "", "x", "kvobs", "kv_both", [], {}, [1], {"x": 1}]),
    st.fixed_dictionaries({}, optional={"connectors": st.integers() | st.lists(ENTRY | st.integers(), max_size=2)}),
    st.fixed_dictionaries({
        "connectors": st.lists(ENTRY, max_size=2), "kvobs": st.integers() | st.dictionaries(KEYS, VALUES, max_size=2)
    }),
)  # fmt: skip
CONNECTORS = ["MultiConnector", "ExampleConnector", None, 1]


@given(st.dictionaries(KEYS | st.just(PATH), ANYTHING, max_size=4), st.sampled_from(CONNECTORS))
def test_any_configuration_has_an_answer(config: dict[str, Any], connector: Any) -> None:
    """And that can be printed, and sent as JSON."""
    checked = check({**config, "kv_connector": connector})
    json.dumps(as_dict(checked))
    parts = [headline(checked), tables(checked), *lines(checked)]
    Console(file=io.StringIO()).print(*parts)
    assert checked.mistakes or starts({**config, "kv_connector": connector})
