"""A configuration is read from JSON, a `vllm serve` line, and a YAML file."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.engine.arg_utils import _expand_json_human_readable_numbers

from kvobs.cli.check.launch import attempt
from kvobs.cli.check.source import parse, read

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
        f"args=(\n  --port 8100\n  --kv-transfer-config\n  '{TEXT}'\n)\nvllm serve m \"${{args[@]}}\"\n",
        f"ARGS=(--kv-transfer-config '{TEXT}')\n",
        f"{LINE}\\",
        f"serve:\n\t{LINE}\n",
        f"{{ cd m; {LINE}; }}\n",
        f'[[ -n "$X" ]] || exit\n{LINE}\n',
        f"#!/bin/sh\n# the server's start\nexec env A=1 {LINE} &\n",
        f"--kv-transfer-config '{TEXT}'",
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


def test_numbers_with_suffixes_are_read_as_vllms_parser_does() -> None:
    text = '{"a": 80G, "b": "80G", "c": [1k, 2.5m, 3t], "d": -2k, "e": 1e3}'
    (source,) = parse(f"vllm serve m --kv-transfer-config '{text}'")
    assert source.config == json.loads(_expand_json_human_readable_numbers(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the configuration is empty"),
        ('{"a": true,\n "b": [1,\n]}', "no comma before a closing bracket"),
        ("{'kv_connector': 'NixlConnector'}", "needs double quotes around names and strings"),
        ("{kv_connector:NixlConnector,kv_role:kv_both}", "needs double quotes around names and strings"),
        (
            f"vllm serve m --kv-transfer-config {TEXT}",
            "a shell removes double quotes that are not within single quotes",
        ),
        (f'vllm serve m --kv-transfer-config "{TEXT}"', "a shell removes double quotes that are not within single"),
        (f"{TEXT} {TEXT}", "not valid JSON: Extra data: line 1 column "),
        (TEXT[:-1], "not valid JSON: Expecting ',' delimiter: line 1 column "),
        ("[]", "is of type list, not an object"),
        ("[" * 100_000, "nested too deep"),
        ("vllm serve m --kv-transfer-config {{}}", "has {{}}, whose value is not known here"),
        ("vllm serve m --kv-transfer-config {{ kv_config }}", "has {{, whose value is not known here"),
        (f"vllm serve m --kv-transfer-config '{TEXT[:1]}\\\n{TEXT[1:]}'", "not valid JSON: Expecting property name"),
        (f"args:\n- >-\n  --kv-transfer-config='{TEXT}'", "no shell removes them here"),
        ("modelSpec: {lmcacheConfig: {enabled: true}}", "the chart makes a --kv-transfer-config from lmcacheConfig"),
        ("args: [-m, dynamo.vllm, --connector, kvbm]", "Dynamo makes the configuration from --connector"),
        ("vllm serve m --port 8000", "has no --kv-transfer-config"),
        ("vllm serve m --kv-transfer-config", "not valid JSON: Expecting value: line 1"),
        ("vllm serve m --kv-transfer-config '{", "a quote that is not closed"),
        ("vllm serve m --kv-transfer-config '{\"a\": 1.5G}'", "not valid JSON: Expecting ',' delimiter"),
        ("port: null\nkv_transfer_config: {}", "--port null, next to the configuration, is not"),
        ("kv_connector: [", "neither JSON nor valid YAML"),
        ("kv_connector: !!int", "neither JSON nor valid YAML"),
        ("kv_connector: !!timestamp x", "neither JSON nor valid YAML"),
        (f'{{"a": {"9" * 400}k}}', "not valid JSON: cannot convert float infinity to integer"),
        ("kv-transfer-config: 5", "is of type int, not an object"),
    ],
)
def test_text_that_can_not_be_read_has_its_reason(text: str, says: str) -> None:
    (source,) = attempt("", parse, text)
    assert says in source.findings[0].found


@given(st.text() | st.text(alphabet="{}[]\"':,\n -#kv_connetrasf=.\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """And nothing else is raised."""
    for given_text in (text, f"kv_connector: {text}", f"vllm serve m --kv-transfer-config {text}"):
        json.dumps([source.config for source in attempt("", parse, given_text)])


@pytest.mark.parametrize(
    ("stdin", "says"),
    [(None, "the configuration is empty"), (io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"), "no file with UTF-8 text")],
    ids=["closed", "not UTF-8"],
)
def test_stdin_that_cannot_be_read_is_an_error(stdin: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    (source,) = read("-")
    assert says in str(source.findings[0])


def test_a_variable_with_a_strange_name_is_none_of_the_engine() -> None:
    env = "env: [{name: [A], value: b}, {name: KVOBS_ENABLE, value: '1'}]"
    (source,) = parse(f"image: vllm\nargs: [--kv-transfer-config, '{TEXT}']\n{env}\n")
    assert source.environment["KVOBS_ENABLE"] == "1"
    assert source.config == CONFIG
