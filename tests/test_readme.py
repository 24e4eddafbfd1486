"""The README says what is: its options, metrics, commands and configuration are compared with the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.main import get_command

from kvobs.cli import app
from kvobs.config import Options, read
from kvobs.signals import CALL_DURATION, SIGNALS
from kvobs.spans import ATTRIBUTES, SPANS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    section = README.split(f"# {heading}\n", 1)[1]
    lines = section[section.index("\n|") + 1 :].splitlines()
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def options(model: type[BaseModel], prefix: str = "") -> list[list[str]]:
    """Return the rows of a model's fields, those of a model within it one by one."""
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            found += options(type(field.default), f"{name}.")
        else:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            found.append([f"`{prefix}{name}`", f"`{json.dumps(default)}`", str(field.description)])
    return found


def test_the_table_of_options_is_complete_and_true() -> None:
    assert rows("Options") == options(Options)


def test_the_table_of_spans_is_complete_and_true() -> None:
    expected = []
    for span in SPANS.values():
        subject = f" {{{span.subject.removeprefix('kv_transfer.')}}}" if span.subject else ""
        expected.append([f"`{span.name}{subject}`", span.process, span.covers])
    assert rows("Traces") == expected


def test_the_table_of_attributes_is_complete_and_true() -> None:
    assert rows("Attributes") == [[f"`{name}`", says] for name, says in ATTRIBUTES.items()]


def test_the_table_of_metrics_is_complete_and_true() -> None:
    expected = []
    for signal in SIGNALS:
        labels = "; ".join(
            f"`{label}`" + (f": {', '.join(values)}" if len(values) and values != CALL_DURATION.labels["hook"] else "")
            for label, values in signal.labels.items()
        )
        expected.append([f"`{signal.name}`", signal.kind.value, labels, signal.help])
    assert rows("Metrics") == expected


def test_the_table_of_versions_is_what_their_engines_did() -> None:
    results = json.loads((ROOT / "tests/versions/results.json").read_text())
    expected = [
        [version, ", ".join(f"{loads} from `{name}`" for name, loads in children.items())]
        for version, children in results.items()
    ]
    assert [row[:2] for row in rows("Compatibility")] == expected


def test_the_configuration_is_valid() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    config = json.loads(block)
    assert read(config["kv_connector_extra_config"]).names == ("cpu", "nixl")
    assert config["kv_connector_module_path"] == "kvobs"


def test_who_reads_from_whom_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = re.findall(r"^    \$ kvobs (topology .*)\n((?:    .*\n|\n)+)", README, re.MULTILINE)[0]
    app(command.split(), standalone_mode=False)
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert printed == [line.removeprefix("    ") for line in shown.rstrip().splitlines()]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", README))))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|kvobs)/[\w./]+?)`", README))))
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+\.py)`", README))))
def test_every_module_exists(name: str) -> None:
    assert (ROOT / "kvobs" / name).exists()


COMMANDS = sorted(set(re.findall(r"(?:^    (?:\$ )?|`|\$\()kvobs ([a-z][^`\n#|)]*)", README, re.MULTILINE)))


def test_commands_are_found() -> None:
    assert {line.split()[0] for line in COMMANDS} == set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_its_options_exist(line: str) -> None:
    command: Any = get_command(app)
    words = line.split()
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)] if words else command
        if not words:
            break
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
