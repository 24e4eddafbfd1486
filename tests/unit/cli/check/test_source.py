"""A configuration is read from JSON, a `vllm serve` line, and a YAML file; any other text is named for what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        f"#!/bin/sh\n# the server's start\nexec env A=1 {LINE} &\n",
        f"--kv-transfer-config '{TEXT}'",
        "vllm serve m --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role=kv_both",
        f"model: m\nkv-transfer-config: '{TEXT}'\n",
        "# of the decode servers\nkv_transfer_config:\n  kv_connector: NixlConnector\n  kv_role: kv_both\n",
        "kv_connector: NixlConnector\nkv_role: kv_both\n",
    ],
)
def test_all_forms_say_the_same(text: str, tmp_path: Path) -> None:
    assert parse(text).config == CONFIG
    path = tmp_path / "config"
    path.write_text(text, encoding="utf-8")
    assert read(str(path)).config == CONFIG


def test_a_line_may_be_the_argument_itself() -> None:
    assert read(LINE).config == CONFIG


def test_dotted_names_are_nested_and_their_values_json_where_they_are() -> None:
    line = "vllm serve m --kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use 1000"
    line += " --kv-transfer-config.kv_connector_extra_config.spec_name CPUOffloadingSpec"
    extra = {"cpu_bytes_to_use": 1000, "spec_name": "CPUOffloadingSpec"}
    assert parse(line).config == {"kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m -tp 4 --disable-log-stats --otlp-traces-endpoint=http://c:4317 --kv-transfer-config '{TEXT}'",
        f"tensor-parallel-size: 4\ndisable-log-stats: true\notlp_traces_endpoint: http://c:4317\n"
        f"kv-transfer-config: '{TEXT}'\n",
    ],
)
def test_the_options_beside_it_are_read(text: str) -> None:
    flags = parse(text).flags
    assert str(flags["tensor-parallel-size"]) == "4"
    assert (flags["disable-log-stats"], flags["otlp-traces-endpoint"]) == (True, "http://c:4317")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the configuration is empty"),
        (" \n", "the configuration is empty"),
        ('{"a": 1,}', "a comma before a closing bracket: "),
        ('{"a": true,\n "b": [1,\n]}', "a comma before a closing bracket: Expecting value: line 3 column 1"),
        ("{'kv_connector': 'NixlConnector'}", "written as in Python; JSON has double quotes"),
        ('{"a": True}', "written as in Python"),
        ("{kv_connector:NixlConnector,kv_role:kv_both}", "its quotes are missing, as if a shell had removed them"),
        (f"'{TEXT}'", "it has quotes around it, remove them"),
        (f"{TEXT} {TEXT}", "not valid JSON: Extra data: line 1 column "),
        (TEXT[:-1], "not valid JSON: Expecting ',' delimiter: line 1 column "),
        ("[]", "is a list, needs an object"),
        ("null", "is a NoneType, needs an object"),
        ("[" * 100_000, "nested too deep"),
        ('{"kv_role": }', "not valid JSON: Expecting value: line 1"),
        ("vllm serve m --port 8000", "has no --kv-transfer-config"),
        ("vllm serve m --kv-transfer-config", "--kv-transfer-config has no value"),
        ("vllm serve m --kv-transfer-config '{", "a quote that is not closed"),
        ("vllm serve m --kv-transfer-config '{\"a\": 1,}'", "a comma before a closing bracket"),
        ("vllm serve m --kv-transfer-config.a 1 --kv-transfer-config.a.b 1", "a has a value already"),
        ("kv_connector: [", "neither JSON nor valid YAML"),
        ("kv-transfer-config: 5", "is a int, needs an object"),
    ],
)
def test_any_other_text_is_named_for_what_it_is(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=".*") as error:
        parse(text)
    assert says in str(error.value)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(TEXT, encoding="utf-16")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read(str(path))


@given(st.text() | st.text(alphabet="{}[]\"':,\n -#kv_connetrasf=.\\", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """And nothing else is raised."""
    for given_text in (text, f"kv_connector: {text}", f"vllm serve m --kv-transfer-config {text}"):
        try:
            config: Any = parse(given_text).config
        except ValueError:
            continue
        json.dumps(config)
