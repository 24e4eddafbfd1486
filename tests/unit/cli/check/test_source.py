"""A configuration is read from JSON, a `vllm serve` line, and a YAML file; rewritten, it keeps all that it says."""

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import _expand_json_human_readable_numbers
from vllm.utils.argparse_utils import FlexibleArgumentParser

import kvobs
from kvobs.children.configured import read_specs
from kvobs.cli.check.source import Router, parse, read, rewrite, router_of
from tests.support.configurations import check

CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
TEXT = json.dumps(CONFIG)
LINE = f"vllm serve Qwen/Qwen3-0.6B --port 8100 --kv-transfer-config '{TEXT}' --max-model-len 4096"


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"\ufeff{TEXT}",
        LINE,
        LINE.replace("config '", "config='"),
        LINE.replace("--kv-transfer-config", "--kv_transfer_config"),
        LINE.replace(" --", " \\\n  --"),
        f"#!/bin/sh\n# the server's start\nexec env A=1 {LINE} &\n",
        f"--kv-transfer-config '{TEXT}'",
        "vllm serve m --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role=kv_both",
        f"model: m\nkv-transfer-config: '{TEXT}'\n",
        "# of the decode servers\nkv_transfer_config:\n  kv_connector: NixlConnector\n  kv_role: kv_both\n",
        "kv_connector: NixlConnector\nkv_role: kv_both\n",
    ],
)
def test_all_forms_say_the_same(text: str, tmp_path: Path) -> None:
    assert [source.config for source in parse(text)] == [CONFIG]
    path = tmp_path / "config"
    path.write_text(text, encoding="utf-8")
    assert read(str(path))[0].config == CONFIG
    assert text != LINE or read(text)[0].config == CONFIG, "a line may be the argument itself"


X = "--kv-transfer-config.kv_connector_extra_config"


@pytest.mark.parametrize(
    ("line", "twice"),
    [
        (f"{X}.cpu_bytes_to_use 1000 {X}.spec_name CPUOffloadingSpec", 0),
        (f"{X}.a 10G {X}.b=1.5g {X}.c 1.5G {X}.d 8k,9k {X}.e true", 0),
        (f"{X}.kvobs.names+ nixl {X}.kvobs.names+=cpu,disk {X}.a '[1]' {X}.a+ x", 0),
        (f"{X} '{{\"a\": 1}}' {X}.b 2 {X}.c '{{\"x\": 1}}' {X}.c '{{\"y\": 2}}'", 0),
        (f"{X}.a 1 {X}.a.b 2 {X}.c.d 1 {X}.c 2", 2),
        ('--kv-transfer-config \'{"a": 80G, "b": "80G", "c": [1k, 2.5m, 3t], "d": -2k, "e": 1e3}\'', 0),
    ],
)
def test_names_with_dots_and_numbers_with_suffixes_are_what_vllms_parser_makes_of_them(line: str, twice: int) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv-transfer-config", type=lambda text: json.loads(_expand_json_human_readable_numbers(text)))
    (source,) = parse(f"vllm serve m {line}")
    assert source.config == parser.parse_args(["m", *shlex.split(line)]).kv_transfer_config
    assert ["twice" in warning.found for warning in source.warnings] == [True] * twice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the configuration is empty"),
        ('{"a": true,\n "b": [1,\n]}', "a comma before a closing bracket: "),
        ("{'kv_connector': 'NixlConnector'}", "written as in Python; JSON has double quotes"),
        ("{kv_connector:NixlConnector,kv_role:kv_both}", "its quotes are missing, as if a shell had removed them"),
        (f"'{TEXT}'", "it has quotes around it, remove them"),
        (f"{TEXT} {TEXT}", "not valid JSON: Extra data: line 1 column "),
        (TEXT[:-1], "not valid JSON: Expecting ',' delimiter: line 1 column "),
        ("[]", "is a list, needs an object"),
        ("[" * 100_000, "nested too deep"),
        ("vllm serve m --kv-transfer-config {{}}", "has {{}}, whose value is not known here"),
        ("vllm serve m --port 8000", "has no --kv-transfer-config"),
        ("vllm serve m --kv-transfer-config", "--kv-transfer-config has no value"),
        ("vllm serve m --kv-transfer-config '{", "a quote that is not closed"),
        ("vllm serve m --kv-transfer-config '{\"a\": 1,}'", "a comma before a closing bracket"),
        ("vllm serve m --kv-transfer-config '{\"a\": 1.5G}'", "not valid JSON: Expecting ',' delimiter"),
        ('{\n  // both\n  "kv_role": "kv_both"}', "it has comments, which JSON does not allow: "),
        ('{“kv_role”: "kv_both"}', 'it has typographic quotes, write " in their place: '),
        ("python3 -m dynamo.vllm --model m --connector nixl", "Dynamo makes the configuration of --connector"),
        ("port: null\nkv_transfer_config: {}", "--port null, beside the configuration, is not"),
        ("kv_connector: [", "neither JSON nor valid YAML"),
        ("kv-transfer-config: 5", "is a int, needs an object"),
    ],
)
def test_any_other_text_is_named_for_what_it_is(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        raise ValueError(parse(text)[0].problem)


@given(st.text() | st.text(alphabet="{}[]\"':,\n -#kv_connetrasf=.\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """And nothing else is raised."""
    for given_text in (text, f"kv_connector: {text}", f"vllm serve m --kv-transfer-config {text}"):
        try:
            config: Any = [source.config for source in parse(given_text)]
        except ValueError:
            continue
        json.dumps(config)


# --- rewritten to use kvobs

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
def test_a_rewritten_configuration_has_kvobs_and_passes_the_check(stock: dict[str, Any]) -> None:
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
def test_a_multi_connector_keeps_all_it_says_and_gets_the_names_that_kvobs_gives_anyway(stock: dict[str, Any]) -> None:
    config = rewrite(stock)
    bare = copy.deepcopy(stock) | {"kv_connector_module_path": "kvobs"}
    extra, old = config.pop("kv_connector_extra_config"), stock.pop("kv_connector_extra_config")
    assert config == {**stock, "kv_connector_module_path": "kvobs"}
    named, options = extra.pop("kvobs"), old.pop("kvobs", {})
    assert extra == old
    assert named.pop("names") == [spec.name for spec in read_specs(KVTransferConfig(**bare))]
    assert named == {key: value for key, value in options.items() if key != "names"}


@given(singles)
def test_a_single_connector_is_the_only_child_and_sees_what_it_saw(stock: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("connector", ["kvobs", "x" * 65, "Größe", "a b"])
def test_a_class_that_no_child_may_be_called_by_gets_no_name(connector: str) -> None:
    """It has one in kvobs all the same."""
    config = rewrite({"kv_connector": connector, "kv_role": "kv_both"})
    assert config["kv_connector_extra_config"] == {
        "connectors": [{"kv_connector": connector, "kv_role": "kv_both"}]
    } | ({"kvobs": {"names": ["kvobs-2"]}} if connector == "kvobs" else {})
    another = {"kv_connector": "MultiConnector", "kv_connector_module_path": "somebody.elses", "kv_role": "kv_both"}
    assert rewrite(another)["kv_connector_extra_config"]["connectors"] == [another]


@pytest.mark.parametrize("extra", [None, [], "text", {}, {"connectors": 3}, {"connectors": [{}], "kvobs": 1}])
def test_what_is_wrong_stays_as_wrong_as_it_was(extra: Any) -> None:
    """The check reports it."""
    stock = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = rewrite(stock)
    assert config == stock | {"kv_connector_module_path": "kvobs"}
    assert check(config).mistakes
